# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Moving estimates of what a pair of models costs and accepts. They outlive a call, so that the next one starts warm."""

from __future__ import annotations

import itertools
import statistics
import weakref
from collections import deque

import torch
from torch import nn

from ..config import MAX_DRAFT_TOKENS


_DECAY = 0.1
_FADE = 0.05
_BINS = 10
_REMEMBERED = 9
# Of what the machine's present speed is read from: it may change within seconds.
_PRESENT = 3
# Verifies of one width from which on its time is believed.
_SETTLED = 3
# What tokens of all depths say about one depth counts as much as this many of that depth: two unlucky ones at the second
# place would else end chains there for good, since a depth that is not drafted is not measured.
_POOLED = 4.0


class Average:
    """A moving mean: the plain mean of the first values, then an exponential one.

    Args:
        prior (`float`, *optional*), weight (`float`): what is believed before anything was seen, and how firmly.
    """

    def __init__(self, prior: float | None = None, weight: float = 0.0):
        self.value, self.weight = prior, weight

    def add(self, value: float) -> None:
        self.weight += 1
        share = max(_DECAY, 1 / self.weight)
        self.value = value if self.value is None else self.value + share * (value - self.value)


class Acceptance:
    """How often draft tokens are accepted, by their depth in the chain.

    Args:
        prior (`float`): what is believed before anything was seen.
    """

    def __init__(self, prior: float):
        self._any = Average(prior, 1.0)
        self._at = [Average() for _ in range(MAX_DRAFT_TOKENS)]

    def add(self, depth: int, accepted: bool) -> None:
        self._any.add(accepted)
        self._at[depth].add(accepted)

    def rate(self, depth: int) -> float:
        own = self._at[depth]
        weight = min(own.weight, 1 / _DECAY)
        return (_POOLED * self._any.value + weight * (own.value or 0.0)) / (_POOLED + weight)


class Rate:
    """Time a token over the last rounds, as a ratio of fading sums: the mean of each round's ratio would count the rounds
    with few tokens most."""

    def __init__(self) -> None:
        self._time = self._tokens = 0.0
        self.weight = 0

    def add(self, time: float, tokens: float) -> None:
        self.weight += 1
        self._time += time - _FADE * self._time
        self._tokens += tokens - _FADE * self._tokens

    @property
    def value(self) -> float:
        return self._time / self._tokens


class Typical:
    """The median of the last values: a cold first pass, or a moment when the machine was busy elsewhere, is no news."""

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        self._last: deque[float] = deque(maxlen=remembered)

    def add(self, value: float) -> None:
        self._last.append(value)

    @property
    def value(self) -> float | None:
        # A copy in one step: calls from other threads share the estimates of a pair.
        last = list(self._last)
        return statistics.median_low(last) if last else None

    @property
    def weight(self) -> int:
        return len(self._last)


