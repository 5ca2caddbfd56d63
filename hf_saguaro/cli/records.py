# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""`hf-saguaro record` and `hf-saguaro train`: learning apart from serving, on as many processes as there are."""

from __future__ import annotations

import argparse
import os

from transformers.utils import logging

from ..adaptation import AdaptationConfig, FeedbackRecorder, train_on_records
from .adapt import Runner, steady_fields
from .bench import add_common, check_counts, read_fields
from .loading import MODEL_HELP, load_model, load_pair
from .prompts import read_prompts


def add_parsers(commands) -> None:
    record = commands.add_parser("record", help="write what the target thinks of a prompt stream as a dataset")
    record.set_defaults(run=_record)
    record.add_argument("target", help=MODEL_HELP)
    record.add_argument("draft", help="likewise; any draft with this vocabulary can be trained on the records")
    record.add_argument("--prompts", required=True, help="a .jsonl file in Spec-Bench's format; the first turns count")
    record.add_argument("--output", required=True, metavar="DIR", help="gets parquet shards; may hold some already")
    record.add_argument("--limit", type=int, help="questions to take, evenly over the columns; all by default")
    record.add_argument("--config", help="JSON object of SaguaroConfig fields, or a file of it")
    record.add_argument("--top-k-logits", type=int, default=64, help="log-probabilities kept a token (default: 64)")
    add_common(record)
    train = commands.add_parser(
        "train",
        help="train an adapter on records; also under `accelerate launch --module hf_saguaro.cli.main train ...`",
    )
    train.set_defaults(run=_train)
    train.add_argument("draft", help=MODEL_HELP)
    train.add_argument("records", metavar="RECORDS", help="the folder that `hf-saguaro record` wrote")
    train.add_argument("--output", required=True, metavar="DIR", help="gets the adapter, if it beats the bare draft")
    train.add_argument("--epochs", type=int, default=1, help="passes over the records (default: 1)")
    train.add_argument("--batch-size", type=int, default=8, help="sequences a step and process (default: 8)")
    train.add_argument("--adaptation", help="JSON object of AdaptationConfig fields, or a file of it")
    train.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))


def _record(args: argparse.Namespace) -> int:
    check_counts(tokens=args.tokens, limit=args.limit, top_k_logits=args.top_k_logits)
    fields = steady_fields(args.config)
    questions = read_prompts(args.prompts, args.limit)
    pair = load_pair(args.target, args.draft, dtype=args.dtype, device=args.device)
    known = pair.draft.get_input_embeddings().num_embeddings
    with FeedbackRecorder(args.output, top_k_logits=args.top_k_logits, vocab_size=known) as recorder:
        Runner(pair, fields, args.tokens).stream(questions, recorder, "recording")
    print(f"written: {args.output}")
    return 0


def _train(args: argparse.Namespace) -> int:
    check_counts(epochs=args.epochs, batch_size=args.batch_size)
    learning = AdaptationConfig.from_dict(read_fields(args.adaptation, "--adaptation", AdaptationConfig))
    draft = load_model(args.draft, "draft", dtype=args.dtype)
    is_main = os.environ.get("RANK", "0") == "0"
    outcome = train_on_records(
        draft, args.records, args.output, learning, epochs=args.epochs, batch_size=args.batch_size,
        progress=lambda batches: logging.tqdm(batches, desc="training", disable=not is_main),
    )  # fmt: skip
    if is_main:
        figures = ", ".join(f"{name} {value:.3g}" for name, value in outcome.items() if isinstance(value, float))
        print(f"{outcome['steps']} steps; {outcome['reason']}; {figures}")
        print(f"written: {args.output}" if outcome["published"] else "nothing written: the bare draft stays ahead")
    return 0
