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

    def decide(self, logits: torch.Tensor, proposal: Proposal) -> list[Iterator[Decision]]:
        """For every row its decisions in order: accepted tokens, then the one token that the target adds.

        With row-wise processors all rows are settled at once, with the round's only read from the device. Otherwise a
        row's iterator calls the processors position by position, only as far as it is asked to go.
        """
        if not self.processors.row_wise:
            return [self._walk(row, logits[row], proposal) for row in range(len(self.lengths))]
        scores = self.processors.block(self.transcript.prompts, logits)
        rows = list(range(len(self.lengths)))
        accepted, next_token = self.acceptance.verify(scores, proposal, rows, self.lengths)
        host = torch.cat([accepted[:, None], next_token[:, None], proposal.tokens], dim=1).tolist()
        return [self._settled(values, scores[row], logits[row]) for row, values in enumerate(host)]

    def decide_first(self, logits: torch.Tensor) -> list[Iterator[Decision]]:
        """The token that the prefill gives, from logits of shape `[B, V]`."""
        nothing = Proposal.empty(len(self.lengths), self.device)
        return self.decide(logits.to(dtype=torch.float32, device=self.device)[:, None], nothing)

    @staticmethod
    def _settled(values: list[int], scores: torch.Tensor, logits: torch.Tensor) -> Iterator[Decision]:
        accepted, next_token, *tokens = values
        for j in range(accepted + 1):
            yield Decision(tokens[j] if j < accepted else next_token, j < accepted, scores[j], logits[j])

    def _walk(self, row: int, logits: torch.Tensor, proposal: Proposal) -> Iterator[Decision]:
        start = self.lengths[row]
        for j in range(proposal.lengths[row] + 1):
            scores = self.processors.position(row, self.transcript.prefix(row), logits[j : j + 1])
            if j == proposal.lengths[row]:
                token = self.acceptance.choose(scores, [row], [start + j])
                yield Decision(int(token), False, scores[0], logits[j])
                return
            one = Proposal(
                proposal.tokens[row : row + 1, j : j + 1],
                [1],
                None if proposal.scores is None else proposal.scores[row : row + 1, j : j + 1],
                [proposal.point_mass[row]] if proposal.point_mass else [],
            )
            accepted, token = self.acceptance.verify(scores[:, None].expand(-1, 2, -1), one, [row], [start + j])
            if accepted:
                yield Decision(int(one.tokens), True, scores[0], logits[j])
            else:
                yield Decision(int(token), False, scores[0], logits[j])
                return
