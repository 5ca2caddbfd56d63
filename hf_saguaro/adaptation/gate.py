# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""What stands between a trained adapter and the traffic.

The text of the target does not depend on the draft, so the feedback of a served text tells for *any* adapter, exactly for
greedy traffic and in expectation for sampled, how many rounds it would have taken. The shadow gate and the static floor
compare arms on the same texts this way; only the canary looks at live rounds.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .feedback import FeedbackSequence
from .losses import acceptance, rounds_needed
from .student import Student, passes, text_item
from .weights import Adapter, DraftWeights


# Draft tokens a round that the comparison plays with; which arm wins hardly depends on it.
LOOKAHEAD = 5
# Norm of a module's change relative to its weights: beyond this nothing is left of the draft that the user brought.
MAX_RELATIVE_CHANGE = 1.0
# A candidate must accept this much more than what serves, and may accept this much less than the bare draft.
MARGIN = 0.005
MIN_VALIDATION_SEQUENCES = 4
# The chance that a stream of worthless candidates ever gets one through, spread over the attempts since a publication.
FALSE_PUBLICATION = 0.05


TRAINER = "trainer"  # the origin of a server's own candidates


@dataclass(frozen=True)
class Candidate:
    """An adapter that asks to serve; nothing changes it any more.

    Args:
        adapter (`Adapter`): the LoRA matrices.
        parent (`int`): version that served when it was made; another one by now makes it stale.
        base (`str`): fingerprint of the draft that it was trained for.
        step (`int`): optimizer steps behind it.
        origin (`str`): `"trainer"`, or where it was loaded from.
    """

    adapter: Adapter
    parent: int
    base: str
    step: int
    origin: str = TRAINER


@dataclass
class Verdict:
    """Whether something passed, why not, and the figures it was judged by."""

    passed: bool
    reason: str
    figures: dict[str, Any] = field(default_factory=dict)


def numeric_gate(candidate: Candidate, weights: DraftWeights, base: str, serving: int) -> Verdict:
    """Whether a candidate belongs to this draft, descends from what serves and holds sane numbers."""
    if candidate.base != base:
        return Verdict(False, "wrong base", {"base": candidate.base, "expected": base})
    if candidate.parent != serving:
        return Verdict(False, "stale parent", {"parent": candidate.parent, "serving": serving})
    if list(candidate.adapter) != weights.names:
        return Verdict(False, "other modules")
    largest = 0.0
    for name, pristine, transposed in zip(weights.names, weights.pristine, weights.transposed):
        a, b = candidate.adapter[name]
        out_features, in_features = reversed(pristine.shape) if transposed else pristine.shape
        if (
            a.ndim != 2
            or b.ndim != 2
            or a.shape[0] != b.shape[1]
            or (b.shape[0], a.shape[1]) != (out_features, in_features)
        ):
            return Verdict(False, "wrong shape", {"module": name})
        if not bool(a.isfinite().all() and b.isfinite().all()):
            return Verdict(False, "not finite", {"module": name})
        # The norm of B A by way of two r x r matrices instead of one as large as the weight.
        square = ((b.float().T @ b.float()) * (a.float() @ a.float().T)).sum().clamp_min(0)
        change = float(square.sqrt()) * weights.scale / max(float(pristine.float().norm()), 1e-12)
        largest = max(largest, change)
        if not change <= MAX_RELATIVE_CHANGE:
            return Verdict(False, "change too large", {"module": name, "relative_change": change})
    return Verdict(True, "sane", {"relative_change": largest})


