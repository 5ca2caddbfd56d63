# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""`hf-saguaro adapt`: a prompt stream with adaptation on, and `hf-saguaro card`: what it leaves for a reader."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from ..adaptation import AdaptationConfig, FeedbackRecorder, OnlineAdapter
from ..config import SaguaroConfig
from ..errors import SaguaroError
from ..hub.model_card import adapter_card
from .arms import SaguaroArm
from .bench import add_common, check_counts, read_fields
from .environment import describe_model, environment
from .loading import MODEL_HELP, LoadedPair, load_pair
from .progress import Progress
from .prompts import Question, read_prompts
from .report import pyplot, write_json


RUN_FILE = "run.json"
PLOT_FILE = "acceptance.png"
# A chain of fixed length in every round, so that acceptance means the same from the first prompt to the last.
STEADY = {"num_assistant_tokens": 5, "execution": "sync", "backup": "draft"}
# Prompts over which acceptance is averaged where it is shown.
WINDOW = 20
_FLUSH_SECONDS = 120.0


def add_parsers(commands) -> None:
    parser = commands.add_parser("adapt", help="let the draft learn on a prompt stream; leaves adapter, card and plot")
    parser.set_defaults(run=run)
    parser.add_argument("target", help=MODEL_HELP)
    parser.add_argument("draft", help="likewise")
    parser.add_argument(
        "--prompts", required=True, help="a .jsonl file in Spec-Bench's format; the first turns make the stream"
    )
    parser.add_argument(
        "--output", required=True, metavar="DIR", help="gets the adapter, its card, history, run and plot"
    )
    parser.add_argument("--limit", type=int, help="questions to take, evenly over the columns; all by default")
    parser.add_argument("--passes", type=int, default=1, help="how often the stream is run (default: 1)")
    parser.add_argument(
        "--held-out",
        type=int,
        default=8,
        help="questions kept out of the stream, to measure before and after (default: 8)",
    )
    steady = ", ".join(f"{name}={value}" for name, value in STEADY.items())
    parser.add_argument(
        "--config", help=f"JSON object of SaguaroConfig fields, or a file of it; what it leaves open is {steady}"
    )
    parser.add_argument("--adaptation", help="JSON object of AdaptationConfig fields, or a file of it")
    parser.add_argument("--resume", action="store_true", help="go on with the adapter that lies in DIR")
    add_common(parser)
    card = commands.add_parser("card", help="write the model card anew from the measured run beside it")
    card.set_defaults(run=lambda args: write_card(args.folder))
    card.add_argument("folder", metavar="DIR", help="what `hf-saguaro adapt --output DIR` left")


def run(args: argparse.Namespace) -> int:
    check_counts(tokens=args.tokens, passes=args.passes, limit=args.limit)
    pyplot("the plot of `hf-saguaro adapt`")
    fields = steady_fields(args.config)
    learning = AdaptationConfig.from_dict(read_fields(args.adaptation, "--adaptation", AdaptationConfig))
    stream, held_out = _split(read_prompts(args.prompts, args.limit), args.held_out)
    pair = load_pair(args.target, args.draft, dtype=args.dtype, device=args.device)
    models = {
        "target": describe_model(pair.target, pair.target_name),
        "draft": describe_model(pair.draft, pair.draft_name),
    }

    runner = Runner(pair, fields, args.tokens)
    before = runner.accepted_on(held_out, "bare draft")
    adapter = (
        OnlineAdapter.from_pretrained(pair.draft, args.output) if args.resume else OnlineAdapter(pair.draft, learning)
    )
    with adapter:
        records = runner.stream(stream * args.passes, adapter, "adapting")
        adapter.flush(timeout=_FLUSH_SECONDS)
        adapter.pause()
        after = runner.accepted_on(held_out, "adapted draft")
        adapter.save_pretrained(args.output)
        result = {
            "environment": environment(pair.target.device),
            "models": models,
            "settings": {
                "prompts": args.prompts, "max_new_tokens": args.tokens, "passes": args.passes, "config": fields,
                "adaptation": adapter.config.to_dict(),
            },
            "stream": records,
            "held_out": {"prompts": len(held_out), "accepted_before": before, "accepted_after": after},
            "metrics": adapter.metrics(),
        }  # fmt: skip
    folder = Path(args.output)
    write_json(result, folder / RUN_FILE)
    _plot(result, folder / PLOT_FILE)
    write_card(folder)
    if held_out:
        print(f"held-out prompts: {before:.2f} accepted a round with the bare draft, {after:.2f} with the adapted one")
    print(f"written: {folder}")
    return 0


def steady_fields(text: str | None) -> dict[str, Any]:
    """`STEADY` with what `--config` says; the adaptation has options of its own."""
    fields = {**STEADY, **read_fields(text, "--config", SaguaroConfig)}
    SaguaroConfig.from_dict(fields)
    if "adaptation" in fields:
        raise SaguaroError("--config names `adaptation`, which this command sets itself; leave it out.")
    if fields["execution"] == "autoregressive":
        raise SaguaroError(
            "--config leaves the draft out (autoregressive), and there is nothing to learn from; say sync."
        )
    return fields


