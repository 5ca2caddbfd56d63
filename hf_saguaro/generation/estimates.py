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
# Verifies of one width from which on its time is believed.
_SETTLED = 3


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


class Rate:
    """Seconds a token over the last rounds, as a ratio of fading sums: the mean of each round's ratio would count the
    rounds with few tokens most."""

    def __init__(self) -> None:
        self._seconds = self._tokens = 0.0
        self.weight = 0

    def add(self, seconds: float, tokens: float) -> None:
        self.weight += 1
        self._seconds += seconds - _FADE * self._seconds
        self._tokens += tokens - _FADE * self._tokens

    @property
    def value(self) -> float:
        return self._seconds / self._tokens


class Typical:
    """The median of the last values: a cold first pass, or a moment when the machine was busy elsewhere, is no news."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=_REMEMBERED)

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
    """All times are in seconds.

    Attributes:
        prefill: the target's last reading of a prompt.
        step: a plain decoding step.
        verify, token: a verify and an emitted token, by execution.
        seconds, lost: of all rounds, and what the tries of an execution cost beyond the best one, by execution.
        verify_of: a verify that nothing runs beside, by draft tokens in it.
        draft_pass, tree_pass: one narrow draft pass, and one pass of glue or tree beside the target.
        hit_rate: of rows in overlapped rounds.
        drafted, copied: acceptance by depth of drafted tokens and of n-gram copies.
        by_confidence: acceptance by the draft's own probability of the token.
    """

    def __init__(self) -> None:
        self.prefill: float | None = None
        self.step = Typical()
        self.verify: dict[str, Typical] = {}
        self.token: dict[str, Rate] = {}
        self.seconds = 0.0
        self.lost: dict[str, float] = {}
        self.verify_of: dict[int, Typical] = {}
        self.draft_pass = Typical()
        self.tree_pass = Typical()
        self.hit_rate = Average(0.6, 1.0)
        self.drafted = [Average(0.7, 1.0) for _ in range(MAX_DRAFT_TOKENS)]
        self.copied = [Average(0.3, 1.0) for _ in range(MAX_DRAFT_TOKENS)]
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
        the fourth token may cost nothing and the fifth as much as a verify. `None` until it was seen."""
        step = self.step.value
        known = [(w, typical.value) for w, typical in sorted(self.verify_of.items()) if typical.weight >= _SETTLED]
        if step is None or not known:
            return None
        extra = [(0, 0.0), *((w, max(seconds - step, 0.0)) for w, seconds in known)]
        for (below, low), (above, high) in itertools.pairwise(extra):
            if width <= above:
                return low + (high - low) * (width - below) / (above - below)
        return extra[-1][1]  # hope, until a wider one was tried

    def row_seconds(self, width: int) -> float | None:
        """What the `width`-th draft token adds to a verify."""
        extra = self.extra_seconds(width)
        return None if extra is None else max(extra - self.extra_seconds(width - 1), 0.0)

    def seconds_per_token(self) -> float:
        """What a token costs at present: the price that an accepted draft token saves."""
        costs = self.token_seconds().values()
        return min(costs, default=self.step_seconds())

    def token_seconds(self) -> dict[str, float]:
        """The same by execution, of those that were seen more than once."""
        costs = {mode: rate.value for mode, rate in list(self.token.items()) if rate.weight >= 2}
        return costs if self.step.value is None else {"autoregressive": self.step.value, **costs}

    def accept_rates(self, depth: int, copied: bool = False) -> list[float]:
        """Acceptance of the 1st, 2nd .. token of a chain, given that the ones before were accepted."""
        rates = self.copied if copied else self.drafted
        return [min(max(rate.value, 0.02), 0.98) for rate in rates[:depth]]

    def calibrated(self, confidence: float) -> float:
        """How often tokens of such confidence were accepted."""
        return self.by_confidence[_bin(confidence)].value

    def saw_chain(self, length: int, accepted: int, confidence: list[float], copied: bool) -> None:
        """Takes in what became of a chain of `length` tokens; what lies behind the first rejection tells nothing."""
        rates = self.copied if copied else self.drafted
        for depth in range(min(accepted + 1, length)):
            rates[depth].add(depth < accepted)
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
