# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""How a draft model drafts: a chain, the glue pass, a tree of continuations. It knows nothing about threads.

One round of the draft beside the target (arXiv 2603.03251, section 4.1 and appendix B):

1. glue: the draft reads `[t*, s_1 .. s_K]` that the target is verifying, in one pass. That writes their keys and values
   where the text keeps them, and gives the scores from which the likely outcomes, the forks, are taken;
2. tree: K passes over all forks at once, one token a branch a pass. Branch (k, t) continues `s_1 .. s_k, t`.

Nothing is copied when a branch comes true: the next glue pass reads its tokens anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from .. import kernels
from .acceptance import CoupledVerification, Proposal, RejectionVerification
from .processors import DraftProcessors
from .prompt import Prompt
from .slot_model import SlotModel
from .transfer import send, take_rows
from .tree_mask import TreeLayout


_Ahead = Callable[[int], list[torch.Tensor]]


@dataclass
class Chain:
    """Draft tokens of some rows: `tokens[j]` is the j-th of every row, `[R]`; `scores[j]` the `[R, V]` they came from
    (`None` where verification needs no scores), and `confidence[j]` their probability, `[R]`."""

    rows: list[int]
    tokens: list[torch.Tensor] = field(default_factory=list)
    scores: list[torch.Tensor | None] = field(default_factory=list)
    confidence: list[torch.Tensor] = field(default_factory=list)
    pass_began: float | None = None  # when its last pass did, `None` before it has one of its own
    _read: list[list[float]] = field(default_factory=list)

    def read_confidence(self) -> list[list[float]]:
        """`confidence` on the host, one list a token. What was read once is not asked of the device again."""
        unread = self.confidence[len(self._read) :]
        if unread:
            self._read += torch.stack(unread).tolist()
        return self._read

    def of_row(self, r: int) -> list[torch.Tensor]:
        """The tokens of one row, each `[1]`."""
        return [tokens[r : r + 1] for tokens in self.tokens]


@dataclass
class Tree:
    """Prepared continuations. Branch `m` of row `rows[r]` answers the outcome `(depths[m], forks[r][m])`.

    Attributes:
        forks (`Tensor` of shape `[R, M]`): the guessed t* of every row and branch; -1 where a row has no such depth.
        tokens, scores, confidence: one entry a pass, `[R, M]`, `[R, M, V]` and `[R, M]`, as in [`Chain`].
        sent (`Tensor` of shape `[R, K]`): the chain being verified.
        text_lengths (`list[int]`): the length of every row's text when the tree was planted.
    """

    rows: list[int]
    depths: list[int]
    forks: torch.Tensor
    layout: TreeLayout
    text_lengths: list[int]
    sent: torch.Tensor
    tokens: list[torch.Tensor] = field(default_factory=list)
    scores: list[torch.Tensor | None] = field(default_factory=list)
    confidence: list[torch.Tensor] = field(default_factory=list)

    @property
    def fork_tokens(self) -> torch.Tensor:
        return self.forks.clamp_min(0)

    def root_of(self, r: int, m: int) -> list[torch.Tensor]:
        """What lies between the text and the first token of a branch: `s_1 .. s_k` and `t`."""
        return [self.sent[r, : self.depths[m]], self.forks[r, m : m + 1].clamp_min(0)]

    def text_of(self, r: int, m: int) -> list[torch.Tensor]:
        return [*self.root_of(r, m), *(tokens[r, m : m + 1] for tokens in self.tokens)]


