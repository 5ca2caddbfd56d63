# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""The round loop: speculative speculative decoding (arXiv 2603.03251, Algorithm 1)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import torch
from transformers.utils import logging

from ..stats import SaguaroStats
from .acceptance import Proposal
from .draft_worker import DraftWorker
from .policy import Policy, RoundPlan
from .reencoding import ReencodingSpeculator
from .speculation_cache import Outcome
from .speculator import Speculator
from .transcript import Transcript
from .verifier import Decision, Verifier


logger = logging.get_logger("transformers.hf_saguaro.generation.decoding")


def leave_draft_out(stats: SaguaroStats, error: Exception) -> None:
    """Says once, in the log and in the stats, why the target goes on alone."""
    stats.draft_failure = f"{type(error).__name__}: {error}"
    logger.warning(f"The draft failed and is left out for the rest of this call: {stats.draft_failure}")


class RoundLoop:
    """Decodes until every row has stopped.

    Args:
        verifier (`Verifier`): the target's side.
        speculator (`Speculator`, `ReencodingSpeculator` or `None`): the draft's side; `None` decodes without a draft.
        policy (`Policy`), transcript (`Transcript`), stats (`SaguaroStats`)
        worker (`DraftWorker` or `None`): the draft's thread; `None` where no round may overlap.
        sink: what learns from the rounds and may change the draft between them, or `None`.
        temperature (`float`): of the scores, 0 when greedy; only the sink wants to know.
    """

    def __init__(self, verifier: Verifier, speculator: Speculator | ReencodingSpeculator | None, policy: Policy, transcript: Transcript,
                 stats: SaguaroStats, worker: DraftWorker | None, sink: Any = None, temperature: float = 0.0):  # fmt: skip
        self.verifier, self.speculator, self.policy, self.transcript = verifier, speculator, policy, transcript
        self.stats, self.worker, self.sink, self.temperature = stats, worker, sink, temperature
        self.session = None
        self._verdict: Future | None = None

    def run(self) -> None:
        """Decodes."""
        logits = self._prefill()
        began = time.perf_counter()
        first = self._emit(self.verifier.decide_first(logits))
        self.transcript.stream()
        outcome, prepared = self._outcome(first), None
        self._feed_back(self._nothing(), first)
        while outcome.rows:
            outcome, prepared = self._round(outcome, prepared)
        self.stats.decode_seconds = time.perf_counter() - began

    def _round(self, last_outcome: Outcome, prepared: Proposal | None) -> tuple[Outcome, Proposal | None]:
        """Verifies the proposal that was prepared beside the last round, or one that is drafted now."""
        began, cpu_began = time.perf_counter(), time.process_time()
        if self.sink is not None:
            self._learn(self.sink.before_round)
        plan = self._plan(last_outcome)
        proposal = prepared or self._serve(lambda: self.speculator.answer(last_outcome, plan))
        drafted = time.perf_counter()

        preparing = self._prepare(proposal, plan)
        logits = self.verifier.forward(proposal, self._last_tokens())
        emitted = self._emit(self.verifier.decide(logits, proposal))
        outcome = self._outcome(emitted)
        verified = time.perf_counter()
        next_prepared = self._collect(preparing, outcome)

        self._feed_back(proposal, emitted)
        seconds = time.perf_counter() - began
        cores = (time.process_time() - cpu_began) / seconds
        self._record(plan, proposal, emitted, next_prepared, was_prepared=prepared is not None,
                     verify_seconds=verified - drafted, seconds=seconds, cores=cores)  # fmt: skip
        self.transcript.stream()
        return outcome, next_prepared

    # The draft's side

    def _prefill(self) -> torch.Tensor:
        """Both models read the prompt, side by side where they can; the target's logits, `[B, V]`."""
        began = time.perf_counter()
        if self.sink is not None:
            self._learn(self._begin_session)
        read = None if self.speculator is None else self.speculator.prefill
        if read is not None and self.policy.overlaps_prefill:
            self.worker.share_cores(True)
            read = self.worker.submit(read).result
        logits = self.verifier.prefill()
        self.policy.estimates.prefill = time.perf_counter() - began
        if read is not None:
            self._guarded(read)
        self.stats.prefill_seconds = time.perf_counter() - began
        return logits

    def _plan(self, outcome: Outcome) -> RoundPlan:
        if self.speculator is None:
            return RoundPlan("autoregressive", 0, outcome.rows)
        plan = self.policy.plan(outcome.rows, outcome.room)
        if self.worker is not None:
            self.worker.share_cores(plan.overlaps)
        return plan

    def _prepare(self, proposal: Proposal, plan: RoundPlan) -> Future | None:
        if self.speculator is None or not plan.overlaps:
            return None
        self._verdict = Future()
        return self.worker.submit(self.speculator.prepare, proposal, plan, self._verdict)

    def _collect(self, preparing: Future | None, outcome: Outcome) -> Proposal | None:
        """Tells the draft how the round ended, and takes what it has for the next one."""
        if preparing is None or not outcome.rows:
            return None
        self._verdict.set_result(outcome)
        return self._serve(preparing.result)

    def _serve(self, speculate) -> Proposal:
        """Asks the draft's side for a proposal; without one, the round to come is a plain step of the target."""
        began = time.perf_counter()
        proposal = None if self.speculator is None else self._guarded(speculate)
        self.stats.wait_seconds += time.perf_counter() - began
        return proposal or self._nothing()

    def _nothing(self) -> Proposal:
        return Proposal.empty(self.transcript.batch_size, self.verifier.device)

    def _guarded(self, work: Callable[[], Any]) -> Any:
        """Runs the draft's work. If it fails, the target goes on alone: the text does not need the draft."""
        try:
            return work()
        except Exception as error:
            leave_draft_out(self.stats, error)
            self._settle_draft()
            self.speculator = None
            if self.worker is not None:
                self.worker.share_cores(False)
            return None

    def close(self) -> None:
        """Ends the draft's thread, also in the middle of a round, and settles its figures."""
        if self._verdict is not None and not self._verdict.done():
            self._verdict.set_exception(CancelledError())
        try:
            if self.worker is not None:
                self.worker.close()
        finally:  # also when a second Ctrl-C cuts the wait short
            self._settle_draft()
            if self.session is not None:
                self._learn(self._end_session)

    def _settle_draft(self) -> None:
        if self.speculator is not None:
            self.stats.draft_seconds = self.speculator.busy_seconds
            self.stats.primary_seconds = self.speculator.primary_seconds
            self.stats.backup_seconds = self.speculator.backup_seconds
            self.stats.compile_seconds = self.speculator.compile_seconds

    # The text

    def _last_tokens(self) -> torch.Tensor:
        """t* of every row, `[B, 1]`; for a row that has stopped, its last token again, to no effect."""
        return torch.cat([self.transcript.prefix(row)[:, -1:] for row in range(self.transcript.batch_size)])

    def _emit(self, decisions: list[Iterator[dict[int, Decision]]]) -> dict[int, list[Decision]]:
        """Emits what the target settled, every row up to its first stop."""
        emitted: dict[int, list[Decision]] = {}
        lengths = [len(tokens) for tokens in self.transcript.generated]
        for group in decisions:
            for step in group:
                for row, decision in step.items():
                    if not self.transcript.is_over(row):  # another row may just have ended it, by a rule over the batch
                        emitted.setdefault(row, []).append(decision)
                        self.verifier.lengths[row] += 1
                        self.transcript.append(row, decision.token, decision.scores, decision.logits)
        self._take_back(emitted, lengths)
        return emitted

    def _take_back(self, emitted: dict[int, list[Decision]], lengths: list[int]) -> None:
        """Forgets what a rule over the whole batch cut off rows that were ahead of the others."""
        for row, before in enumerate(lengths):
            kept = len(self.transcript.generated[row]) - before
            if row in emitted and kept < len(emitted[row]):
                self.verifier.lengths[row] -= len(emitted[row]) - kept
                emitted[row] = emitted[row][: max(kept, 0)]
                if not emitted[row]:
                    del emitted[row]

    def _outcome(self, emitted: dict[int, list[Decision]]) -> Outcome:
        running = self.transcript.running
        self.verifier.acceptance.forget_before({row: self.verifier.lengths[row] for row in running})
        room = max([self.transcript.remaining(row) for row in running], default=0)
        # The last token emitted counts as t* whoever wrote it: where a block is cut short, it was a proposed one.
        return Outcome(running, {row: [d.token for d in decisions] for row, decisions in emitted.items()}, room)

    # What a round leaves behind

    def _record(self, plan: RoundPlan, proposal: Proposal, emitted: dict[int, list[Decision]],
                next_prepared: Proposal | None, *, verify_seconds: float, **measured: Any) -> None:  # fmt: skip
        rows = list(emitted)
        accepted = {row: sum(decision.accepted for decision in decisions) for row, decisions in emitted.items()}
        tokens = sum(map(len, emitted.values()))
        self.stats.verify_seconds += verify_seconds
        self.stats.record_round(
            execution=plan.execution,
            backups=proposal.backups,
            hits=[proposal.hits[row] for row in rows],
            drafted=[proposal.lengths[row] for row in rows],
            accepted=list(accepted.values()),
            prepared=[next_prepared is not None and next_prepared.hits[row] for row in rows],
            emitted=tokens,
            awaited=proposal.awaited,
        )
        self.policy.saw_round(
            plan, proposal, accepted, tokens=tokens / len(rows), verify_seconds=verify_seconds, **measured
        )

    def _feed_back(self, proposal: Proposal, emitted: dict[int, list[Decision]]) -> None:
        """Hands the adaptation what the target thought of every row's chain, up to where it parted from it.

        All but the last token emitted were accepted; where a block is cut short, the last one was too, and stands for
        what the target itself added.
        """
        if self.session is None:
            return

        def observe() -> None:
            for row, decisions in emitted.items():
                proposed = proposal.tokens[row, : proposal.lengths[row]]
                scores = torch.stack([decision.scores for decision in decisions])
                self.session.observe(row, proposed, len(decisions) - 1, decisions[-1].token, scores)

        self._learn(observe)

    def _begin_session(self) -> None:
        self.session = self.sink.begin(self.verifier.prompt.known_tokens, self.temperature)
        self.sink.before_round()
        self.stats.adapter_version = (self.sink.version, self.sink.version)

    def _end_session(self) -> None:
        self.stats.adapter_version = (self.stats.adapter_version[0], self.sink.version)
        self.session.end()

    def _learn(self, work: Callable[[], None]) -> None:
        """Runs what the adaptation wants done. If it fails, the draft stays as it is for the rest of this call."""
        try:
            work()
        except Exception as error:
            logger.warning(
                f"Adaptation failed and is left out for the rest of this call: {type(error).__name__}: {error}"
            )
            session, self.sink, self.session = self.session, None, None
            if session is not None:
                with contextlib.suppress(Exception):  # said once is enough
                    session.end()
