# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""The target's side of a round: one forward over `[t*, s_1 .. s_K]`, its processors, and what it accepts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .. import kernels
from .acceptance import CoupledVerification, Proposal, RejectionVerification
from .processors import TargetProcessors
from .prompt import Prompt
from .slot_model import SlotModel
from .transcript import Transcript


@dataclass
class Decision:
    """One token that the target settled: whether it was the proposed one, and the `[V]` rows behind it, where asked for."""

    token: int
    accepted: bool
    scores: torch.Tensor | None = None
    logits: torch.Tensor | None = None


class Verifier:
    """Runs the target and applies one of the two verifications.

    Args:
        slots (`SlotModel`): the target over its cache.
        acceptance: [`CoupledVerification`] or [`RejectionVerification`].
        processors (`TargetProcessors`)
        transcript (`Transcript`)
        prompt (`Prompt`)
        shows_scores (`bool`): somebody looks at the decisions' scores or logits.
    """

    def __init__(self, slots: SlotModel, acceptance: CoupledVerification | RejectionVerification,
                 processors: TargetProcessors, transcript: Transcript, prompt: Prompt, shows_scores: bool):  # fmt: skip
        self.slots, self.acceptance, self.processors, self.transcript = slots, acceptance, processors, transcript
        self.prompt, self.shows_scores = prompt, shows_scores
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
            `Tensor` of shape `[B, K + 1, V]`, on the ids' device.
        """
        block = torch.cat([last_tokens, proposal.tokens], dim=1).to(self.slots.device)
        first = [length - 1 for length in self.lengths]
        return self.slots.forward(block, first, keep=block.shape[1]).to(self.device)

    def decide(self, logits: torch.Tensor, proposal: Proposal) -> list[Iterator[dict[int, Decision]]]:
        """Decisions by row, one step of the text at a time, in groups of rows that go on independently of each other.

        A row's decisions are its accepted tokens, then the one token that the target adds. All rows are settled at once,
        with the round's only read from the device (but for those of some stock processors themselves), unless a processor
        must see nothing but what was emitted: then they are called position by position, only as far as the text goes on.
        """
        rows = list(range(len(self.lengths)))
        if self._needs_no_processors(logits):
            verdict = self.acceptance.verify(logits, proposal, rows, self.lengths, self.processors.filters)
            return self._settled(*verdict, proposal)
        logits = logits.float()
        if self.processors.in_step:
            return [self._walk(rows, logits, proposal)]
        if not self.processors.may_suppose:
            return [self._walk([row], logits, proposal) for row in rows]
        if self.processors.row_wise:
            scores = self.processors.block(self.transcript.prompts, logits)
        else:
            scores = torch.stack([self._supposing_acceptance(row, logits[row], proposal) for row in rows])
        verdict = self.acceptance.verify(scores, proposal, rows, self.lengths)
        return self._settled(*verdict, proposal, scores, logits)

    def decide_first(self, logits: torch.Tensor) -> list[Iterator[dict[int, Decision]]]:
        """The token that the prefill gives, from logits of shape `[B, V]`."""
        nothing = Proposal.empty(len(self.lengths), self.device)
        return self.decide(logits.to(self.device)[:, None], nothing)

    def _needs_no_processors(self, logits: torch.Tensor) -> bool:
        """Whether the kernel takes the logits as they come, without a pass of processors before it."""
        return self.processors.filters is not None and not self.shows_scores and kernels.uses_triton(logits)

    def _supposing_acceptance(self, row: int, logits: torch.Tensor, proposal: Proposal) -> torch.Tensor:
        """Scores of a row's block, each position after all the proposed tokens before it: `[K + 1, V]` -> `[K + 1, V]`.

        Past its chain, and in a row that has stopped, nothing can be decided and all is left as it is.
        """
        count = 0 if self.transcript.is_over(row) else proposal.lengths[row] + 1
        text = torch.cat([self.transcript.prefix(row), proposal.tokens[row : row + 1]], dim=1)
        start = text.shape[1] - proposal.width
        scores = [self.processors.position([row], text[:, : start + j], logits[j : j + 1]) for j in range(count)]
        return torch.cat([*scores, logits[count:]])

    @staticmethod
    def _settled(accepted: torch.Tensor, next_token: torch.Tensor, proposal: Proposal,
                 scores: torch.Tensor | None = None, logits: torch.Tensor | None = None):  # fmt: skip
        host = torch.cat([accepted[:, None], next_token[:, None], proposal.tokens], dim=1).tolist()

        def decisions(row: int) -> Iterator[dict[int, Decision]]:
            accepted, next_token, *tokens = host[row]
            for j in range(accepted + 1):
                shown = () if scores is None else (scores[row, j], logits[row, j])
                yield {row: Decision(tokens[j] if j < accepted else next_token, j < accepted, *shown)}

        return [decisions(row) for row in range(len(host))]

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
            host = torch.stack([tokens, accepted.to(tokens.dtype)], dim=1).tolist()
            step = {row: Decision(token, bool(is_proposed), scores[i], given[i])
                    for i, (row, (token, is_proposed)) in enumerate(zip(running, host))}  # fmt: skip
            yield step
            running = [row for row in running if not self.transcript.is_over(row)]
            if not all(step[row].accepted for row in running):
                return
            j += 1
