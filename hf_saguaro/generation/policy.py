# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""What the next round should be, decided from what earlier rounds measured. Nothing here can change the text.

The rule is Theorem 7 (theory.py) on moving estimates (estimates.py). Within a round it comes down to one question,
asked before every further draft token: are the chances that it and the next ones are accepted, times what a token costs
at present, worth the draft passes and the extra rows in the verify?
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..config import SaguaroConfig
from . import theory
from .acceptance import Proposal
from .estimates import Estimates, Rate, Typical
from .fan_out import allocate


AUTO_DRAFT_TOKENS = 8
AUTO_FAN_OUT = 3
# Tries of a mode that is not the best so far: rounds in a row (the first overlapped one finds nothing prepared), what they
# may cost at first, and their share of all time; and the share of plain steps that only measure.
_TRIAL_ROUNDS = {"sync": 2, "async": 3}
_FREE_STEPS, _TRIAL_SHARE, _STEP_SHARE = 3, 0.01, 0.005
# Draft tokens of a round that tries turns: without any it would try nothing. And those of a copy, as long as nothing is
# known about what they cost.
_TRIED_TOKENS, _UNMEASURED_COPY = 2, 3
# Share of the cores that a plain step may keep busy if the draft is to run beside it.
_BUSY = 0.6
# Rows of overlapped rounds from which on their hit rate is believed.
_SEEN_ROWS = 4


@dataclass
class RoundPlan:
    """One round: how the draft works in it, the longest chain it makes, the rows it serves."""

    execution: str
    depth: int
    rows: list[int]

    @property
    def overlaps(self) -> bool:
        return self.execution == "async"


