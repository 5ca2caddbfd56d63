# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""What there is to learning: look at the floor, take a step, ask the gate. Runs on the trainer's thread alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .buffer import FeedbackBuffer
from .config import AdaptationConfig
from .feedback import FeedbackSequence
from .gate import MIN_VALIDATION_SEQUENCES, TRAINER, Candidate, ShadowGate, StaticFloor, Verdict, numeric_gate
from .history import History
from .learner import Learner
from .publisher import Publisher


FRESH_SEQUENCES_PER_STEP = 4
# Until a candidate has been published, training gets this part of the time it may take. One that is refused without
# promise halves that, down to the second figure; a publication gives all.
UNPROVEN_TRUST = 0.25
SMALLEST_TRUST = 0.1
# A refused candidate below the first shows no promise; below the second it has learned something harmful, and learning
# starts over from what serves.
PROMISING_T = 1.0
HOPELESS_T = -2.0


class TrainingLoop:
    """What the trainer does when it has time.

    Args:
        base (`Callable[[], str]`): the draft's fingerprint; asked for at the first candidate.
    """

    def __init__(self, learner: Learner, buffer: FeedbackBuffer, publisher: Publisher, history: History,
                 config: AdaptationConfig, base: Callable[[], str]):  # fmt: skip
        self.learner, self.buffer, self.publisher, self.history = learner, buffer, publisher, history
        self.config, self.base = config, base
        # Called between forward passes; whoever drives the loop may set one that raises to stop it.
        self.check: Callable[[], None] = lambda: None
        self.gate, self.floor = ShadowGate(learner.student, lambda: self.check()), StaticFloor()
        self.verdicts = self.refused = 0
        self.trust = UNPROVEN_TRUST  # part of its time that training is given
        self._examined_step = self._examined_tokens = self._shifted_at = 0

    @property
    def wants_to_train(self) -> bool:
        return self.buffer.fresh.rows >= self.config.train_every_tokens

    @property
    def wants_to_check_floor(self) -> bool:
        version = self.publisher.adapter_version
        if not version or self.publisher.is_busy:
            return False
        newest = self.buffer.newest_fresh(StaticFloor.WINDOW)
        return sum(version not in sequence.rounds for sequence in newest) >= MIN_VALIDATION_SEQUENCES

    def check_floor(self) -> None:
        """Measures the current adapter and the bare draft on the latest text, which neither was trained on."""
        version = self.publisher.adapter_version
        newest = [item for item in self.buffer.newest_fresh(StaticFloor.WINDOW) if version not in item.rounds]
        self.gate.measure(0, None, newest)
        self.gate.measure(version, self.publisher.adapter_of(version), newest)
        for sequence in newest:
            self.floor.saw(sequence.number, sequence.rows, sequence.rounds[0], sequence.rounds[version])
        verdict = self.floor.judge(serves_bare=self.publisher.version == 0)
        if verdict is not None:
            self._shifted_at = 0 if verdict.passed else self.floor.begins
            self.publisher.stage_floor(verdict)

    def train(self, steps: int = 1) -> None:
        """Up to `steps` optimizer steps on fresh and replayed text, then a candidate if one is due."""
        self._learn_outcomes()
        for _ in range(steps):
            fresh = self.buffer.take_fresh(FRESH_SEQUENCES_PER_STEP)
            if not fresh:
                break
            replayed = self.buffer.replayed(round(len(fresh) * self.config.replay_ratio))
            self.learner.step(fresh + replayed, self.check)
            self.buffer.keep(fresh)
        if self._candidate_is_due():
            self.nominate(self._candidate())

    def flush(self) -> None:
        """Everything that is due, at once."""
        if self.wants_to_check_floor:
            self.check_floor()
        self.train(steps=1 + len(self.buffer.fresh.items) // FRESH_SEQUENCES_PER_STEP)

    def nominate(self, candidate: Candidate) -> Verdict | None:
        """Puts a candidate through the gates: stages it if it passes, records why if not.

        Returns:
            The verdict, or `None` where there is too little held-out text for one, or another change waits to be made.
        """
        if self.publisher.is_busy:
            return None
        verdict = numeric_gate(candidate, self.publisher.weights, self.base(), self.publisher.version)
        if not verdict.passed:
            self.verdicts += 1
            if candidate.origin == TRAINER and verdict.reason != "stale parent":
                self._start_over()
            return self.refuse(verdict, candidate.origin, candidate.step)
        if self.config.validate:
            serving, validation = self.publisher.version, self._validation()
            if len(validation) < MIN_VALIDATION_SEQUENCES:
                return None
            shadow = self.gate.examine(candidate.adapter, serving, self.publisher.adapter_of(serving), validation)
            verdict = Verdict(shadow.passed, shadow.reason, verdict.figures | shadow.figures)
        self.verdicts += 1
        if not verdict.passed:
            if candidate.origin == TRAINER:
                if verdict.figures["t"] < PROMISING_T:
                    self.trust = max(SMALLEST_TRUST, self.trust / 2)
                if verdict.figures["t"] < HOPELESS_T:
                    self._start_over()
            return self.refuse(verdict, candidate.origin, candidate.step)
        self.gate.attempts = self._shifted_at = 0
        self.trust = 1.0
        self.floor.forget()
        self.check()
        self.publisher.stage_candidate(candidate, verdict)
        if candidate.origin != TRAINER:
            self.learner.start_over_from(candidate.adapter, slower=False)
        return verdict

    def refuse(self, verdict: Verdict, origin: str, step: int | None = None) -> Verdict:
        """Records a refusal."""
        self.refused += 1
        self.history.add("refused", verdict.reason, step=step, origin=origin, **verdict.figures)
        return verdict

    def state(self) -> dict[str, Any]:
        """JSON-safe."""
        return {
            "refused": self.refused,
            "trust": self.trust,
            "attempts": self.gate.attempts,
            "examined_step": self._examined_step,
            "examined_tokens": self._examined_tokens,
            "shifted_at": self._shifted_at,
            "floor": self.floor.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.refused, self.trust = state["refused"], state["trust"]
        self.gate.attempts = state["attempts"]
        self._examined_step, self._examined_tokens = state["examined_step"], state["examined_tokens"]
        self._shifted_at = state["shifted_at"]
        self.floor.load_state(state["floor"])

    def _candidate_is_due(self) -> bool:
        if self.publisher.is_busy or self.learner.steps == self._examined_step:
            return False
        if self.publisher.rounds_since_publication < self.config.publish_every_rounds:
            return False
        if not self.config.validate:
            return True
        validation = self._validation()
        # Examining reads all held-out text: it is worth it once as much was trained on.
        read = sum(len(sequence.tokens) for sequence in validation)
        return (
            len(validation) >= MIN_VALIDATION_SEQUENCES and self.learner.trained_tokens - self._examined_tokens >= read
        )

    def _validation(self) -> list[FeedbackSequence]:
        """Held-out text. While the floor serves the bare draft, only that since the shift: on older text the adapter that
        was just taken off would win again."""
        return [sequence for sequence in self.buffer.validation() if sequence.number >= self._shifted_at]

    def _candidate(self) -> Candidate:
        self._examined_step, self._examined_tokens = self.learner.steps, self.learner.trained_tokens
        return Candidate(self.learner.student.snapshot(), self.publisher.version, self.base(), self.learner.steps)

    def _start_over(self) -> None:
        self.learner.start_over_from(self.publisher.adapter_of(self.publisher.adapter_version), slower=True)

    def _learn_outcomes(self) -> None:
        for outcome, version in self.publisher.take_outcomes():
            if outcome == "held":
                self.learner.published_cleanly()
            else:
                self.floor.forget()
                self.learner.start_over_from(self.publisher.adapter_of(version), slower=True)
