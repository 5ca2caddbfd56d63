# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""The target's side of a round: one forward over `[t*, s_1 .. s_K]`, its processors, and what it accepts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .acceptance import CoupledVerification, Proposal, RejectionVerification
from .processors import TargetProcessors
from .prompt import Prompt
from .slot_model import SlotModel
from .transcript import Transcript


@dataclass
class Decision:
    """One token that the target settled: whether it was the proposed one, and the `[V]` rows behind it."""

    token: int
    accepted: bool
    scores: torch.Tensor
    logits: torch.Tensor


class Verifier:
    """Runs the target and applies one of the two verifications.

    Args:
        slots (`SlotModel`): the target over its cache.
        acceptance: [`CoupledVerification`] or [`RejectionVerification`].
        processors (`TargetProcessors`)
        transcript (`Transcript`)
        prompt (`Prompt`)
    """

    def __init__(self, slots: SlotModel, acceptance: CoupledVerification | RejectionVerification,
                 processors: TargetProcessors, transcript: Transcript, prompt: Prompt):  # fmt: skip
        self.slots, self.acceptance, self.processors, self.transcript = slots, acceptance, processors, transcript
        self.prompt = prompt
        self.lengths = list(prompt.lengths)  # of every row's text, which is also the position of its next token
        self.device = transcript.prompts.device

    def prefill(self) -> torch.Tensor:
        """Reads the prompts; logits of the first new token, `[B, V]`."""
        ids, positions = self.prompt.new_ids.to(self.slots.device), self.prompt.new_positions.to(self.slots.device)
        return self.slots.prefill(ids, positions)

    def forward(self, proposal: Proposal, last_tokens: torch.Tensor) -> torch.Tensor:
        """Logits of every position of a block.

        Args:
            last_tokens (`Tensor` of shape `[B, 1]`): t* of every row, not yet in the cache.

        Returns:
            `Tensor` of shape `[B, K + 1, V]`, float32, on the ids' device.
        """
        block = torch.cat([last_tokens, proposal.tokens], dim=1).to(self.slots.device)
        first = [length - 1 for length in self.lengths]
        logits = self.slots.forward(block, first, keep=block.shape[1])
        return logits.to(dtype=torch.float32, device=self.device)

    def decide(self, logits: torch.Tensor, proposal: Proposal) -> list[Iterator[dict[int, Decision]]]:
        """Decisions by row, one step of the text at a time, in groups of rows that go on independently of each other.

        A row's decisions are its accepted tokens, then the one token that the target adds. With row-wise processors all
        rows are settled at once, with the round's only read from the device. Otherwise the processors are called
        position by position, each time with what was emitted before, and only as far as the text goes on.
        """
        rows = list(range(len(self.lengths)))
        if self.processors.in_step:
            return [self._walk(rows, logits, proposal)]
        if not self.processors.row_wise:
            return [self._walk([row], logits, proposal) for row in rows]
        scores = self.processors.block(self.transcript.prompts, logits)
        accepted, next_token = self.acceptance.verify(scores, proposal, rows, self.lengths)
        host = torch.cat([accepted[:, None], next_token[:, None], proposal.tokens], dim=1).tolist()
        return [self._settled(row, host[row], scores[row], logits[row]) for row in rows]

    def decide_first(self, logits: torch.Tensor) -> list[Iterator[dict[int, Decision]]]:
        """The token that the prefill gives, from logits of shape `[B, V]`."""
        nothing = Proposal.empty(len(self.lengths), self.device)
        return self.decide(logits.to(dtype=torch.float32, device=self.device)[:, None], nothing)

    @staticmethod
    def _settled(
        row: int, values: list[int], scores: torch.Tensor, logits: torch.Tensor
    ) -> Iterator[dict[int, Decision]]:
        accepted, next_token, *tokens = values
        for j in range(accepted + 1):
            yield {row: Decision(tokens[j] if j < accepted else next_token, j < accepted, scores[j], logits[j])}

    def _walk(self, rows: list[int], logits: torch.Tensor, proposal: Proposal) -> Iterator[dict[int, Decision]]:
        """Goes on for as long as the proposed tokens of all rows are accepted.

        So rows of one group stay at the same step of the text, as in plain `generate`: a row whose chain was right for
        longer is held back, and proposes the rest again. Rows that have stopped are only shown to the processors.
        """
        running = [row for row in rows if not self.transcript.is_over(row)]
        j = 0
        while running:
            given = logits[rows, j]
            scores = self.processors.position(rows, self.transcript.prefixes(rows), given)
            shown = [rows.index(row) for row in running]
            given, scores = given[shown], scores[shown]
            next_proposed = Proposal(
                proposal.tokens[running, j : j + 1],
                [int(j < proposal.lengths[row]) for row in running],
                None if proposal.scores is None else proposal.scores[running, j : j + 1],
                [proposal.point_mass[row] for row in running],
            )
            accepted, tokens = self.acceptance.verify(
                scores[:, None].expand(-1, next_proposed.width + 1, -1),
                next_proposed,
                running,
                [self.lengths[row] for row in running],
            )
            accepted = accepted.bool()
            if next_proposed.width:
                tokens = next_proposed.tokens[:, 0].where(accepted, tokens)
            settled = zip(tokens.tolist(), accepted.tolist(), scores, given)
            step = {row: Decision(*values) for row, values in zip(running, settled)}
            yield step
            running = [row for row in running if not self.transcript.is_over(row)]
            if not all(step[row].accepted for row in running):
                return
            j += 1
