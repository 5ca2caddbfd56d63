# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Runs arms side by side and says what was measured.

Every prompt goes through every arm before the next prompt, in an order that moves on with every prompt, so that
whatever the machine does meanwhile hits all arms alike. The prefill is told apart from decoding by when the first
tokens reach the streamer, which costs nothing; an arm that does not stream gets one more run of a single token. Every
arm's tokens are compared with those of plain greedy `generate`.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from .arms import Arm
from .prompts import COLUMNS, Question


REFERENCE = "plain"


@dataclass
class Answer:
    """One run of one arm on one prompt."""

    tokens: list[int]
    first: int  # tokens that came with the prefill
    prefill_seconds: float
    decode_seconds: float
    rounds: int | None  # verifications, where the arm tells
    tokens_in_rounds: int | None
    accepted: int | None
    stats: dict[str, Any] | None


@dataclass
class Item:
    """One prompt: a turn of a question, and what every arm answered, once per repeat."""

    column: str
    input_ids: torch.Tensor
    answers: dict[str, list[Answer]] = field(default_factory=lambda: defaultdict(list))


class _Clock(BaseStreamer):
    """Notes when tokens arrive and how many at once."""

    def __init__(self) -> None:
        self.arrivals: list[tuple[float, int]] = []
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self.arrivals.append((time.perf_counter(), value.numel()))
        self._prompt_seen = True

    def end(self) -> None:
        pass


def run_arm(arm: Arm, input_ids: torch.Tensor, max_new_tokens: int) -> Answer:
    """One timed run. `input_ids` has shape `[1, L]`."""
    threads = torch.get_num_threads()
    if arm.threads is not None:
        torch.set_num_threads(arm.threads)
    try:
        inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
        clock = _Clock() if arm.streams else None
        tokens, stats, seconds, began = _timed(arm, inputs, max_new_tokens, clock)
        if clock is not None:
            first_at, first = clock.arrivals[0]
            prefill = first_at - began
        else:
            first, prefill = 1, min(_timed(arm, inputs, 1, None)[2], seconds)
    finally:
        torch.set_num_threads(threads)
    rounds = in_rounds = accepted = None
    if stats is not None:
        rounds, in_rounds, accepted = stats["rounds"], stats["tokens_in_rounds"], stats["accepted_tokens"]
    elif arm.rounds_stream:
        rounds, in_rounds = len(clock.arrivals), len(tokens)
        accepted = in_rounds - rounds
    return Answer(tokens, first, prefill, seconds - prefill, rounds, in_rounds, accepted, stats)


def _timed(arm: Arm, inputs, max_new_tokens: int, clock: _Clock | None):
    _synchronize(arm.target.device)
    began = time.perf_counter()
    tokens, stats = arm.generate(inputs, max_new_tokens, clock)
    _synchronize(arm.target.device)
    return tokens, stats, time.perf_counter() - began, began


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def run_arms(
    arms: list[Arm],
    questions: list[Question],
    encode: Callable[[list[dict[str, str]]], torch.Tensor],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_new_tokens: int,
    repeats: int,
    warm_up_tokens: int | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Item]:
    """All arms on all turns of all questions. The first arm is plain `generate`; what it answers goes into the next
    turn's prompt of every arm, so that all see the same prompts.

    Args:
        encode: a conversation to input ids of shape `[1, L]`.
        warm_up_tokens (`int`, *optional*): length of the untimed run that every arm makes first; all of
            `max_new_tokens` by default, 0 for none.
        progress: called before every run with what runs.
    """
    items: dict[tuple[int, int], Item] = {}
    warm_up_tokens = max_new_tokens if warm_up_tokens is None else warm_up_tokens
    if warm_up_tokens:
        first = encode([{"role": "user", "content": questions[0].turns[0]}])
        for arm in arms:
            progress(f"warm-up, {arm.name}")
            run_arm(arm, first, warm_up_tokens)
    turn_number = 0
    for _ in range(repeats):
        for q, question in enumerate(questions):
            conversation: list[dict[str, str]] = []
            for t, text in enumerate(question.turns):
                conversation.append({"role": "user", "content": text})
                if (q, t) not in items:
                    items[q, t] = Item(question.column, encode(conversation))
                item = items[q, t]
                shift = turn_number % len(arms)
                turn_number += 1
                for arm in arms[shift:] + arms[:shift]:
                    progress(arm.name)
                    item.answers[arm.name].append(run_arm(arm, item.input_ids, max_new_tokens))
                reply = item.answers[REFERENCE][0].tokens
                conversation.append({"role": "assistant", "content": tokenizer.decode(reply, skip_special_tokens=True)})
    return list(items.values())


def summarize(arms: list[Arm], items: list[Item], model: PreTrainedModel) -> dict[str, dict[str, Any]]:
    """The `"arms"` of a result: one entry an arm, in the shape that `demo` and `bench` write.

    Args:
        model (`PreTrainedModel`): the target, to look up how close the call was where two texts part.
    """
    return {arm.name: _summary(arm, items, model) for arm in arms}


