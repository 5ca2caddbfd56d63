# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""A draft with another tokenizer: it reads the text, drafts in its own tokens, and the text it drafted is encoded for
the target.

The target's tokens come from no law that it could know, so they are verified as a point mass; nothing is prepared,
since an outcome in the target's tokens says nothing about one in the draft's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch import nn

from .acceptance import Proposal
from .policy import Policy, RoundPlan
from .slot_model import SlotModel
from .speculation_cache import Outcome


# Draft text is cut to K target tokens, but how many draft tokens make up those is not known beforehand.
_DEFAULT_DEPTH = 5


class ReencodingSpeculator:
    """Serves proposals as [`Speculator`] does, across two tokenizers.

    Args:
        draft (`PreTrainedModel`)
        tokenizer, assistant_tokenizer: the target's and the draft's.
        policy (`Policy`)
        prefix (`Callable[[int], Tensor]`): the target's ids of a row so far, `[1, L]`.
        batch_size (`int`), device (`torch.device`): of the proposals.
        vocab_size (`int`): the target's; a tokenizer may know more ids than its model.
    """

    def __init__(
        self,
        draft: nn.Module,
        tokenizer,
        assistant_tokenizer,
        policy: Policy,
        prefix: Callable[[int], torch.Tensor],
        batch_size: int,
        device: torch.device,
        vocab_size: int,
    ):
        self._vocab_size = vocab_size
        self._slots = [SlotModel(draft, 1) for _ in range(batch_size)]
        self._read: list[list[int]] = [[] for _ in range(batch_size)]  # the draft ids that each row's cache holds
        self._tokenizer, self._assistant_tokenizer = tokenizer, assistant_tokenizer
        self._policy, self._prefix, self._device = policy, prefix, device
        self.busy_seconds = self.primary_seconds = self.backup_seconds = self.compile_seconds = 0.0

    def prefill(self) -> None:
        """Nothing to read yet: the first chain reads the prompt."""

    def close(self) -> None:
        """As [`Speculator.close`]."""
        for slots in self._slots:
            slots.close()

    def prepare(self, proposal: Proposal, plan: RoundPlan, verdict: Future) -> Proposal:
        """As [`Speculator.prepare`], with nothing prepared."""
        return self.answer(verdict.result(), plan)

    def answer(self, outcome: Outcome, plan: RoundPlan) -> Proposal:
        """The next proposal."""
        rows, depth = outcome.rows, min(plan.depth, outcome.room - 1)
        began = time.perf_counter()
        if self._policy.config.num_assistant_tokens == "auto":
            depth = min(depth, _DEFAULT_DEPTH)
        chains = {row: self._chain(row, depth) for row in rows} if depth > 0 else {}
        lengths = [len(chains.get(row, [])) for row in range(len(self._slots))]
        tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
        for row, chain in chains.items():
            tokens[row, : len(chain)] = torch.tensor(chain, dtype=torch.long)
        seconds = time.perf_counter() - began
        self.busy_seconds += seconds
        self.backup_seconds += seconds
        batch = range(len(lengths))
        return Proposal(
            tokens.to(self._device),
            lengths,
            None,
            [True for _ in batch],
            [False for _ in batch],
            ["draft" if depth > 0 else "none"] * len(rows),
            [[] for _ in batch],
        )

    def _chain(self, row: int, depth: int) -> list[int]:
        """Target tokens of what the draft would write next."""
        text = self._tokenizer.decode(self._prefix(row)[0], skip_special_tokens=True)
        ids = self._assistant_tokenizer.encode(text)
        if not ids:
            return []
        slots, read = self._slots[row], self._read[row]
        shared = next((i for i, (a, b) in enumerate(zip(read, ids)) if a != b), min(len(read), len(ids)))
        shared = min(shared, len(ids) - 1)  # at least the last token is read again: its scores are wanted
        drafted: list[int] = []
        feed = ids[shared:]
        while len(drafted) < depth:
            tokens = torch.tensor([feed], device=slots.device)
            first = len(ids) + len(drafted) - len(feed)
            feed = [int(slots.forward(tokens, [first], keep=1)[0, -1].argmax())]
            drafted += feed
        self._read[row] = ids + drafted[:-1]
        # Decoded together with the text: a tokenizer may write the first word of a chain without its space.
        known = self._assistant_tokenizer.decode(ids, skip_special_tokens=True)
        written = self._assistant_tokenizer.decode(ids + drafted, skip_special_tokens=True)
        if not written.startswith(known):
            return []
        chain = self._tokenizer.encode(written[len(known) :], add_special_tokens=False)[:depth]
        unknown = next((i for i, token in enumerate(chain) if token >= self._vocab_size), len(chain))
        return chain[:unknown]