class ShadowGate:
    """Compares adapters on texts that none of them was trained on.

    Args:
        student (`Student`): evaluates; its weights are put back afterwards.
        check (`Callable`): called between passes; may raise to stop.
    """

    def __init__(self, student: Student, check: Callable[[], None] = lambda: None):
        self._student, self._check = student, check
        self.attempts = 0

    def measure(self, version: int, adapter: Adapter | None, sequences: list[FeedbackSequence]) -> None:
        """Fills `sequence.rounds[version]` where it is missing."""
        missing = [sequence for sequence in sequences if version not in sequence.rounds]
        if missing:
            for sequence, rounds in zip(missing, self._rounds(adapter, missing)):
                sequence.rounds[version] = rounds

    def examine(self, adapter: Adapter, serving_version: int, serving: Adapter | None,
                sequences: list[FeedbackSequence]) -> Verdict:  # fmt: skip
        """Whether a candidate accepts more than what serves, and not less than the bare draft.

        The rounds saved are tested pairwise, one difference a sequence (Student's t). The level falls with every attempt
        since the last publication, so that trying long enough is no way in.
        """
        if len(sequences) < MIN_VALIDATION_SEQUENCES:
            return Verdict(False, "too little held-out text", {"sequences": len(sequences)})
        for sequence in sequences:  # only the two arms that a candidate meets are remembered
            sequence.rounds = {key: value for key, value in sequence.rounds.items() if key in (0, serving_version)}
        self.measure(0, None, sequences)
        self.measure(serving_version, serving, sequences)
        candidate = self._rounds(adapter, sequences)
        self.attempts += 1

        rows = sum(sequence.rows for sequence in sequences)
        bare = sum(sequence.rounds[0] for sequence in sequences)
        served = sum(sequence.rounds[serving_version] for sequence in sequences)
        t = paired_t([sequence.rounds[serving_version] - own for sequence, own in zip(sequences, candidate)])
        required = student_quantile(1 - FALSE_PUBLICATION / (self.attempts * (self.attempts + 1)), len(sequences) - 1)
        figures = {
            "sequences": len(sequences),
            "rows": rows,
            "accepted_bare": rows / bare - 1,
            "accepted_serving": rows / served - 1,
            "accepted_candidate": rows / sum(candidate) - 1,
            "t": t,
            "t_required": required,
            "attempt": self.attempts,
        }
        over_serving = relative_gain(rows, sum(candidate), served)
        over_bare = relative_gain(rows, sum(candidate), bare)
        figures |= {"gain_over_serving": over_serving, "gain_over_bare": over_bare}
        if over_bare < -MARGIN:
            return Verdict(False, "worse than the bare draft", figures)
        if over_serving < MARGIN:
            return Verdict(False, "no better than what serves", figures)
        if t < required:
            return Verdict(False, "not surely better than what serves", figures)
        return Verdict(True, "better on held-out text", figures)

    def _rounds(self, adapter: Adapter | None, sequences: list[FeedbackSequence]) -> list[float]:
        kept = self._student.snapshot()
        chances: dict[int, list[float]] = {}
        try:
            self._student.load(adapter)
            items = {id(item): (index, item) for index, item in enumerate(map(text_item, sequences))}
            with torch.no_grad():
                for batch in passes([item for _, item in items.values()]):
                    self._check()
                    logits, teacher = self._student.logits(batch), self._student.teacher(batch)
                    sampled = acceptance(logits, teacher, greedy=False).tolist()
                    greedy = acceptance(logits, teacher, greedy=True).tolist()
                    first = 0
                    for item in batch:
                        index = items[id(item)][0]
                        own = sampled if sequences[index].temperature else greedy
                        chances[index] = own[first : first + item.rows]
                        first += item.rows
        finally:
            self._student.load(kept)
        return [rounds_needed(chances[index], LOOKAHEAD) for index in range(len(sequences))]


class StaticFloor:
    """Serves the bare draft while the adapter is worse on the latest texts, and the adapter again when it is better.

    Both are always measured on the same texts, so that going back needs no live trial. Eight texts are few, which makes
    the floor quick after a shift of traffic; serving the bare draft for a while by mistake costs little.
    """

    WINDOW = 8
    DROP, DROP_T = -0.01, -0.5
    RETURN, RETURN_T = 0.01, 1.0

    def __init__(self):
        # (number of the sequence, its rows, rounds with the bare draft, rounds with the adapter)
        self._window: deque[tuple[int, int, float, float]] = deque(maxlen=self.WINDOW)

    def saw(self, number: int, rows: int, bare_rounds: float, adapter_rounds: float) -> None:
        self._window.append((number, rows, bare_rounds, adapter_rounds))

    def forget(self) -> None:
        """Another adapter serves from now on."""
        self._window.clear()

    @property
    def begins(self) -> int:
        """Number of the oldest sequence in view."""
        return self._window[0][0]

    def judge(self, serves_bare: bool) -> Verdict | None:
        """A verdict for the adapter (`passed`) or for the bare draft, or `None` where all stays as it is."""
        if len(self._window) < MIN_VALIDATION_SEQUENCES:
            return None
        _, rows, bare, adapter = (sum(column) for column in zip(*self._window))
        gain = relative_gain(rows, adapter, bare)
        t = paired_t([entry[2] - entry[3] for entry in self._window])
        figures = {
            "sequences": len(self._window),
            "accepted_bare": rows / bare - 1,
            "accepted_adapter": rows / adapter - 1,
            "gain_over_bare": gain,
            "t": t,
        }
        if not serves_bare and gain < self.DROP and t < self.DROP_T:
            return Verdict(False, "the bare draft is better on the latest text", figures)
        if serves_bare and gain > self.RETURN and t > self.RETURN_T:
            return Verdict(True, "the adapter is better on the latest text", figures)
        return None

    def state(self) -> list[list[float]]:
        return [list(entry) for entry in self._window]

    def load_state(self, state: list[list[float]]) -> None:
        self._window.clear()
        self._window.extend((int(number), int(rows), bare, adapter) for number, rows, bare, adapter in state)