def _summary(arm: Arm, items: list[Item], model: PreTrainedModel) -> dict[str, Any]:
    rates, ratios = _rates(arm.name, items)
    parted = [_parting(item, arm.name) for item in items]
    answers = [answer for item in items for answer in item.answers[arm.name]]
    gaps = [_top2_gap(model, *where) for where in parted if where is not None]
    columns = {}
    for column in sorted({item.column for item in items}, key=lambda c: (COLUMNS.index(c) if c in COLUMNS else 99, c)):
        part = [item for item in items if item.column == column]
        column_rates, column_ratios = _rates(arm.name, part)
        columns[column] = {
            "tokens_per_second": statistics.median(column_rates),
            "ratio_to_plain": statistics.median(column_ratios),
            "mean_accepted_tokens": _tokens_per_round([a for item in part for a in item.answers[arm.name]]),
        }
    stats = add_up([answer.stats for answer in answers if answer.stats is not None])
    return {
        "tokens_per_second": statistics.median(rates),
        "spread": [min(rates), max(rates)],
        "ratio_to_plain": statistics.median(ratios),
        "accepted_per_round": _per_round(answers, "accepted"),
        "hit_rate": stats["cache_hits"] / stats["rounds"] if stats.get("rounds") and "cache_hits" in stats else None,
        "time": _time_split(stats, len(answers) // len(items)),
        "identical": sum(where is None for where in parted),
        "prompts": len(items),
        "largest_gap": max(gaps, default=None),
        "mean_accepted_tokens": _tokens_per_round(answers),
        "prefill_seconds": statistics.median(answer.prefill_seconds for answer in answers),
        "columns": columns,
        "settings": arm.settings(),
        "stats": stats or None,
    }


def _rates(name: str, items: list[Item]) -> tuple[list[float], list[float]]:
    """Decoded tokens a second of every repeat, and each over plain's of the same repeat."""
    repeats = range(len(items[0].answers[name]))
    rates = [_rate([item.answers[name][i] for item in items]) for i in repeats]
    plain = [_rate([item.answers[REFERENCE][i] for item in items]) for i in repeats]
    return rates, [rate / base if base else 0.0 for rate, base in zip(rates, plain)]


def _rate(answers: list[Answer]) -> float:
    tokens = sum(len(answer.tokens) - answer.first for answer in answers)
    seconds = sum(answer.decode_seconds for answer in answers)
    return tokens / seconds if seconds > 0 else 0.0


def _per_round(answers: list[Answer], what: str) -> float | None:
    told = [answer for answer in answers if answer.rounds]
    return sum(getattr(answer, what) for answer in told) / sum(answer.rounds for answer in told) if told else None


def _tokens_per_round(answers: list[Answer]) -> float:
    """Spec-Bench's mean accepted tokens, the target's own included: 1 for plain decoding."""
    return _per_round(answers, "tokens_in_rounds") or 1.0


def _parting(item: Item, name: str) -> tuple[torch.Tensor, list[int]] | None:
    """The prompt and the tokens up to where an arm's text first parts from plain's, or `None` if it never does."""
    reference = item.answers[REFERENCE][0].tokens
    for answer in item.answers[name]:
        if answer.tokens != reference:
            same = 0
            while same < min(len(answer.tokens), len(reference)) and answer.tokens[same] == reference[same]:
                same += 1
            return item.input_ids, reference[:same]
    return None


@torch.no_grad()
def _top2_gap(model: PreTrainedModel, input_ids: torch.Tensor, tokens: list[int]) -> float:
    """How far the best logit lies above the second after the common text: near 0 is a tie that rounding may turn."""
    common = torch.cat([input_ids, input_ids.new_tensor([tokens])], dim=1)
    logits = model(input_ids=common, logits_to_keep=1).logits[0, -1].float()
    best, second = logits.topk(2).values.tolist()
    return best - second


def add_up(stats: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of several runs as those of one: counts and seconds are added, rates are left to be made from them."""
    total: dict[str, Any] = {}
    for run in stats:
        for name, value in run.items():
            if isinstance(value, list) and all(isinstance(count, (int, float)) for count in value):
                sums = total.setdefault(name, [])
                sums.extend([0] * (len(value) - len(sums)))
                for i, count in enumerate(value):
                    sums[i] += count
            elif name in _COUNTS or name.endswith("_seconds"):
                total[name] = total.get(name, 0) + value
            elif isinstance(value, str) and name in ("execution", "backup"):
                names = total.setdefault(name, {})
                names[value] = names.get(value, 0) + 1
    predictions = [run["predicted_speedup"] for run in stats if run.get("predicted_speedup")]
    if predictions:
        total["predicted_speedup"] = statistics.fmean(predictions)
    return total


_COUNTS = (
    "rounds", "new_tokens", "drafted_tokens", "accepted_tokens", "cache_hits", "cache_misses", "tokens_in_rounds",
    "tokens_on_hit", "row_hits", "row_rounds",
)  # fmt: skip


def _time_split(stats: dict[str, Any], repeats: int) -> dict[str, float] | None:
    """Seconds of one repeat. `verify`, `wait` and `other` make up the decoding; `draft` is what the draft worked,
    within `wait` where the models take turns, beside `verify` where they overlap."""
    if "verify_seconds" not in stats:
        return None
    verify, draft, wait = (stats[f"{part}_seconds"] for part in ("verify", "draft", "wait"))
    other = stats["total_seconds"] - stats["prefill_seconds"] - verify - wait
    split = {"verify": verify, "draft": draft, "wait": wait, "other": max(other, 0.0)}
    return {name: seconds / repeats for name, seconds in split.items()}
