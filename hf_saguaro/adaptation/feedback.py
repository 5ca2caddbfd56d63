# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""What the rounds of a `generate` call leave behind: text, and what the target thought of each token of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ..kernels import top_k_with_residual
from .losses import TeacherRows


# Text is handed over in pieces of this many rows, so that one endless answer is bounded and learned from while it runs.
PIECE_ROWS = 512
# Rows of scores that may wait to be looked at: a vocabulary of numbers each.
ROWS_AT_ONCE = 16
# Tokens kept before the first row of a piece. What a longer prompt said earlier is cut off; positions stay true.
CONTEXT_TOKENS = 1024


@dataclass
class Branch:
    """What followed a rejected token, for the discard term.

    Args:
        row (`int`): row of the sequence at which the draft was rejected.
        tokens (`Tensor` of shape `[n]`, int32): the rejected token and those drafted after it.
        teacher (`TeacherRows`): the target's distribution after each of them.
    """

    row: int
    tokens: torch.Tensor
    teacher: TeacherRows


@dataclass
class FeedbackSequence:
    """A piece of emitted text with its context, on the CPU.

    Args:
        tokens (`Tensor` of shape `[L]`, int32): context and text.
        start (`int`): position of `tokens[0]` in the whole sequence.
        first (`int`): index of the first token that has a row; the R rows belong to `tokens[first : first + R]`, the end.
        teacher (`TeacherRows`): the target's distribution that each of these tokens came from.
        temperature (`float`): of the traffic; 0 is greedy.
        version (`int`): version of the adapter that drafted last.
        held_out (`bool`): whether it is for validation only.
        branches (`list[Branch]`): rejected continuations, where they were handed over.
        outside_vocabulary (`int`): rows at which the target preferred a token that the draft does not know.
        number (`int`): how many came before it; the buffer counts.
    """

    tokens: torch.Tensor
    start: int
    first: int
    teacher: TeacherRows
    temperature: float = 0.0
    version: int = 0
    held_out: bool = False
    branches: list[Branch] = field(default_factory=list)
    outside_vocabulary: int = 0
    number: int = 0
    # Rounds that this text takes with the adapter of a version (0 is the bare draft); filled by the gate.
    rounds: dict[int, float] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.teacher.log_probs.shape[0]

    @property
    def nbytes(self) -> int:
        tensors = [self.tokens, *self.teacher]
        for branch in self.branches:
            tensors += [branch.tokens, *branch.teacher]
        return sum(tensor.nbytes for tensor in tensors)


@dataclass
class _Row:
    """One running row of a batch: its text so far, and the rows since the last piece."""

    context: torch.Tensor
    held_out: bool
    start: int = 0
    count: int = 0
    tokens: list[torch.Tensor] = field(default_factory=list)
    teachers: list[TeacherRows] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    outside_vocabulary: list[torch.Tensor] = field(default_factory=list)


@dataclass
class _Scored:
    """A row's share of a round, until its scores are looked at: `place` is where in the piece the `rejected` tokens were."""

    state: _Row
    emitted: int
    place: int
    rejected: torch.Tensor
    scores: torch.Tensor