class Estimates:
    """Times are in seconds, or in plain steps: what was measured a while ago may only be compared with the present in
    proportion to what a step took then, since machines do not keep their speed.

    Attributes:
        prefill: the target's last reading of a prompt.
        step, cores: a plain decoding step at present, and the cores that it kept busy.
        verify: a verify, by execution.
        token: an emitted token, by execution, in steps.
        seconds, lost: of all rounds, and what the tries of an execution cost beyond the best one, by execution.
        verify_of: a verify that nothing runs beside, by draft tokens in it, in steps.
        draft_pass, tree_pass: one narrow draft pass, and one pass of glue or tree beside the target.
        hit_rate: of rows in overlapped rounds.
        drafted, copied: acceptance by depth of drafted tokens and of n-gram copies.
        by_confidence: acceptance by the draft's own probability of the token.
    """

    def __init__(self) -> None:
        self.prefill: float | None = None
        self.step, self.cores = Typical(_PRESENT), Typical()
        self.verify: dict[str, Typical] = {}
        self.token: dict[str, Rate] = {}
        self.seconds = 0.0
        self.lost: dict[str, float] = {}
        self.verify_of: dict[int, Typical] = {}
        self.draft_pass = Typical()
        self.tree_pass = Typical()
        self.hit_rate = Average(0.6, 1.0)
        self.drafted, self.copied = Acceptance(0.7), Acceptance(0.3)
        self.by_confidence = [Average((i + 0.5) / _BINS, 2.0) for i in range(_BINS)]

    def step_seconds(self) -> float | None:
        """One step of the target, from the nearest thing that was measured."""
        return self.step.value or min((typical.value for typical in list(self.verify.values())), default=self.prefill)

    def pass_seconds(self) -> float | None:
        """A narrow draft pass; a pass of a whole tree bounds it. `None` until it was seen more than once."""
        if self.draft_pass.weight < 2 and self.tree_pass.weight < 2:
            return None
        return min(typical.value for typical in (self.draft_pass, self.tree_pass) if typical.weight)

    def verify_seconds(self, execution: str) -> float | None:
        return self.verify[execution].value if execution in self.verify else None

    def extra_seconds(self, width: int) -> float | None:
        """What `width` draft tokens add to a verify, from the nearest widths that were measured: kernels have steps, so
        the fourth token may cost nothing and the fifth as much as a verify. Beyond the widest, in proportion. `None`
        until it was seen."""
        step = self.step.value
        known = [(w, typical.value) for w, typical in sorted(self.verify_of.items()) if typical.weight >= _SETTLED]
        if step is None or not known:
            return None
        extra = [(0, 0.0), *((w, max(steps - 1.0, 0.0) * step) for w, steps in known)]
        for (below, low), (above, high) in itertools.pairwise(extra):
            if width <= above:
                return low + (high - low) * (width - below) / (above - below)
        widest, seconds = extra[-1]
        return seconds * width / widest

    def seconds_per_token(self) -> float:
        """What a token costs at present: the price that an accepted draft token saves."""
        costs = self.token_seconds().values()
        return min(costs, default=self.step_seconds())

    def token_seconds(self) -> dict[str, float]:
        """The same by execution, of those that were seen more than once."""
        unit = self.step_seconds()
        costs = {mode: rate.value * unit for mode, rate in list(self.token.items()) if rate.weight >= 2}
        return costs if self.step.value is None else {"autoregressive": unit, **costs}

    def accept_rates(self, depth: int, copied: bool = False) -> list[float]:
        """Acceptance of the 1st, 2nd .. token of a chain, given that the ones before were accepted."""
        kind = self.copied if copied else self.drafted
        return [min(max(kind.rate(place), 0.02), 0.98) for place in range(min(depth, MAX_DRAFT_TOKENS))]

    def calibrated(self, confidence: float) -> float:
        """How often tokens of such confidence were accepted."""
        return self.by_confidence[_bin(confidence)].value

    def saw_verify(self, width: int, seconds: float) -> None:
        """Takes in a verify of `width` draft tokens that nothing ran beside; one of none is a plain step."""
        step, steps = self.step.value, 1.0
        if width:
            if step is None:
                return
            typical = self.verify_of.setdefault(width, Typical())
            typical.add(seconds / step)
            if typical.weight < _SETTLED:
                return
            steps = typical.value
        self.step.add(seconds / steps)

    def saw_chain(self, length: int, accepted: int, confidence: list[float], copied: bool) -> None:
        """Takes in what became of a chain of `length` tokens; what lies behind the first rejection tells nothing."""
        kind = self.copied if copied else self.drafted
        for depth in range(min(accepted + 1, length)):
            kind.add(depth, depth < accepted)
            if confidence:
                self.by_confidence[_bin(confidence[depth])].add(depth < accepted)


def _bin(confidence: float) -> int:
    """A draft whose scores are NaN has no confidence."""
    return min(int(confidence * _BINS), _BINS - 1) if confidence == confidence else 0


_PAIRS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def estimates_of(target: nn.Module, draft: nn.Module | None, batch_size: int) -> Estimates:
    """The estimates of a pair of models as it runs now: made at first use, forgotten with the models."""
    if draft is None:
        return Estimates()
    kept = _PAIRS.setdefault(target, weakref.WeakKeyDictionary()).setdefault(draft, {})
    place = (str(target.device), str(draft.device), torch.get_num_threads(), batch_size)
    return kept.setdefault(place, Estimates())
