# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""`hf-saguaro demo`: the main job, offline, on a model that a package ships."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

import torch
from transformers import TextStreamer

from . import pair as replica
from . import report
from .arms import build_arm
from .bench import add_common, add_report, check_counts, make_result
from .environment import available_cores
from .loading import MODEL_HELP, REPLICA, LoadedPair, load_pair
from .measure import run_arm, run_arms, summarize
from .progress import Progress
from .prompts import read_prompts


ARMS = ("plain", "stock", "saguaro", "sync", "async")
# What the measured part may take; the models are made and the text is streamed in about as much again.
MEASURED_SECONDS = 150
FEWEST_PROMPTS = 2
# Fewer than `bench` takes: all arms on the fewest prompts must fit into minutes on a slow machine, too.
TOKENS = 40
_WARM_UP_TOKENS = 8


def add_parser(commands) -> None:
    size = "0.8b"
    dropped = ",".join(map(str, replica.DROPPED_LAYERS))
    parser = commands.add_parser("demo", help="plain, stock assisted and Saguaro generation side by side, offline")
    parser.set_defaults(run=run)
    parser.add_argument("--target", default=f"replica:{size}", help=f"{MODEL_HELP} (default: replica:{size})")
    parser.add_argument(
        "--draft", default=f"replica:drop={dropped}", help=f"likewise (default: replica:drop={dropped})"
    )
    parser.add_argument("--prompts", help="a .jsonl file in Spec-Bench's format; the package's own prompts by default")
    parser.add_argument(
        "--prompts-count", type=int, help=f"prompts to measure on; by default what fits into {MEASURED_SECONDS} seconds"
    )
    parser.add_argument("--json", metavar="OUT", default="saguaro-demo.json", help="(default: saguaro-demo.json)")
    add_common(parser)
    add_report(parser)
    parser.set_defaults(tokens=TOKENS)


def run(args: argparse.Namespace) -> int:
    check_counts(tokens=args.tokens, prompts_count=args.prompts_count)
    report.check_report(args.report)
    questions = read_prompts(args.prompts)
    with Progress(1, "making the models") as progress:
        progress.step("")
        pair = load_pair(args.target, args.draft, dtype=args.dtype, device=args.device)
    print(_introduction(pair))
    arms = [build_arm(name, pair.target, pair.draft) for name in ARMS]
    _stream(pair, questions[0].turns[0], args.tokens)

    count = args.prompts_count or _affordable(pair, questions[0].turns[0], args.tokens)
    questions = questions[:count]
    for question in questions:
        question.turns = question.turns[:1]
    with Progress(len(arms) * (1 + len(questions)), "measuring") as progress:
        items = run_arms(
            arms, questions, pair.encode, pair.tokenizer,
            max_new_tokens=args.tokens, repeats=1, warm_up_tokens=_WARM_UP_TOKENS, progress=progress.step,
        )  # fmt: skip
    settings = {"max_new_tokens": args.tokens, "repeats": 1, "prompts": [question.turns[0] for question in questions]}
    result = make_result(pair, settings, summarize(arms, items, pair.target))
    print(f"\n{report.table(result['arms'])}\n\n{report.time_table(result['arms'])}\n\n{verdict(result)}")
    report.write_json(result, args.json)
    print(f"\nwritten: {args.json}", *(report.speculation_report(result["arms"], args.report) if args.report else ()))
    return 0


def verdict(result: dict[str, Any]) -> str:
    """What the table says, in words, also where it is not flattering."""
    arms = result["arms"]
    ratios = {name: arm["ratio_to_plain"] for name, arm in arms.items()}
    execution = Counter(arms["saguaro"]["stats"]["execution"]).most_common(1)[0][0]
    lines = [
        f"Saguaro wrote {ratios['saguaro']:.2f} times as fast as plain generate, stock assisted generation "
        f"{ratios['stock']:.2f} times; the default ran {execution} most of the time."
    ]
    if max(ratio for name, ratio in ratios.items() if name != "plain") < 1.05:
        lines.append(
            "Speculation does not pay on this machine: verifying several tokens at once costs it nearly as much as "
            "decoding them one by one."
        )
    overlap = arms["async"]["tokens_per_second"] / max(arms["sync"]["tokens_per_second"], 1e-9)
    if overlap >= 1.05:
        lines.append(
            f"Overlap pays here: the draft running ahead (async) is {overlap:.2f} times as fast as taking turns."
        )
    else:
        shared = f"{available_cores()} cores" if result["environment"]["device"] == "cpu" else "device"
        lines.append(
            f"Overlap gives nothing here: the draft running ahead (async) is {overlap:.2f} times as fast as taking "
            f"turns (sync), because it works on the same {shared} that the target can use itself. It gains where the "
            "draft has hardware of its own."
        )
    parted = {name: arm for name, arm in arms.items() if arm["identical"] < arm["prompts"]}
    if parted:
        gap = max(arm["largest_gap"] for arm in parted.values())
        lines.append(
            f"Not token for token the text of plain generate: {', '.join(parted)}. Where the texts part, the two best "
            f"logits are at most {gap:.3f} apart ({result['models']['target']['dtype']} rounds)."
        )
    else:
        lines.append("Every arm wrote exactly the text of plain generate.")
    return "\n".join(lines)


def _introduction(pair: LoadedPair) -> str:
    lines = []
    for name, model in ((pair.target_name, pair.target), (pair.draft_name, pair.draft)):
        size = sum(parameter.numel() for parameter in model.parameters()) / 1e9
        dtype = str(model.dtype).removeprefix("torch.")
        lines.append(f"{name}: {size:.2f} B parameters, {model.config.num_hidden_layers} layers, {dtype}")
    if pair.target_name.startswith(REPLICA):
        lines.append(
            "The target writes what SmolLM2-135M-Instruct writes, at the cost of a model of its size; the draft is "
            "that small model with layers left out. A benchmark device, made offline."
        )
    return "\n".join(lines)


def _stream(pair: LoadedPair, prompt: str, max_new_tokens: int) -> None:
    """The text as a user sees it come, and the warm-up of the arm that matters."""
    print(f"\n> {prompt}\n", flush=True)
    input_ids = pair.encode([{"role": "user", "content": prompt}])
    inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    streamer = TextStreamer(pair.tokenizer, skip_prompt=True, skip_special_tokens=True)
    build_arm("saguaro", pair.target, pair.draft).generate(inputs, max_new_tokens, streamer)


def _affordable(pair: LoadedPair, prompt: str, max_new_tokens: int) -> int:
    """How many prompts fit into the time, going by a short run of plain `generate`."""
    input_ids = pair.encode([{"role": "user", "content": prompt}])
    trial = run_arm(build_arm("plain", pair.target, pair.draft), input_ids, _WARM_UP_TOKENS)
    step = trial.decode_seconds / max(len(trial.tokens) - trial.first, 1)
    seconds = len(ARMS) * (trial.prefill_seconds + max_new_tokens * step)
    return max(FEWEST_PROMPTS, int(MEASURED_SECONDS / seconds))
