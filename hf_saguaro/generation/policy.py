# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""What the next round should be, decided from what earlier rounds measured.

The rule is Theorem 7 (theory.py) on moving estimates: seconds of a verify by width, of a draft pass, of a tree round;
acceptance by depth and by the draft's own confidence; the hit rate. Nothing here can change the text.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import nn

from ..config import MAX_DRAFT_TOKENS, SaguaroConfig
from . import theory
from .acceptance import Proposal
from .fan_out import allocate


AUTO_DRAFT_TOKENS = 8
AUTO_TREE_DEPTH = 4
AUTO_FAN_OUT = 3
_DECAY = 0.1
_PROBE_ROUNDS = 4


class Average:
    """A moving mean that starts as the plain mean of what it has seen."""

    def __init__(self, prior: float | None = None, weight: float = 0.0):
        self.value, self.weight = prior, weight

    def add(self, value: float) -> None:
        self.weight += 1
        share = max(_DECAY, 1 / self.weight)
        self.value = value if self.value is None else self.value + share * (value - self.value)


@dataclass
class RoundPlan:
    """One round: how the draft works in it, the longest chain it makes, the rows it serves."""

    execution: str
    depth: int
    rows: list[int]

    @property
    def overlaps(self) -> bool:
        return self.execution == "async"


class Estimates:
    """What a pair of models has shown so far on its devices. Kept between calls, so that the next one starts warm."""

    def __init__(self) -> None:
        self.prefill: float | None = None  # seconds of the target's last prefill
        self.step = Average()  # seconds of a plain decoding step
        self.verify: dict[str, Average] = {}  # seconds of a verify, by execution
        self.draft_pass = Average()  # seconds of one narrow draft pass on the critical path
        self.tree_round = Average()  # seconds of glue and a tree of the depth that is planned
        self.token: dict[str, Average] = {}  # seconds per emitted token, by execution
        self.hit_rate = Average(0.6, 1.0)
        self.drafted = [Average(0.7, 1.0) for _ in range(MAX_DRAFT_TOKENS)]  # acceptance of drafted tokens, by depth
        self.copied = [Average(0.3, 1.0) for _ in range(MAX_DRAFT_TOKENS)]  # and of copied ones
        self.by_confidence = [Average((i + 0.5) / 10, 2.0) for i in range(10)]
        self.rounds = 0
        self.next_probe = 0
        self.probe_gap = 32

    def step_seconds(self) -> float | None:
        """Seconds of one step of the target, from the nearest thing that was measured."""
        return self.step.value or min((average.value for average in self.verify.values()), default=self.prefill)

    def accept_rates(self, depth: int, copied: bool = False) -> list[float]:
        rates = self.copied if copied else self.drafted
        return [min(max(rate.value, 0.02), 0.98) for rate in rates[:depth]]


_PAIRS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def estimates_of(target: nn.Module, draft: nn.Module | None) -> Estimates:
    """The estimates of a pair of models where they are now, made at first use and forgotten with the models."""
    if draft is None:
        return Estimates()
    places = _PAIRS.setdefault(target, weakref.WeakKeyDictionary()).setdefault(draft, {})
    return places.setdefault((str(target.device), str(draft.device), torch.get_num_threads()), Estimates())