class Runner:
    """Generates from prompts and reads the acceptance off."""

    def __init__(self, pair: LoadedPair, fields: dict[str, Any], max_new_tokens: int):
        self.pair, self.fields, self.max_new_tokens = pair, fields, max_new_tokens

    def stream(
        self, questions: list[Question], adapter: OnlineAdapter | FeedbackRecorder, what: str
    ) -> list[dict[str, Any]]:
        """One record a prompt, with adaptation (or recording) on."""
        records: list[dict[str, Any]] = []
        every = max(1, len(questions) // 10)
        with Progress(len(questions), what) as progress:
            for number, question in enumerate(questions, 1):
                progress.step(f"accepted {_recent(records):.2f}, version {adapter.version}")
                records.append({**self._generate(question, adapter), "version": adapter.version})
                if number % every == 0 or number == len(questions):
                    progress.say(
                        f"prompt {number}/{len(questions)}: {_recent(records):.2f} accepted a round over the last "
                        f"{min(number, WINDOW)}, adapter version {adapter.version}"
                    )
        return records

    def accepted_on(self, questions: list[Question], what: str) -> float | None:
        """Accepted tokens a round with the draft as it is, over all questions."""
        with Progress(len(questions), what) as progress:
            records = []
            for question in questions:
                progress.step("")
                records.append(self._generate(question, None))
        return _mean(records)

    def _generate(self, question: Question, adapter: OnlineAdapter | FeedbackRecorder | None) -> dict[str, Any]:
        pair = self.pair
        arm = SaguaroArm("saguaro", pair.target, pair.draft, config=SaguaroConfig(**self.fields, adaptation=adapter))
        input_ids = pair.encode([{"role": "user", "content": question.turns[0]}])
        inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
        began = time.perf_counter()
        tokens, stats = arm.generate(inputs, self.max_new_tokens, None)
        return {
            "question_id": question.question_id,
            "category": question.category,
            "tokens": len(tokens),
            "rounds": stats["rounds"],
            "accepted": stats["accepted_tokens"],
            "seconds": time.perf_counter() - began,
        }


def _mean(records: list[dict[str, Any]]) -> float | None:
    rounds = sum(record["rounds"] for record in records)
    return sum(record["accepted"] for record in records) / rounds if rounds else None


def _recent(records: list[dict[str, Any]]) -> float:
    return _mean(records[-WINDOW:]) or 0.0


def _split(questions: list[Question], held_out: int) -> tuple[list[Question], list[Question]]:
    """(stream, held out): the latter spread over the file, so that it holds what the stream holds."""
    if held_out < 0 or held_out >= len(questions):
        raise SaguaroError(f"--held-out is {held_out}; with {len(questions)} questions use 0 to {len(questions) - 1}.")
    kept = {round((i + 0.5) * len(questions) / held_out - 0.5) for i in range(held_out)}
    stream = [question for i, question in enumerate(questions) if i not in kept]
    return stream, [question for i, question in enumerate(questions) if i in kept]


def _plot(result: dict[str, Any], path: Path) -> None:
    plot = pyplot("the plot of `hf-saguaro adapt`")
    records, held_out = result["stream"], result["held_out"]
    figure, axes = plot.subplots(figsize=(9, 4.2), layout="constrained")
    numbers = range(1, len(records) + 1)
    each = [_mean([record]) for record in records]
    axes.plot(
        numbers, [float("nan") if value is None else value for value in each], ".", alpha=0.35, label="one prompt"
    )
    axes.plot(numbers, [_recent(records[:n]) for n in numbers], label=f"mean of the last {WINDOW}")
    published = [n for n in numbers if n > 1 and records[n - 1]["version"] != records[n - 2]["version"]]
    for n in published:
        axes.axvline(n, color="gray", linewidth=0.8, linestyle=":", label="publication" if n == published[0] else None)
    if held_out["prompts"]:
        axes.axhline(held_out["accepted_before"], color="tab:red", linestyle="--", label="held out, bare draft")
        axes.axhline(held_out["accepted_after"], color="tab:green", linestyle="--", label="held out, adapted")
    axes.set(xlabel="prompt", ylabel="accepted tokens a round", title="Acceptance over the stream")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    plot.close(figure)


def write_card(folder: str | Path) -> int:
    """Writes `README.md` of an adapter folder from the run that lies beside it.

    Raises:
        SaguaroError: where there is no such run.
    """
    folder = Path(folder)
    try:
        result = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
        history = [json.loads(line) for line in (folder / "history.jsonl").read_text(encoding="utf-8").splitlines()]
        base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError) as error:
        raise SaguaroError(
            f"{folder} holds no measured run ({error}); make one with `hf-saguaro adapt ... --output {folder}`."
        ) from None
    text = adapter_card(folder.name, base, history, result["metrics"])
    (folder / "README.md").write_text(f"{text.rstrip()}\n\n{_measured(result)}", encoding="utf-8")
    return 0


def _measured(result: dict[str, Any]) -> str:
    records, held_out, machine = result["stream"], result["held_out"], result["environment"]
    window = min(WINDOW, len(records))
    lines = [
        "## Measured while it learned",
        "",
        f"![accepted tokens a round over the stream]({PLOT_FILE})",
        "",
        "| accepted tokens a round | |",
        "|---|---|",
        f"| first {window} prompts of the stream | {_recent(records[:window]):.2f} |",
        f"| last {window} prompts of the stream | {_recent(records):.2f} |",
    ]
    if held_out["prompts"]:
        lines += [
            f"| {held_out['prompts']} held-out prompts, bare draft | {held_out['accepted_before']:.2f} |",
            f"| the same prompts, adapted draft | {held_out['accepted_after']:.2f} |",
        ]
    models = result["models"]
    lines += [
        "",
        f"Target {models['target']['name']}, draft {models['draft']['name']}, {len(records)} prompts of up to "
        f"{result['settings']['max_new_tokens']} tokens from `{result['settings']['prompts']}`, on "
        f"{machine['device_name']} (torch {machine['torch']}, transformers {machine['transformers']}, commit "
        f"{machine['commit']}).",
    ]
    return "\n".join(lines) + "\n"