class Policy:
    """Plans rounds for one `generate` call.

    Args:
        config (`SaguaroConfig`): what the user fixed stays fixed.
        estimates (`Estimates`): of this pair of models.
        can_overlap (`bool`): whether the draft has hardware to run on beside the target.
        cores (`int`, *optional*): where that is the cores that the target computes on, their number.
    """

    def __init__(self, config: SaguaroConfig, estimates: Estimates, can_overlap: bool, cores: int | None = None):
        self.config, self.estimates, self._cores = config, estimates, cores
        self._modes = ("sync", "async") if can_overlap else ("sync",)
        self._fixed_depth = None if config.num_assistant_tokens == "auto" else config.num_assistant_tokens
        self._trial = "autoregressive", 0  # the mode that is being tried, and for how many rounds more
        self._least_tokens = 0  # of the chain that is made in this round

    @property
    def may_overlap(self) -> bool:
        """Whether any round of this call may need the draft's own thread."""
        return self.config.execution == "async" or self.config.execution == "auto" and "async" in self._modes

    @property
    def overlaps_prefill(self) -> bool:
        """Whether both models read the prompt at once."""
        return self.config.execution == "async"

    @property
    def prepares(self) -> bool:
        """Whether anything is ever prepared."""
        fan_out = self.config.fan_out
        return any(fan_out) if isinstance(fan_out, list) else fan_out != 0

    # Before a round

    def plan(self, rows: list[int], room: int) -> RoundPlan:
        """The next round, for running `rows` of which one may still get `room` tokens."""
        execution = self.config.execution if self.config.execution != "auto" else self._best_execution()
        if execution == "autoregressive" or room <= 1:
            return RoundPlan(execution, 0, rows)
        wanted = self._fixed_depth or (self._tree_depth() if execution == "async" else AUTO_DRAFT_TOKENS)
        return RoundPlan(execution, min(wanted, room - 1), rows)

    def _best_execution(self) -> str:
        seen, self._least_tokens = self.estimates, 0
        if seen.step.value is None:
            return "autoregressive"  # one plain step first: the unit that everything else is measured in
        mode, rounds = self._trial
        if rounds:
            return self._try(mode, rounds)
        costs = seen.token_seconds()
        best = min((mode for mode in costs if mode in (*self._modes, "autoregressive")), key=costs.get)
        others = [mode for mode in self._modes if mode != best and self._affords_a_try(mode, is_new=mode not in costs)]
        if others:
            mode = min(others, key=lambda mode: seen.lost.get(mode, 0.0))
            return self._try(mode, _TRIAL_ROUNDS[mode])
        lost = seen.lost.get("autoregressive", 0.0)
        if best != "autoregressive" and lost + seen.step.value < _STEP_SHARE * seen.seconds:
            return "autoregressive"  # the unit again
        return best

    def _try(self, mode: str, rounds: int) -> str:
        self._trial = mode, rounds - 1
        self._least_tokens = _TRIED_TOKENS if mode == "sync" else 0
        return mode

    def _affords_a_try(self, mode: str, is_new: bool) -> bool:
        """Whether a mode that is not the best so far gets another try: texts change, and a few rounds tell little.

        Its tries may cost some steps to begin with, and a small share of all time after that. So a mode that is nearly
        as good is tried at length, one that is far behind hardly ever. Nothing is free where the draft would take its
        cores from the target.
        """
        seen = self.estimates
        if mode == "async" and not self._finds_cores:
            free, is_new = 0, False
        else:
            free = _FREE_STEPS
        allowed = free * seen.step.value + _TRIAL_SHARE / len(self._modes) * seen.seconds
        return is_new or seen.lost.get(mode, 0.0) + seen.step.value < allowed

    @property
    def _finds_cores(self) -> bool:
        """Whether the target leaves the draft a place to run."""
        busy = self.estimates.cores.value
        return self._cores is None or busy is None or busy < _BUSY * self._cores

    def _tree_depth(self) -> int:
        """The depth of tree that Theorem 7 puts first, on measured times."""
        seen = self.estimates
        tree_pass, verify = seen.tree_pass.value, seen.verify_seconds("async")
        if tree_pass is None or verify is None:
            return AUTO_DRAFT_TOKENS // 2
        backup = (seen.pass_seconds() or tree_pass) / verify

        def speedup(depth: int) -> float:
            tokens = theory.expected_tokens(seen.accept_rates(depth))
            unit = 1 + (seen.extra_seconds(depth) or 0.0) / verify
            times = (depth + 1) * tree_pass / verify / unit, depth * backup / unit
            return theory.ssd_speedup(seen.hit_rate.value, tokens, tokens, *times) / unit

        return max(range(1, AUTO_DRAFT_TOKENS + 1), key=speedup)

    def fan_out(self, proposal: Proposal) -> list[int]:
        """Forks for every accept length of the chain that is being verified: `proposal.width + 1` counts."""
        config, width = self.config, proposal.width
        if isinstance(config.fan_out, list):
            return [*config.fan_out[:width], config.fan_out[-1]]
        forks = AUTO_FAN_OUT if config.fan_out == "auto" else config.fan_out
        if config.fan_out_shape == "uniform":
            return [forks] * (width + 1)
        return allocate(self.estimates.accept_rates(width, copied=all(proposal.point_mass)), forks * (width + 1))

    # Within a round

    @property
    def weighs_confidence(self) -> bool:
        """Whether the length of a chain hangs on what the draft thinks of it. With a fixed K nobody asks, so that the
        draft's passes can follow each other without the host looking at any."""
        return self._fixed_depth is None

    def completes_chains(self, plan: RoundPlan) -> bool:
        """Whether a miss gets a chain of the full length whatever it costs: K was fixed, and so was the backup or the
        order of work."""
        return self._fixed_depth is not None and (self.config.backup == "draft" or plan.execution == "sync")

    def draft_backs_up(self, plan: RoundPlan) -> bool:
        """Theorem 17: whether rows that miss are better drafted than served at once with a copy or nothing."""
        if self.completes_chains(plan):
            return True
        if not self.pass_pays([]):
            return False
        seen = self.estimates
        verify, rows = seen.verify_seconds("async"), len(plan.rows)
        if rows == 1 or not plan.overlaps or verify is None or seen.hit_rate.weight < _SEEN_ROWS:
            return True
        drafted = theory.expected_tokens(seen.accept_rates(plan.depth))
        copied = theory.expected_tokens(seen.accept_rates(plan.depth, copied=True))
        primary = (plan.depth + 1) * (seen.tree_pass.value or 0.0) / verify
        backup = plan.depth * (seen.pass_seconds() or 0.0) / verify
        hit_rate = seen.hit_rate.value
        return theory.ssd_speedup(hit_rate, drafted, drafted, primary, backup, rows) >= theory.ssd_speedup(
            hit_rate, drafted, copied, primary, 0.0, rows
        )

    def pass_pays(self, confidence: list[float]) -> bool:
        """Whether one more draft pass, with the target waiting for it, is worth its time.

        With a fixed K chains are completed, unless the draft is so slow that a pass outlasts four steps of the target.

        Args:
            confidence (`list[float]`): the draft's probability of every token of the chain so far, where that is weighed.
        """
        seen = self.estimates
        seconds = seen.pass_seconds()
        if seconds is None or seen.step_seconds() is None or len(confidence) < self._least_tokens:
            return True
        if self._fixed_depth is not None:
            return seconds < 4 * seen.step_seconds()
        return self._going_on_pays(confidence, AUTO_DRAFT_TOKENS, seconds)

    def worth_verifying(self, confidence: list[float]) -> int:
        """How much of a chain that is there already is worth its rows in the verify.

        The decision about a token looks only at the ones before it: looking at the token itself would tilt the law that
        rejection sampling relies on.
        """
        seen = self.estimates
        if seen.extra_seconds(1) is None:
            return len(confidence)
        count = min(len(confidence), self._least_tokens)
        while count < len(confidence) and self._going_on_pays(confidence[:count], len(confidence)):
            count += 1
        return count

    def worth_copying(self, depth: int) -> int:
        """How many tokens of an n-gram copy are worth their rows in the verify."""
        seen = self.estimates
        if self._fixed_depth is not None or self.config.backup == "prompt_lookup":
            return depth
        if seen.extra_seconds(1) is None:
            return min(depth, _UNMEASURED_COPY)
        saved, reached = [0.0], 1.0
        for count, rate in enumerate(seen.accept_rates(depth, copied=True), 1):
            reached *= rate
            tokens = reached * seen.seconds_per_token()
            saved.append(saved[-1] + tokens - seen.extra_seconds(count) + seen.extra_seconds(count - 1))
        return saved.index(max(saved))

    def _going_on_pays(self, confidence: list[float], longest: int, pass_seconds: float = 0.0) -> bool:
        """Whether more tokens on a chain, up to `longest`, save more on average than they cost.

        Not the next one alone: what rows cost a verify has steps, and the third may be dearer than the fourth.
        """
        seen, length = self.estimates, len(confidence)
        survives = math.prod(map(seen.calibrated, confidence))
        saved, extra = 0.0, seen.extra_seconds(length) or 0.0
        for more, rate in enumerate(seen.accept_rates(longest)[length:], 1):
            survives *= rate
            saved += survives * seen.seconds_per_token()
            if saved > more * pass_seconds + (seen.extra_seconds(length + more) or 0.0) - extra:
                return True
        return False

    # After a round

    def saw_round(
        self,
        plan: RoundPlan,
        proposal: Proposal,
        accepted: dict[int, int],
        *,
        was_prepared: bool,
        seconds: float,
        verify_seconds: float,
        tokens: float,
        cores: float = 0.0,
    ) -> None:
        """Takes in one round.

        Args:
            accepted (`dict[int, int]`): accept lengths of the rows that ran.
            was_prepared (`bool`): the proposal was made beside the round before.
            seconds, verify_seconds (`float`): of the whole round, and of the target's work in it.
            tokens (`float`): emitted, per row.
            cores (`float`): kept busy meanwhile, by all threads of the process.
        """
        seen = self.estimates
        seen.seconds += seconds
        # What a mode prepared is to its credit, whatever the round that verifies it is called.
        source = "async" if was_prepared else plan.execution
        costs = seen.token_seconds()
        if costs and source != min(costs, key=costs.get):
            lost = seen.lost.get(source, 0.0) + seconds - tokens * min(costs.values())
            seen.lost[source] = max(lost, 0.0)
        if source == plan.execution == "autoregressive":
            seen.step.add(seconds)
            seen.cores.add(cores)
        elif was_prepared == plan.overlaps:  # else a mode has just begun, and had to make or was left a first proposal
            if proposal.awaited:
                seen.verify.setdefault(source, Typical()).add(verify_seconds)
            step = seen.step_seconds()  # unknown where nothing but chains that were not awaited has been verified
            if step is not None:
                seen.token.setdefault(source, Rate()).add(seconds / step, tokens)
            if proposal.awaited and source == "sync":
                seen.saw_verify(proposal.width, verify_seconds)
        for row, length in accepted.items():
            if was_prepared and plan.overlaps:
                seen.hit_rate.add(proposal.hits[row])
            seen.saw_chain(proposal.lengths[row], length, proposal.confidence[row], proposal.point_mass[row])
