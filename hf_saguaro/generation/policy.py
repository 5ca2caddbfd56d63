# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""What the next round should be, decided from what earlier rounds measured. Nothing here can change the text.

The rule is Theorem 7 (theory.py) on moving estimates (estimates.py). Within a round it comes down to one question,
asked before every further draft token: is the chance that the token is accepted, times what a token costs at present,
worth the draft pass and the extra row in the verify?
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config import SaguaroConfig
from . import theory
from .acceptance import Proposal
from .estimates import Estimates, Rate, Typical
from .fan_out import allocate


AUTO_DRAFT_TOKENS = 8
AUTO_FAN_OUT = 3
# Tries of modes that are not the best so far: rounds in a row, what they may cost at first, and their share of all time;
# and the share of plain steps that only measure.
_TRIAL_ROUNDS, _FREE_STEPS, _TRIAL_SHARE, _STEP_SHARE = 2, 3, 0.015, 0.005
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
    """

    def __init__(self, config: SaguaroConfig, estimates: Estimates, can_overlap: bool):
        self.config, self.estimates = config, estimates
        self._modes = ("sync", "async") if can_overlap else ("sync",)
        self._fixed_depth = None if config.num_assistant_tokens == "auto" else config.num_assistant_tokens
        self._trial = "autoregressive", 0  # the mode that is being tried, and for how many rounds more

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
        seen = self.estimates
        if seen.step.value is None:
            return "autoregressive"  # one plain step first: the unit that everything else is measured in
        mode, rounds = self._trial
        if rounds:
            self._trial = mode, rounds - 1
            return mode
        costs = seen.token_seconds()
        best = min((mode for mode in costs if mode in (*self._modes, "autoregressive")), key=costs.get)
        tried = min(
            (mode for mode in self._modes if mode != best), key=lambda mode: seen.lost.get(mode, 0.0), default=best
        )
        if tried != best and (tried not in costs or self._affords_a_try(best)):
            self._trial = tried, _TRIAL_ROUNDS - 1
            return tried
        lost = seen.lost.get("autoregressive", 0.0)
        if best != "autoregressive" and lost + seen.step.value < _STEP_SHARE * seen.seconds:
            return "autoregressive"  # the unit again
        return best

    def _affords_a_try(self, best: str) -> bool:
        """Whether modes that are not the best so far get more tries: texts change, and a few rounds tell little.

        Their tries may cost some steps to begin with, and a small share of all time after that. So a mode that is nearly
        as good is tried at length, one that is far behind hardly ever.
        """
        seen = self.estimates
        lost = sum(seen.lost.get(mode, 0.0) for mode in self._modes if mode != best)
        return lost + seen.step.value < _FREE_STEPS * seen.step.value + _TRIAL_SHARE * seen.seconds

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
            confidence (`list[float]`): the draft's probability of every token of the chain so far.
        """
        seen = self.estimates
        seconds = seen.pass_seconds()
        if seconds is None or seen.step_seconds() is None:
            return True
        if self._fixed_depth is not None:
            return seconds < 4 * seen.step_seconds()
        return self._gain(confidence) > seconds + (seen.row_seconds(len(confidence) + 1) or 0.0)

    def worth_verifying(self, confidence: list[float]) -> int:
        """How much of a chain that is there already is worth its rows in the verify.

        The decision about a token looks only at the ones before it: looking at the token itself would tilt the law that
        rejection sampling relies on.
        """
        seen = self.estimates
        if self._fixed_depth is not None or seen.extra_seconds(1) is None:
            return len(confidence)
        count = 0
        while count < len(confidence) and self._gain(confidence[:count]) > seen.row_seconds(count + 1):
            count += 1
        return count

    def worth_copying(self, depth: int) -> int:
        """How many tokens of an n-gram copy are worth their rows in the verify."""
        seen = self.estimates
        if self._fixed_depth is not None or self.config.backup == "prompt_lookup" or seen.extra_seconds(1) is None:
            return depth
        count, reached = 0, 1.0
        for rate in seen.accept_rates(depth, copied=True):
            reached *= rate
            if reached * seen.seconds_per_token() <= seen.row_seconds(count + 1):
                break
            count += 1
        return count

    def _gain(self, confidence: list[float]) -> float:
        """Seconds that the next token of a chain saves on average."""
        seen, survives = self.estimates, 1.0
        for value in confidence:
            survives *= seen.calibrated(value)
        return survives * seen.accept_rates(len(confidence) + 1)[-1] * seen.seconds_per_token()

    # After a round

    def saw_round(
        self,
        plan: RoundPlan,
        proposal: Proposal,
        accepted: dict[int, int],
        *,
        seconds: float,
        verify_seconds: float,
        tokens: float,
    ) -> None:
        """Takes in one round.

        Args:
            accepted (`dict[int, int]`): accept lengths of the rows that ran.
            seconds, verify_seconds (`float`): of the whole round, and of the target's work in it.
            tokens (`float`): emitted, per row.
        """
        seen = self.estimates
        seen.seconds += seconds
        if plan.execution == "autoregressive" and proposal.width:
            return  # a chain left over from another mode, which has paid for it
        costs = seen.token_seconds()
        if costs and plan.execution != min(costs, key=costs.get):
            lost = seen.lost.get(plan.execution, 0.0) + seconds - tokens * min(costs.values())
            seen.lost[plan.execution] = max(lost, 0.0)
        if plan.execution == "autoregressive":
            seen.step.add(seconds)
            return
        seen.verify.setdefault(plan.execution, Typical()).add(verify_seconds)
        seen.token.setdefault(plan.execution, Rate()).add(seconds, tokens)
        if plan.execution == "sync" and proposal.width:
            seen.verify_of.setdefault(proposal.width, Typical()).add(verify_seconds)
        for row, length in accepted.items():
            if plan.overlaps:
                seen.hit_rate.add(proposal.hits[row])
            seen.saw_chain(proposal.lengths[row], length, proposal.confidence[row], proposal.point_mass[row])