class Drafter:
    """Drafts over a [`SlotModel`].

    Args:
        slots (`SlotModel`): the draft over its cache.
        acceptance: the call's verification; the draft draws as it says.
        processors (`DraftProcessors`)
        prompt (`Prompt`): tokens that only the target's cache holds are unknown to the draft, but count positions.
        vocab_size (`int`): of the target. Ids that the draft does not know are never drafted, and read as id 0.
        ids (`Tensor` of shape `[B, L]`): the prompts as `generate` was given them, for processors that look at the text.
    """

    def __init__(self, slots: SlotModel, acceptance: CoupledVerification | RejectionVerification,
                 processors: DraftProcessors, prompt: Prompt, vocab_size: int,
                 ids: torch.Tensor):  # fmt: skip
        self.slots, self.acceptance, self.processors = slots, acceptance, processors
        self.prompts, self._offsets, self.vocab_size = prompt.known_tokens, prompt.offsets, vocab_size
        self._ids = ids.to(slots.device)
        self.known_ids = slots.model.get_input_embeddings().num_embeddings
        self._prompt_lengths = [len(tokens) for tokens in self.prompts]
        self.lengths = list(self._prompt_lengths)
        self.valid = [0] * len(self.prompts)
        self._text = torch.zeros(len(self.prompts), 2 * max(self.lengths) + 64, dtype=torch.long, device=slots.device)
        for row, tokens in enumerate(self.prompts):
            self._text[row, : len(tokens)] = tokens

    # What the draft knows of the text

    def advance(self, row: int, tokens: list[int]) -> None:
        """The text of a row grew by `tokens`: what was accepted, and t*."""
        start, stop = self.lengths[row], self.lengths[row] + len(tokens)
        if stop > self._text.shape[1]:
            self._text = torch.cat([self._text, torch.zeros_like(self._text)], dim=1)
        self._text[row, start:stop] = send(tokens, self._text.device)
        self.lengths[row] = stop
        # Of what was written past the old text, only the accepted chain is part of the new one.
        self.valid[row] = min(self.valid[row], stop - 1)

    def _unread(self, rows: list[int]) -> tuple[torch.Tensor, list[int]]:
        """The stretch that ends each row's text and that the cache has not read, with its first positions.

        Rows are cut to one width; a row that has read more reads its last tokens again, to the same effect.
        """
        # At least t* itself, although a chain drafted on the spot has read it: its scores are wanted again.
        width = max(self.lengths[row] - min(self.valid[row], self.lengths[row] - 1) for row in rows)
        first = [self.lengths[row] - width for row in rows]
        if len(rows) == 1 and first[0] >= 0:
            return self._known(self._text[rows[0] : rows[0] + 1, first[0] : first[0] + width]), first
        columns = send(first, self.slots.device)[:, None] + self.slots.slots(width)
        return self._known(take_rows(self._text, rows).gather(1, columns.clamp_min(0))), first

    def _known(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens if self.known_ids >= self.vocab_size else tokens.where(tokens < self.known_ids, 0)

    # Drafting

    def prefill(self) -> None:
        """Reads the prompts."""
        width = max(self.lengths)
        columns = self.slots.slots(width).expand(len(self.lengths), -1)
        positions = columns.where(columns < torch.tensor(self.lengths, device=self.slots.device)[:, None], -1)
        self.slots.prefill(self._known(self._text[:, :width]), positions)
        self.valid = list(self.lengths)

    def chain(self, rows: list[int], depth: int, go_on: Callable[[Chain], bool]) -> Chain:
        """Drafts up to `depth` tokens after the text, one pass a token, as long as `go_on` says so."""
        chain = Chain(rows)
        feed, first = self._unread(rows)
        while True:
            chain.pass_began = time.perf_counter()
            logits = self.slots.forward(feed, first, keep=1, rows=rows)[:, -1]
            ahead = len(chain.tokens)
            self._extend(chain, logits, [self.lengths[row] + ahead for row in rows], lambda i: chain.of_row(i))
            if ahead + 1 == depth or not go_on(chain):
                break
            feed, first = self._known(chain.tokens[-1][:, None]), [self.lengths[row] + ahead for row in rows]
        for row in rows:
            self.valid[row] = self.lengths[row] + len(chain.tokens) - 1
        return chain

    def glue(self, rows: list[int], proposal: Proposal) -> torch.Tensor:
        """Reads t* and the chain that the target is verifying.

        Returns:
            The draft's processed scores after t*, s_1, .. s_K: `[R, K + 1, V]`.
        """
        sent = take_rows(proposal.for_draft(self.slots.device), rows)
        feed, first = self._unread(rows)
        width = sent.shape[1]
        logits = self.slots.forward(torch.cat([feed, self._known(sent)], dim=1), first, keep=width + 1, rows=rows)
        for row in rows:
            self.valid[row] = self.lengths[row] + proposal.lengths[row]
        flat_rows = [row for row in rows for _ in range(width + 1)]
        scores = self._scores(logits.flatten(0, 1), flat_rows, lambda i: [sent[i // (width + 1), : i % (width + 1)]])
        return scores.view(len(rows), width + 1, -1)

    def plant(self, rows: list[int], proposal: Proposal, scores: torch.Tensor, fan_out: list[int]) -> Tree:
        """Picks the likely outcomes of the round: the top `fan_out[k]` next tokens at every accept length k.

        Args:
            scores (`Tensor` of shape `[R, K + 1, V]`): from [`Drafter.glue`].
            fan_out (`list[int]`): K + 1 counts.
        """
        width = scores.shape[1]
        flat_rows = [row for row in rows for _ in range(width)]
        positions = [self._position(row, self.lengths[row] + j) for row in rows for j in range(width)]
        ranked = self.acceptance.fork_scores(scores.flatten(0, 1), flat_rows, positions).view_as(scores)
        lengths = send([proposal.lengths[row] for row in rows], self.slots.device)
        sent = take_rows(proposal.for_draft(self.slots.device), rows)
        forks = kernels.select_forks(ranked, sent, lengths, fan_out)
        depths = [k for k, count in enumerate(fan_out) for _ in range(count)]
        # A branch at depth k sees the text up to s_k, which stands at position length + k - 1, in slot length + k.
        text_lengths = [self.lengths[row] for row in rows]
        limits = send(text_lengths, self.slots.device)[:, None] + send(depths, self.slots.device)
        layout = TreeLayout(limits, start=max(text_lengths) + width + 1)
        return Tree(rows, depths, forks, layout, text_lengths, sent)

    def grow(self, tree: Tree) -> None:
        """One pass: one more token on every branch."""
        step = len(tree.tokens)
        feed = tree.tokens[-1] if tree.tokens else tree.fork_tokens
        logits = self.slots.tree(self._known(feed), tree.layout, step, rows=tree.rows)
        branches = range(len(tree.depths))
        flat_rows = [row for row in tree.rows for _ in branches]
        ahead = [length + depth + 1 + step for length in tree.text_lengths for depth in tree.depths]
        drawn = self._draw(logits.flatten(0, 1), flat_rows, ahead, lambda i: tree.text_of(*divmod(i, len(branches))))
        for kept, values in zip((tree.tokens, tree.scores, tree.confidence), drawn):
            kept.append(None if values is None else values.view(len(tree.rows), len(branches), *values.shape[1:]))

    def harvest(self, tree: Tree, picks: dict[int, int], depth: int, go_on: Callable[[Chain], bool]) -> Chain:
        """The chains of the branches that came true, finished alone where `go_on` says so.

        Args:
            picks (`dict[int, int]`): row -> its branch.
            depth (`int`): longest chain wanted.
        """
        rows, branches = list(picks), list(picks.values())
        places = [tree.rows.index(row) for row in rows]
        r, m = send(places, self.slots.device), send(branches, self.slots.device)
        grown = (tree.tokens[:depth], tree.scores[:depth], tree.confidence[:depth])
        chain = Chain(rows, *([None if values is None else values[r, m] for values in kept] for kept in grown))
        layout = TreeLayout(tree.layout.limits[r], tree.layout.start)
        fork = tree.fork_tokens[r, m]
        while len(chain.tokens) < depth and go_on(chain):
            chain.pass_began, step = time.perf_counter(), len(chain.tokens)
            feed = chain.tokens[-1] if chain.tokens else fork
            logits = self.slots.tree(self._known(feed[:, None]), layout, step, rows=rows, branches=branches)[:, -1]
            ahead = [
                tree.text_lengths[place] + tree.depths[branch] + 1 + step for place, branch in zip(places, branches)
            ]
            self._extend(chain, logits, ahead, lambda i: [*tree.root_of(places[i], branches[i]), *chain.of_row(i)])
        return chain

    # Scores and draws

    def _extend(self, chain: Chain, logits: torch.Tensor, at: list[int], ahead: _Ahead) -> None:
        drawn = self._draw(logits, chain.rows, at, ahead)
        for kept, values in zip((chain.tokens, chain.scores, chain.confidence), drawn):
            kept.append(values)

    def _draw(self, logits: torch.Tensor, rows: list[int], at: list[int], ahead: _Ahead):
        """Draws a token for each of `R` rows of logits.

        Args:
            at (`list[int]`): where the tokens will stand in the draft's text.
            ahead: gives, for each of them, the hypothetical tokens between the text and it, in pieces.

        Returns:
            Tokens `[R]`, the scores they were drawn from `[R, V]` (or `None`), and their probabilities `[R]`.
        """
        scores = self._scores(logits, rows, ahead)
        tokens, law = self.acceptance.draw(scores, rows, [self._position(row, place) for row, place in zip(rows, at)])
        confidence = (scores.gather(1, tokens[:, None])[:, 0] - scores.logsumexp(dim=-1)).exp()
        return tokens, law, confidence

    def _scores(self, logits: torch.Tensor, rows: list[int], ahead: _Ahead) -> torch.Tensor:
        """Processed scores over the target's vocabulary, `[R, V]`, float32."""
        logits = logits[:, : self.vocab_size].float()
        if logits.shape[1] < self.vocab_size:
            logits = F.pad(logits, (0, self.vocab_size - logits.shape[1]), value=-torch.inf)
        return self.processors(logits, rows, lambda i: self._hypothetical(rows[i], ahead(i)))

    def _hypothetical(self, row: int, ahead: list[torch.Tensor]) -> torch.Tensor:
        written = self._text[row, self._prompt_lengths[row] : self.lengths[row]]
        return torch.cat([self._ids[row], written, *ahead])[None]

    def _position(self, row: int, place: int) -> int:
        return self._offsets[row] + place