class AcceptanceRate:
    """Accepted share of the draft tokens that were put to the test, fading with a memory of about `memory` rounds.

    A round tests the accepted tokens and the first rejected one: unlike accepted tokens a round, this does not move when
    the policy changes the length of the chains.
    """

    def __init__(self, memory: float):
        self._keep = 1 - 1 / memory
        self.accepted = self.tested = self.rounds = 0.0

    def saw(self, proposed: int, accepted: int) -> None:
        for name, value in (("accepted", accepted), ("tested", min(proposed, accepted + 1)), ("rounds", 1)):
            setattr(self, name, getattr(self, name) * self._keep + value)

    @property
    def rate(self) -> float | None:
        return self.accepted / self.tested if self.tested else None

    @property
    def accepted_per_round(self) -> float | None:
        return self.accepted / self.rounds if self.rounds else None

    def state(self) -> list[float]:
        return [self.accepted, self.tested, self.rounds]

    def load_state(self, state: list[float]) -> None:
        self.accepted, self.tested, self.rounds = state


class Canary:
    """Watches the first rounds after a publication against the rate before it.

    Looks are taken at doubling counts, since a look at every round would find a bad streak in any adapter; the drop must
    exceed 0.02 plus 2.5 standard errors, tokens of one text counting half because they resemble each other.
    """

    DROP = 0.02
    STANDARD_ERRORS = 2.5
    LOOKS = (20, 40, 80, 160)
    MIN_REFERENCE_TOKENS = 50

    def __init__(self, reference: AcceptanceRate):
        self.reference = reference.state()
        self._reference_rate, self._reference_tested = reference.rate, reference.tested
        self._accepted = self._tested = self._rounds = 0

    def state(self) -> dict[str, Any]:
        """JSON-safe."""
        return {"reference": self.reference, "seen": [self._accepted, self._tested, self._rounds]}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Canary:
        reference = AcceptanceRate(1)
        reference.load_state(state["reference"])
        canary = cls(reference)
        canary._accepted, canary._tested, canary._rounds = state["seen"]
        return canary

    def saw(self, proposed: int, accepted: int) -> Verdict | None:
        """Counts a round; a verdict when the canary has made up its mind."""
        self._rounds += 1
        self._accepted += accepted
        self._tested += min(proposed, accepted + 1)
        if self._rounds not in self.LOOKS or not self._tested:
            return None
        figures = {"rounds": self._rounds, "rate": self._accepted / self._tested, "reference": self._reference_rate}
        if self._reference_rate is not None and self._reference_tested >= self.MIN_REFERENCE_TOKENS:
            p = self._reference_rate
            error = math.sqrt(2 * p * (1 - p) * (1 / self._tested + 1 / self._reference_tested))
            if p - self._accepted / self._tested > self.DROP + self.STANDARD_ERRORS * error:
                return Verdict(False, "accepts less than before", figures)
        return Verdict(True, "held", figures) if self._rounds == self.LOOKS[-1] else None


def relative_gain(rows: int, rounds: float, reference_rounds: float) -> float:
    """Relative gain in accepted tokens a round: every round emits its accepted tokens and one more."""
    accepted, reference = rows / rounds - 1, rows / reference_rounds - 1
    return accepted / reference - 1 if reference else (math.inf if accepted else 0.0)


def paired_t(differences: list[float]) -> float:
    """Student's t of paired differences; infinite for one that never varies."""
    mean = statistics.fmean(differences)
    deviation = statistics.stdev(differences) if len(differences) > 1 else 0.0
    if deviation:
        return mean / (deviation / math.sqrt(len(differences)))
    return math.copysign(math.inf, mean) if mean else 0.0


def student_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's t by its expansion around the normal one (Abramowitz and Stegun 26.7.5)."""
    z = statistics.NormalDist().inv_cdf(probability)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
