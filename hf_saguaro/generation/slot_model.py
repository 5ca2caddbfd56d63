# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""One causal language model over a slot cache: tokens in, logits out, nothing else decided here."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import time
import weakref
from typing import Any

import torch
from torch import nn

from .. import compat
from .few_rows import FewRows
from .slot_cache import SlotCache, Storage
from .transfer import send
from .tree_mask import AttentionKinds, TreeLayout, causal


# Longest run of prompt tokens fed at once: bounds the mask's memory, costs nothing in speed.
PREFILL_CHUNK = 1024
# Slots that compiled passes round up to; and the seconds from which on a pass must have compiled.
_BUCKET = 128
_COMPILING = 1.0


# For each model the slots of an earlier call, layer by layer.
_SPARE: weakref.WeakKeyDictionary[nn.Module, list[Storage]] = weakref.WeakKeyDictionary()


class SlotModel:
    """Runs `model` over a [`SlotCache`].

    Args:
        model (`PreTrainedModel` or a wrapper of one): decoder-only, eager or sdpa attention.
        batch_size (`int`): rows of the cache.
        compiled (`bool`): whether decoding passes run through `torch.compile`. Their shapes are then fixed: attention
            always sees a whole number of buckets of slots, and the mask hides the rest.
        last_position (`int`): of any token that can still matter. A block may be wider than the room that is left to
            some row, and a table of learned positions ends somewhere.
    """

    def __init__(self, model: nn.Module, batch_size: int, compiled: bool = False, last_position: int = sys.maxsize):
        self.model = model
        self.batch_size = batch_size
        self.last_position = last_position
        self.device = compat.execution_device(model)
        self.dtype = model.dtype
        self.cache = SlotCache(batch_size, last_position, _SPARE.pop(model, []))
        self.kinds = AttentionKinds.of(model.config)
        self._slots = torch.arange(0, device=self.device)
        parameters = inspect.signature(compat.unwrap(model).forward).parameters
        self._keeps_logits = "logits_to_keep" in parameters
        self._takes_positions = "position_ids" in parameters
        self._runs_compiled = compiled or compat.is_compiled(model)
        self._compiled = _compiled_forward(model) if compiled else None
        self.compile_seconds = 0.0
        # What is compiled has chosen its kernels.
        self._few_rows = None if self._runs_compiled else FewRows(model)

    def close(self) -> None:
        """Leaves the cache's slots, without the text, to the next call of this model."""
        _SPARE[self.model] = self.cache.cleared()

    def forward(
        self, tokens: torch.Tensor, first: list[int], *, keep: int, rows: list[int] | None = None
    ) -> torch.Tensor:
        """Feeds a contiguous stretch of text of every row.

        Args:
            tokens (`Tensor` of shape `[R, n]`): `tokens[r, i]` stands at position `first[r] + i`; columns at negative
                positions are padding and go to the bin.
            keep (`int`): how many of the last columns' logits to return.
            rows (`list[int]`, *optional*): the batch rows that the `R` rows are; all of them by default.

        Returns:
            `Tensor` of shape `[R, keep, V]` in the model's dtype.
        """
        n = tokens.shape[1]
        uniform = min(first) == max(first)
        offsets = self.slots(n)
        if uniform and first[0] >= 0:
            positions = (offsets + first[0]).expand(len(first), -1)
        else:
            positions = offsets + send(first, self.device)[:, None]
        start = first[0] + 1 if uniform and first[0] >= 0 else None
        end = max(first) + n + 1
        return self._run(tokens, positions.clamp_min(0), positions.clamp_min(-1) + 1, start, end, keep, rows)

    def plain_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of a whole text, `[1, n]` -> `[1, n, V]`, read as plain `generate` reads it: no cache, no mask."""
        positions = {"position_ids": self.slots(tokens.shape[1])[None]} if self._takes_positions else {}
        return self.model(input_ids=tokens, use_cache=False, **positions).logits

    def prefill(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Feeds prompts column by column as given, padding and all.

        Args:
            tokens (`Tensor` of shape `[B, n]`), positions (`Tensor` of shape `[B, n]`): -1 marks padding.

        Returns:
            Logits of the last column, `[B, V]`.
        """
        highest = int(positions.max())
        contiguous = (
            self.batch_size == 1 and int(positions[0, 0]) >= 0 and highest - int(positions[0, 0]) + 1 == tokens.shape[1]
        )
        for column in range(0, tokens.shape[1], PREFILL_CHUNK):
            part = positions[:, column : column + PREFILL_CHUNK]
            ids = tokens[:, column : column + PREFILL_CHUNK]
            start = int(part[0, 0]) + 1 if contiguous else None
            end = int(part.max().clamp_min(0)) + 2
            logits = self._run(ids, part.clamp_min(0), part + 1, start, end, 1, None, compiled=False)
        return logits[:, -1]

    def tree(self, tokens: torch.Tensor, layout: TreeLayout, step: int, *, rows: list[int],
             branches: list[int] | None = None) -> torch.Tensor:  # fmt: skip
        """Feeds one token to every branch of a tree, or to one branch a row.

        Args:
            tokens (`Tensor` of shape `[R, M]`), or `[R, 1]` with `branches`.
            step (`int`): passes before this one.
            rows (`list[int]`): the batch rows that the `R` rows are.
            branches (`list[int]`, *optional*): the only branch of each row that goes on.

        Returns:
            `Tensor` of shape `[R, M, V]` (or `[R, 1, V]`).
        """
        start, end = layout.end(step) - layout.branches, self._bucket(layout.end(step))
        slots = self.slots(end)
        visible, positions = layout.visible(step, slots), layout.positions(step)
        written = slots[start : layout.end(step)].expand(len(rows), -1)
        if branches is not None:
            pick = send(branches, self.device)[:, None]
            positions, written = positions.gather(1, pick), written.gather(1, pick)
            visible = visible.gather(1, pick[:, :, None].expand(-1, -1, end))
            start = start + branches[0] if len(rows) == 1 else None
        slot_positions = None if self.kinds.only_full else layout.slot_positions(slots)
        mask = self.kinds.masks(visible, positions, slot_positions, self.dtype)
        return self._call(tokens, positions, written, start, end, tokens.shape[1], self._index(rows), mask)

    def slots(self, count: int) -> torch.Tensor:
        """`[count]`: 0, 1, .. count-1, without a new tensor each time."""
        if self._slots.shape[0] < count:
            self._slots = torch.arange(2 * count, device=self.device)
        return self._slots[:count]

    def _bucket(self, end: int) -> int:
        return end if self._compiled is None else -(-end // _BUCKET) * _BUCKET

    def _run(self, tokens, positions, written, start, end, keep, rows, compiled=True):
        end = self._bucket(end) if compiled else end
        slots = self.slots(end)
        mask = self.kinds.masks(causal(written, slots), positions, (slots - 1)[None], self.dtype)
        return self._call(tokens, positions, written, start, end, keep, self._index(rows), mask, compiled)

    def _index(self, rows: list[int] | None) -> torch.Tensor | None:
        return None if rows is None or len(rows) == self.batch_size else send(rows, self.device)

    def _call(self, tokens, positions, written, start, end, keep, rows, mask, compiled=True) -> torch.Tensor:
        # A part of the batch has a shape of its own each time: not worth compiling.
        compiled = compiled and self._compiled is not None and rows is None
        plan = self.cache.plan
        self.cache.reserve(end)
        plan.slots, plan.start, plan.end = written, None if compiled else start, end
        plan.rows = None if rows is None else rows[:, None]
        kwargs: dict[str, Any] = {compat.CACHE_KEY: self.cache, "attention_mask": mask, "use_cache": True}
        if self._takes_positions:
            kwargs["position_ids"] = positions.clamp_max(self.last_position)
        if self._keeps_logits:
            kwargs["logits_to_keep"] = keep
        began = time.perf_counter()
        forward = self._compiled if compiled else self.model
        with self._few_rows.replaced(tokens.numel()) if self._few_rows else contextlib.nullcontext():
            logits = forward(input_ids=tokens, return_dict=True, **kwargs).logits
        if compiled and time.perf_counter() - began > _COMPILING:
            self.compile_seconds += time.perf_counter() - began
        return logits[:, -keep:]


@functools.cache
def _warm() -> weakref.WeakKeyDictionary:
    return weakref.WeakKeyDictionary()


def _compiled_forward(model: nn.Module):
    """`torch.compile` of a model's forward, kept as long as the model: a second call compiles nothing.

    What is kept takes the model as its argument; holding it would keep it from ever being freed.
    """
    if "forward" in vars(model):  # something around the model has a forward of its own, which must not be left out
        return model
    kept = _warm()
    if model not in kept:
        kept[model] = torch.compile(type(model).forward, dynamic=False)
    return functools.partial(kept[model], model)
