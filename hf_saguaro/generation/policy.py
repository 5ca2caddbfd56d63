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
from .estimates import Average, Estimates, Typical
from .fan_out import allocate


AUTO_DRAFT_TOKENS = 8
AUTO_FAN_OUT = 3
_PROBE_ROUNDS = 4
_FIRST_PROBE_GAP, _LAST_PROBE_GAP = 32, 512


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
        self._probe: tuple[str, int] | None = None

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
        for mode in self._modes:
            if self._is_untried(mode):
                return mode
        cost = {mode: seen.token[mode].value for mode in self._modes}
        cost["autoregressive"] = seen.step.value
        best, second, *_ = sorted(cost, key=cost.get)
        return self._probed(best, second)

    def _is_untried(self, mode: str) -> bool:
        """Whether a mode has yet to show what it costs. One that starts far behind plain decoding gets no more rounds."""
        tried = self.estimates.token.get(mode)
        if tried is None or tried.weight < 2:
            return True
        return tried.weight < _PROBE_ROUNDS and tried.value < 1.25 * self.estimates.step.value

    def _probed(self, best: str, second: str) -> str:
        """The best mode; but texts change, so now and then two rounds of the runner-up, more rarely while it loses."""
        seen = self.estimates
        if self._probe is not None and self._probe[1] > 0:
            self._probe = (self._probe[0], self._probe[1] - 1)
            return self._probe[0]
        if not seen.next_probe:
            seen.probe_gap = _FIRST_PROBE_GAP
            seen.next_probe = seen.rounds + seen.probe_gap
        if seen.rounds < seen.next_probe:
            return best
        seen.probe_gap = min(2 * seen.probe_gap, _LAST_PROBE_GAP)
        seen.next_probe = seen.rounds + seen.probe_gap
        self._probe = (second, 1)
        return second

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
        if rows == 1 or not plan.overlaps or verify is None or seen.hit_rate.weight < _PROBE_ROUNDS:
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
        seen.rounds += 1
        if plan.execution == "autoregressive":
            if proposal.width == 0:
                seen.step.add(seconds)
            return
        seen.verify.setdefault(plan.execution, Typical()).add(verify_seconds)
        seen.token.setdefault(plan.execution, Average()).add(seconds / max(tokens, 1))
        if plan.execution == "sync" and proposal.width:
            seen.verify_of.setdefault(proposal.width, Typical()).add(verify_seconds)
        for row, length in accepted.items():
            if plan.overlaps:
                seen.hit_rate.add(proposal.hits[row])
            seen.saw_chain(proposal.lengths[row], length, proposal.confidence[row], proposal.point_mass[row])