class FeedbackSession:
    """Collects the feedback of one `generate` call; the generation thread calls it.

    Args:
        prompts (`list[Tensor]`): the real token ids of each row, 1-D.
        temperature (`float`): of the traffic; 0 is greedy.
        top_k (`int`): log-probabilities kept a row.
        vocab_size (`int`): the draft's. Target tokens past it are cut off and the rest renormalised: a draft cannot learn
            what it cannot say.
        held_out (`list[bool]`): which rows are for validation only.
        deliver (`Callable[[FeedbackSequence], None]`): takes finished pieces.
        version (`Callable[[], int]`): the version that drafts.
    """

    def __init__(self, prompts: list[torch.Tensor], temperature: float, top_k: int, vocab_size: int,
                 held_out: list[bool], deliver: Callable[[FeedbackSequence], None], version: Callable[[], int]):  # fmt: skip
        self._temperature, self._top_k, self._vocab_size = temperature, top_k, vocab_size
        self._deliver, self._version = deliver, version
        self._waiting: list[_Scored] = []
        self._rows = [_Row(prompt.reshape(-1), flag) for prompt, flag in zip(prompts, held_out)]

    def observe(self, row: int, proposed: torch.Tensor, accepted: int, next_token: int, scores: torch.Tensor) -> None:
        """Takes one row's share of a round.

        Args:
            row (`int`): row of the batch.
            proposed (`Tensor` of shape `[n]`, int): what the draft proposed.
            accepted (`int`): how many of them were accepted.
            next_token (`int`): the token after them.
            scores (`Tensor` of shape `[m, V]`): the target's processed scores where each emitted token was chosen: m is
                `accepted + 1`, or `accepted` in a round that a stop cut short. With `n + 1` rows, those of the rejected
                branch follow (only of use for the discard term). Kept for a few rounds; not to be written to.
        """
        state = self._rows[row]
        # The caller may run under inference mode; what is trained on later must not be inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            emitted = min(accepted + 1, scores.shape[0])
            tokens = proposed[:accepted].clone()
            if emitted > accepted:
                tokens = torch.cat([tokens, tokens.new_full((1,), next_token)])
            state.tokens.append(tokens)
            rejected = proposed[accepted:].clone()
            self._waiting.append(_Scored(state, emitted, state.count + accepted, rejected, scores))
        state.count += emitted
        is_piece = state.count >= PIECE_ROWS
        if is_piece or sum(len(scored.scores) for scored in self._waiting) >= ROWS_AT_ONCE:
            self._take_scores()
        if is_piece:
            self._hand_over(state)

    def end(self) -> None:
        """Hands over what is left."""
        self._take_scores()
        for state in self._rows:
            if state.count:
                self._hand_over(state)

    def _take_scores(self) -> None:
        """Of the scores that wait, keeps what is learned from: once for several rounds and rows, which costs little more
        than once for one."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        with torch.inference_mode(False), torch.no_grad():
            scores = torch.cat([scored.scores for scored in waiting])
            lengths = [len(scored.scores) for scored in waiting]
            teachers = zip(*(part.split(lengths) for part in self._teacher_of(scores)))
            for scored, teacher, own in zip(waiting, teachers, scores.split(lengths)):
                state, emitted = scored.state, scored.emitted
                if scores.shape[1] > self._vocab_size:
                    state.outside_vocabulary.append((own[:emitted].argmax(dim=-1) >= self._vocab_size).sum())
                state.teachers.append(TeacherRows(*(part[:emitted] for part in teacher)))
                if len(own) > emitted:
                    tail = TeacherRows(*(part[emitted:] for part in teacher))
                    state.branches.append(Branch(scored.place, scored.rejected, tail))

    def _teacher_of(self, scores: torch.Tensor) -> TeacherRows:
        scores = scores[:, : self._vocab_size]
        return TeacherRows(*top_k_with_residual(scores, min(self._top_k, scores.shape[1])))

    def _hand_over(self, state: _Row) -> None:
        with torch.inference_mode(False), torch.no_grad():
            context = state.context.to("cpu", torch.int32)
            text = torch.cat(state.tokens).to("cpu", torch.int32)
            cut = max(0, len(context) - CONTEXT_TOKENS)
            sequence = FeedbackSequence(
                tokens=torch.cat([context[cut:], text]),
                start=state.start + cut,
                first=len(context) - cut,
                teacher=_compact([torch.cat(parts) for parts in zip(*state.teachers)]),
                temperature=self._temperature,
                version=self._version(),
                held_out=state.held_out,
                branches=[
                    Branch(branch.row, branch.tokens.to("cpu", torch.int32), _compact(branch.teacher))
                    for branch in state.branches
                ],
                outside_vocabulary=int(sum(state.outside_vocabulary)),
            )
        state.context, state.start, state.count = sequence.tokens, sequence.start, 0
        state.tokens, state.teachers, state.branches, state.outside_vocabulary = [], [], [], []
        # A row where every token the draft knows is ruled out teaches nothing, and a text with a hole is no text.
        if sequence.first > 0 and bool(sequence.teacher.log_probs[:, 0].isfinite().all()):
            self._deliver(sequence)


def _compact(parts) -> TeacherRows:
    log_probs, token_ids, log_residual = parts
    return TeacherRows(
        log_probs.to("cpu", torch.float32), token_ids.to("cpu", torch.int32), log_residual.to("cpu", torch.float32)
    )