class Policy:
    """Plans rounds for one `generate` call.

    Args:
        config (`SaguaroConfig`): what the user fixed stays fixed.
        estimates (`Estimates`): of this pair of models.
        can_overlap (`bool`): whether the draft has hardware to run on beside the target.
    """

    def __init__(self, config: SaguaroConfig, estimates: Estimates, can_overlap: bool):
        self.config, self.estimates = config, estimates
        self._can_overlap = can_overlap
        self._fixed_depth = None if config.num_assistant_tokens == "auto" else config.num_assistant_tokens

    @property
    def ends_chains(self) -> bool:
        """Whether a chain may end before its planned length, on the draft's own doubt."""
        return self._fixed_depth is None

    def plan(self, rows: list[int], room: int) -> RoundPlan:
        """The next round, for running `rows` of which one may still get `room` tokens."""
        execution = self._execution()
        if execution == "autoregressive" or room <= 1:
            return RoundPlan(execution, 0, rows)
        wanted = self._fixed_depth or (self._tree_depth() if execution == "async" else AUTO_DRAFT_TOKENS)
        return RoundPlan(execution, min(wanted, room - 1), rows)

    def _execution(self) -> str:
        if self.config.execution != "auto":
            return self.config.execution
        seen = self.estimates
        if seen.step.value is None:
            return "autoregressive"  # one plain step first: the unit that everything else is measured in
        modes = ("sync", "async") if self._can_overlap else ("sync",)
        for mode in modes:
            if mode not in seen.token or seen.token[mode].weight < _PROBE_ROUNDS:
                if self._worth_a_probe(mode):
                    return mode
        cost = {mode: average.value for mode, average in seen.token.items() if mode in modes}
        cost["autoregressive"] = seen.step.value
        best = min(cost, key=cost.get)
        if seen.rounds >= seen.next_probe and len(cost) > 1:
            # Text changes: try the runner-up for a few rounds, less and less often while it stays behind.
            others = sorted((mode for mode in cost if mode != best), key=cost.get)
            if seen.rounds >= seen.next_probe + 2:
                seen.next_probe = seen.rounds + seen.probe_gap
                seen.probe_gap = min(2 * seen.probe_gap, 512)
            return others[0]
        return best

    def _worth_a_probe(self, mode: str) -> bool:
        """A mode that measured costs already rule out is not tried: even full acceptance would not pay."""
        seen = self.estimates
        if seen.draft_pass.value is None or mode in seen.token and seen.token[mode].weight >= 1 and (
            seen.token[mode].value > 1.5 * seen.step.value
        ):
            return seen.draft_pass.value is None
        return seen.draft_pass.value < seen.step.value

    def _tree_depth(self) -> int:
        """The longest chain whose preparation fits into a verify (T_p <= 1), within reason."""
        seen = self.estimates
        if seen.draft_pass.value is None or "async" not in seen.verify:
            return AUTO_TREE_DEPTH
        fits = int(seen.verify["async"].value / seen.draft_pass.value) - 1
        return min(max(fits, 1), AUTO_DRAFT_TOKENS)

    def fan_out(self, proposal: Proposal) -> list[int]:
        """Forks for every accept length of the chain that is being verified: `proposal.width + 1` counts."""
        config, width = self.config, proposal.width
        if isinstance(config.fan_out, list):
            return [*config.fan_out[:width], config.fan_out[-1]]
        forks = AUTO_FAN_OUT if config.fan_out == "auto" else config.fan_out
        if config.fan_out_shape == "uniform":
            return [forks] * (width + 1)
        return allocate(self.estimates.accept_rates(width, copied=all(proposal.point_mass)), forks * (width + 1))

    @property
    def may_overlap(self) -> bool:
        """Whether any round of this call may need the draft's own thread."""
        return self.config.execution == "async" or self.config.execution == "auto" and self._can_overlap

    @property
    def overlaps_prefill(self) -> bool:
        """Whether both models read the prompt at once."""
        return self.config.execution == "async"

    @property
    def prepares(self) -> bool:
        """Whether anything is ever prepared."""
        fan_out = self.config.fan_out
        return any(fan_out) if isinstance(fan_out, list) else fan_out != 0

    def completes_chains(self, plan: RoundPlan) -> bool:
        """Whether a miss gets a chain of the full length whatever it costs: K was fixed, and so was the backup or the
        order of work."""
        return self._fixed_depth is not None and (self.config.backup == "draft" or plan.execution == "sync")

    def pass_pays(self, confidence: list[float]) -> bool:
        """Whether one more draft pass, with the target waiting for it, is worth its time.

        With a fixed K chains are completed, unless the draft is so slow that a pass outlasts two steps of the target.

        Args:
            confidence (`list[float]`): the draft's probability of every token of the chain so far.
        """
        seen = self.estimates
        step = seen.step_seconds()
        if seen.draft_pass.value is None or step is None:
            return True
        if self._fixed_depth is not None:
            return seen.draft_pass.value < 2 * step
        survives = 1.0
        for value in confidence:
            survives *= self._calibrated(value)
        rates = seen.accept_rates(len(confidence) + 1)
        gain = survives * rates[-1] * self._seconds_per_token()
        return gain > seen.draft_pass.value

    def _seconds_per_token(self) -> float:
        """What a token costs at present: the price that an accepted draft token saves."""
        seen = self.estimates
        costs = [average.value for average in seen.token.values() if average.weight >= 2]
        return min([*costs, seen.step_seconds()])

    def _calibrated(self, confidence: float) -> float:
        return self.estimates.by_confidence[min(int(confidence * 10), 9)].value

    # What was measured

    def saw_round(self, plan: RoundPlan, proposal: Proposal, accepted: dict[int, int], *, seconds: float,
                  verify_seconds: float, tokens: float) -> None:  # fmt: skip
        """Takes in one round.

        Args:
            accepted (`dict[int, int]`): accept lengths of the rows that ran.
            seconds, verify_seconds (`float`): of the whole round, and of the target's work in it.
            tokens (`float`): emitted, per row.
        """
        seen = self.estimates
        seen.rounds += 1
        if proposal.width == 0 and plan.execution == "autoregressive":
            seen.step.add(seconds)
            return
        seen.verify.setdefault(plan.execution, Average()).add(verify_seconds)
        seen.token.setdefault(plan.execution, Average()).add(seconds / max(tokens, 1))
        for row, length in accepted.items():
            if plan.overlaps:
                seen.hit_rate.add(proposal.hits[row])
            rates = seen.copied if proposal.point_mass[row] else seen.drafted
            for depth in range(min(length + 1, proposal.lengths[row])):
                rates[depth].add(depth < length)
                if proposal.confidence[row]:
                    seen.by_confidence[min(int(proposal.confidence[row][depth] * 10), 9)].add(depth < length)

    def saw_prefill(self, seconds: float) -> None:
        """Takes in the target's reading of the prompt: until a step has been seen, a bound for one."""
        self.estimates.prefill = seconds

    def saw_pass(self, seconds: float) -> None:
        """Takes in one narrow draft pass."""
        self.estimates.draft_pass.add(seconds)

    def saw_tree(self, seconds: float) -> None:
        """Takes in a whole tree: glue and all passes."""
        self.estimates.tree_round.add(seconds)

    def predicted_speedup(self, stats) -> float | None:
        """Theorem 7 on what this run measured: over plain decoding with one verify a token."""
        if not stats.rounds or not stats.verify_seconds:
            return None
        verify = stats.verify_seconds / stats.rounds
        wait = stats.wait_seconds / max(stats.cache_misses, 1)
        seen = self.estimates
        primary = (seen.tree_round.value or 0.0) / verify if stats.execution == "async" else 0.0
        rows = stats.row_rounds / stats.rounds
        return theory.ssd_speedup(
            stats.hit_rate, stats.tokens_per_round_on_hit / rows, stats.tokens_per_round_on_miss / rows, primary, wait / verify
        )
