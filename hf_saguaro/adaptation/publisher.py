# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Which weights serve, and since when. Others ask for a change; only the generation thread makes it, between rounds."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

from .gate import AcceptanceRate, Canary, Candidate, Verdict
from .history import History
from .weights import Adapter, DraftWeights


KEPT_VERSIONS = 3
# Rounds that the acceptance figures remember: the reference of the canary, and what `metrics()` calls recent.
REFERENCE_ROUNDS = 200
RECENT_ROUNDS = 20


@dataclass
class _Change:
    """A change of what serves, ready to be copied."""

    event: str
    tensors: list[torch.Tensor]
    verdict: Verdict
    candidate: Candidate | None = None
    version: int = 0


class Publisher:
    """Keeps the last good adapters and swaps what serves.

    `version` counts publications: 0 is the bare draft, a rollback returns to an earlier number, a new publication always
    gets a new one.

    Args:
        weights (`DraftWeights`): what is written to.
        rollback (`bool`): whether a canary watches each publication.
        history (`History`)
    """

    def __init__(self, weights: DraftWeights, rollback: bool, history: History):
        self.weights, self.rollback, self.history = weights, rollback, history
        self.version = 0  # that serves
        self.adapter_version = 0  # the current adapter's, also while the static floor serves the bare draft
        self.latest = 0
        self.published = self.rolled_back = 0
        self.rounds = self.rounds_since_publication = 0
        self.reference, self.recent = AcceptanceRate(REFERENCE_ROUNDS), AcceptanceRate(RECENT_ROUNDS)
        self.outcomes: list[tuple[str, int]] = []  # ("rolled back" | "held", version), for the trainer to take
        self._adapters: OrderedDict[int, Adapter] = OrderedDict()
        self._canary: Canary | None = None
        self._staged: _Change | None = None
        self._is_torn = False  # a copy that failed half way leaves a mixture
        self._lock = threading.RLock()  # the garbage collector may close an adapter in the middle

    # The trainer's side

    @property
    def is_busy(self) -> bool:
        """Whether a change waits for the next round."""
        return self._staged is not None

    def adapter_of(self, version: int) -> Adapter | None:
        """The adapter of a version that is still kept; `None` is the bare draft."""
        return self._adapters.get(version)

    def stage_candidate(self, candidate: Candidate, verdict: Verdict) -> None:
        """Makes a candidate serve from the next round on."""
        self._stage(_Change("published", self.weights.merge(candidate.adapter), verdict, candidate))

    def stage_floor(self, verdict: Verdict) -> None:
        """Makes the current adapter (a passed verdict) or the bare draft serve from the next round on."""
        if verdict.passed:
            version = self.adapter_version
            tensors = self.weights.merge(self._adapters[version])
            self._stage(_Change("adapter returned", tensors, verdict, version=version))
        else:
            self._stage(_Change("bare draft", self.weights.pristine, verdict))

    def stage_bare(self, event: str, reason: str) -> None:
        """Makes the bare draft serve from the next round on, for good, and warns."""
        self.history.warn(event, reason, version=self.version)
        with self._lock:
            self._staged = None
            if self.version or self._is_torn:
                self._stage(_Change("bare draft", self.weights.pristine, Verdict(False, event)))

    def take_outcomes(self) -> list[tuple[str, int]]:
        with self._lock:
            taken, self.outcomes = self.outcomes, []
            return taken

    # The generation thread's side

    def apply(self) -> None:
        """Makes the staged change, if any. The draft must be idle."""
        with self._lock:
            change, self._staged = self._staged, None
            if change is None:
                return
            if change.candidate is not None and change.candidate.parent != self.version:
                figures = {"parent": change.candidate.parent, "serving": self.version}
                self.history.add("refused", "stale parent", step=change.candidate.step, **figures)
                return
            self._is_torn = True
            self.weights.write(change.tensors)
            self._is_torn = False
            if change.candidate is not None:
                self._published(change.candidate)
            elif change.event == "rolled back":
                self._took_back(change.version)
            self.version = change.version if change.candidate is None else self.latest
            # A floor change is judged by the same texts, not by the next rounds.
            if change.candidate is None:
                self._canary = None
            self.history.add(
                change.event, change.verdict.reason, version=self.version, round=self.rounds, **_figures_of(change)
            )

    def saw_round(self, proposed: int, accepted: int) -> None:
        """Counts a round in which the draft proposed something."""
        with self._lock:
            self.rounds += 1
            self.rounds_since_publication += 1
            if self._canary is not None:
                self._ask_canary(proposed, accepted)
            self.reference.saw(proposed, accepted)
            self.recent.saw(proposed, accepted)

    def restore(self, event: str, reason: str, **figures: Any) -> None:
        """Gives the user's own weights back at once and forgets every adapter."""
        with self._lock:
            self._staged, self._canary = None, None
            self.weights.write(self.weights.pristine)
            self._adapters.clear()
            self.version = self.adapter_version = 0
        self.history.add(event, reason, version=0, round=self.rounds, **figures)

    def serve_saved(self, adapter: Adapter | None, version: int, latest: int) -> None:
        """Serves what was saved, before any round."""
        with self._lock:
            if adapter is not None:
                self.weights.write(self.weights.merge(adapter))
                self._adapters[version] = adapter
            self.version = self.adapter_version = version
            self.latest = latest

    def state(self) -> dict[str, Any]:
        """JSON-safe; the adapters themselves are saved apart."""
        with self._lock:
            return {
                "version": self.version,
                "adapter_version": self.adapter_version,
                "latest": self.latest,
                "published": self.published,
                "rolled_back": self.rolled_back,
                "rounds": self.rounds,
                "rounds_since_publication": self.rounds_since_publication,
                "reference": self.reference.state(),
                "recent": self.recent.state(),
                "canary": None if self._canary is None else self._canary.state(),
                "outcomes": [list(outcome) for outcome in self.outcomes],
                "kept_versions": list(self._adapters),
            }

    def load_state(self, state: dict[str, Any], adapters: dict[int, Adapter]) -> None:
        with self._lock:
            for name in (
                "version",
                "adapter_version",
                "latest",
                "published",
                "rolled_back",
                "rounds",
                "rounds_since_publication",
            ):
                setattr(self, name, state[name])
            self.reference.load_state(state["reference"])
            self.recent.load_state(state["recent"])
            self._canary = None if state["canary"] is None else Canary.from_state(state["canary"])
            self.outcomes = [(outcome, version) for outcome, version in state["outcomes"]]
            self._adapters = OrderedDict((version, adapters[version]) for version in state["kept_versions"])
            if self.version:
                self.weights.write(self.weights.merge(self._adapters[self.version]))

    def _stage(self, change: _Change) -> None:
        with self._lock:
            if self._staged is None:
                self._staged = change
            else:  # the canary took the adapter back in the meantime
                self.history.add("refused", "another change came first", staged=self._staged.event)

    def _published(self, candidate: Candidate) -> None:
        self.latest += 1
        self.published += 1
        self.adapter_version = self.latest
        self.rounds_since_publication = 0
        self._adapters[self.latest] = candidate.adapter
        while len(self._adapters) > KEPT_VERSIONS:
            self._adapters.popitem(last=False)
        self._canary = Canary(self.reference) if self.rollback else None

    def _took_back(self, version: int) -> None:
        self.rolled_back += 1
        self.outcomes.append(("rolled back", version))
        self._adapters.pop(self.adapter_version, None)
        self.adapter_version = version

    def _ask_canary(self, proposed: int, accepted: int) -> None:
        canary, verdict = self._canary, self._canary.saw(proposed, accepted)
        if verdict is None:
            return
        self._canary = None
        if verdict.passed:
            self.outcomes.append(("held", self.version))
            return
        self.reference.load_state(canary.reference)  # a bad adapter's rounds are no measure for the next one
        earlier = [version for version in self._adapters if version != self.version]
        version = earlier[-1] if earlier else 0
        tensors = self.weights.merge(self._adapters[version]) if version else self.weights.pristine
        self._staged = _Change("rolled back", tensors, verdict, version=version)


def _figures_of(change: _Change) -> dict[str, Any]:
    figures = dict(change.verdict.figures)
    if change.candidate is not None:
        figures |= {"step": change.candidate.step, "origin": change.candidate.origin}
    return figures
