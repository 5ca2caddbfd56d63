# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""`hf-saguaro bench`: the arms on the user's models and prompts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ..config import SaguaroConfig
from ..errors import SaguaroError
from . import arms as arms_module
from . import report
from .arms import Arm, build_arm
from .environment import describe_model, environment
from .loading import MODEL_HELP, LoadedPair, load_pair
from .measure import REFERENCE, Answer, run_arm, run_arms, summarize
from .progress import Progress
from .prompts import read_prompts
from .simulate import SimulatedTarget


DEFAULT_ARMS = "plain,stock,stock-k3,saguaro,sync,async"


def add_parser(commands) -> None:
    parser = commands.add_parser("bench", help="measure arms side by side on your models and prompts")
    parser.set_defaults(run=run)
    parser.add_argument("target", help=MODEL_HELP)
    parser.add_argument("draft", help="likewise")
    parser.add_argument("--prompts", help="a .jsonl file in Spec-Bench's format; the package's own prompts by default")
    parser.add_argument("--limit", type=int, help="questions to take, evenly over the columns; all by default")
    parser.add_argument(
        "--arms", default=DEFAULT_ARMS, help=f"comma-separated (default: {DEFAULT_ARMS}): {arms_module.ARM_HELP}"
    )
    parser.add_argument("--config", help="JSON object of SaguaroConfig fields for this project's arms, or a file of it")
    parser.add_argument(
        "--repeats", type=int, default=3, help="interleaved runs of which the median counts (default: 3)"
    )
    parser.add_argument("--threads", default="", help="torch threads: N for all arms, or ARM=N,ARM=N")
    parser.add_argument(
        "--simulate",
        metavar="TIME",
        help="put a target in the place of yours that takes TIME a forward without using a core: seconds, or Nx for N "
        "passes of the draft",
    )
    parser.add_argument("--json", metavar="OUT", help="write the result there")
    add_common(parser)
    add_report(parser)


def add_common(parser: argparse.ArgumentParser) -> None:
    """What all commands that generate share."""
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a prompt (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="auto", help="cpu, cuda or cuda:N (default: a GPU where there is one)")


def add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--report", metavar="DIR", help="write a picture and a table of what speculation did into DIR")


def run(args: argparse.Namespace) -> int:
    check_counts(tokens=args.tokens, repeats=args.repeats, limit=args.limit)
    report.check_report(args.report)
    config, threads = read_fields(args.config, "--config", SaguaroConfig), _threads(args.threads)
    questions = read_prompts(args.prompts, args.limit)
    pair = load_pair(args.target, args.draft, dtype=args.dtype, device=args.device)
    target, encode, simulated = pair.target, pair.encode, None
    if args.simulate:
        simulated = _simulated_seconds(args.simulate, pair)
        target = SimulatedTarget(pair.target, simulated)

        def encode(conversation):
            input_ids = pair.encode(conversation)
            target.learn(input_ids, args.tokens)
            return input_ids

    names = arm_names(args.arms)
    unknown = sorted(set(threads) - {None} - set(names))
    if unknown:
        raise SaguaroError(f"--threads names {', '.join(unknown)}, which --arms does not run.")
    arms = [build_arm(name, target, pair.draft, config, threads.get(name, threads.get(None))) for name in names]
    turns = sum(len(question.turns) for question in questions)
    with Progress(len(arms) * (1 + args.repeats * turns), "bench") as progress:
        items = run_arms(
            arms, questions, encode, pair.tokenizer,
            max_new_tokens=args.tokens, repeats=args.repeats, progress=progress.step,
        )  # fmt: skip
    settings = {"max_new_tokens": args.tokens, "repeats": args.repeats, "prompts": args.prompts, "config": config}
    result = make_result(pair, {**settings, "simulated_seconds": simulated}, summarize(arms, items, pair.target))
    print(report.table(result["arms"]))
    if time := report.time_table(result["arms"]):
        print(f"\n{time}")
    print(f"\n{report.column_table(result['arms'])}")
    if args.json:
        report.write_json(result, args.json)
    if args.report:
        print("\nreport:", *report.speculation_report(result["arms"], args.report))
    return 0


def make_result(pair: LoadedPair, settings: dict[str, Any], arms: dict[str, Any]) -> dict[str, Any]:
    """The one JSON shape that `demo` and `bench` write."""
    return {
        "environment": environment(pair.target.device),
        "models": {
            "target": describe_model(pair.target, pair.target_name),
            "draft": describe_model(pair.draft, pair.draft_name),
        },
        "settings": settings,
        "arms": arms,
    }


def arm_names(text: str) -> list[str]:
    """The arms asked for, in their order, with plain `generate` first: everything is compared with it."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    return [REFERENCE, *dict.fromkeys(name for name in names if name != REFERENCE)]


def check_counts(**counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None and count < 1:
            raise SaguaroError(f"--{name.replace('_', '-')} is {count}; use 1 or more.")


def read_fields(text: str | None, option: str, config_class) -> dict[str, Any]:
    """The fields of a config given as a JSON object, or as the name of a file of one; checked by making the config."""
    if text is None:
        return {}
    try:
        if not text.lstrip().startswith("{"):
            text = Path(text).read_text(encoding="utf-8")
        fields = json.loads(text)
    except (OSError, ValueError) as error:
        raise SaguaroError(f"{option} is neither a JSON object nor a file of one: {error}.") from None
    if not isinstance(fields, dict):
        raise SaguaroError(
            f"{option} is a JSON {type(fields).__name__}; give an object of {config_class.__name__} fields."
        )
    config_class.from_dict(fields)
    return fields


def _threads(text: str) -> dict[str | None, int]:
    """`{arm: threads}`; the key `None` is for all others."""
    threads: dict[str | None, int] = {}
    for part in filter(None, text.split(",")):
        name, _, count = part.rpartition("=")
        if not count.isdigit() or int(count) < 1:
            raise SaguaroError(f"--threads has {part!r}; give N, or ARM=N,ARM=N.")
        threads[name or None] = int(count)
    return threads


def _simulated_seconds(text: str, pair: LoadedPair) -> float:
    try:
        if text.endswith("x"):
            return float(text[:-1]) * _draft_pass_seconds(pair)
        return float(text)
    except ValueError:
        raise SaguaroError(f"--simulate {text} is no time; give seconds (0.05) or passes of the draft (4x).") from None


def _draft_pass_seconds(pair: LoadedPair) -> float:
    """Seconds of one token of the draft's own plain decoding."""
    alone = Arm("draft", pair.draft, None)
    input_ids = pair.encode([{"role": "user", "content": "What does a cactus store?"}]).to(pair.draft.device)
    answers: list[Answer] = [run_arm(alone, input_ids, 24) for _ in range(3)]
    return min(a.decode_seconds / max(len(a.tokens) - a.first, 1) for a in answers)
