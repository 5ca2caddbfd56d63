# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""A key-value cache with addressable slots.

Slot `p + 1` of a row holds the token at position `p`; slots past the text are scratch. The attention mask, not the order
in memory, decides what a query sees. So a rejected token needs no rollback (it is hidden until it is overwritten), rows
of a batch may have different lengths, and the branches of a tree live beside the text.

Slot 0 is the bin: padding writes there and no mask ever shows it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from ..errors import SaguaroError


BIN = 0
# Slots of a new cache; and what one may hold beyond the last position of a text, where branches are drafted.
_FIRST_CAPACITY = 128


# Keys and values of one layer.
Storage = tuple[torch.Tensor, torch.Tensor]


@dataclass
class WritePlan:
    """Where the next forward writes, shared by all layers.

    Attributes:
        slots (`Tensor` of shape `[R, n]`): the slot of every token.
        start (`int` or `None`): the first slot, where all rows write the same contiguous range.
        rows (`Tensor` of shape `[R, 1]` or `None`): the batch rows taking part; `None` means all.
        end (`int`): slots `0..end-1` are handed to attention.
        capacity (`int`): slots that must exist.
    """

    slots: torch.Tensor | None = None
    start: int | None = None
    rows: torch.Tensor | None = None
    end: int = 0
    capacity: int = _FIRST_CAPACITY


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, `[batch, heads, slots, head_dim]`, written in place."""

    is_compileable = False
    is_sliding = False
    is_croppable = False

    def __init__(self, plan: WritePlan, batch_size: int, spare: Storage = (None, None)):
        super().__init__()
        self.plan = plan
        self.batch_size = batch_size
        self._spare = spare

    def make_room(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Sees to it that the slots of the plan exist."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif self.keys.shape[2] < self.plan.capacity:
            self.keys = self._grown(self.keys)
            self.values = self._grown(self.values)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        # Zeros, not empty memory: a masked slot still enters the matrix products, and 0 * NaN is NaN.
        states = (key_states, key_states if value_states is None else value_states)
        self.keys, self.values = (
            kept if self._can_use(kept, new) else self._empty(new) for kept, new in zip(self._spare, states)
        )
        self._spare = None
        self.device = key_states.device
        self.is_initialized = True

    def _can_use(self, kept: torch.Tensor | None, states: torch.Tensor) -> bool:
        return (
            kept is not None
            and kept.shape == (self.batch_size, states.shape[1], self.plan.capacity, states.shape[3])
            and (kept.dtype, kept.device) == (states.dtype, states.device)
            and (torch.is_inference_mode_enabled() or not kept.is_inference())  # else it may not be written to
        )

    def _empty(self, states: torch.Tensor) -> torch.Tensor:
        return states.new_zeros(self.batch_size, states.shape[1], self.plan.capacity, states.shape[3])

    def update(self, key_states, value_states, *args, **kwargs):
        plan = self.plan
        self.make_room(key_states, value_states)
        if plan.start is not None and plan.rows is None:
            stop = plan.start + key_states.shape[2]
            self.keys[:, :, plan.start : stop].copy_(key_states)
            self.values[:, :, plan.start : stop].copy_(value_states)
            return self.keys[:, :, : plan.end], self.values[:, :, : plan.end]
        rows = _all_rows(self.batch_size, self.device) if plan.rows is None else plan.rows.to(self.device)
        slots = plan.slots.to(self.device)
        self.keys[rows, :, slots] = key_states.transpose(1, 2)
        self.values[rows, :, slots] = value_states.transpose(1, 2)
        if plan.rows is None:
            return self.keys[:, :, : plan.end], self.values[:, :, : plan.end]
        rows = rows[:, 0]
        return self.keys[rows, :, : plan.end], self.values[rows, :, : plan.end]

    def _grown(self, states: torch.Tensor) -> torch.Tensor:
        grown = self._empty(states)
        grown[:, :, : states.shape[2]] = states
        return grown

    def get_seq_length(self, *args) -> int:
        return self.plan.end - self.plan.slots.shape[1] if self.plan.slots is not None else 0

    def get_mask_sizes(self, *args) -> tuple[int, int]:
        return self.plan.end, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before Transformers 5


class SlotCache(Cache):
    """The cache handed to a model's forward; `plan` says where that forward writes.

    Args:
        batch_size (`int`)
        last_position (`int`): of the longest text.
        spare (`Sequence[Storage]`): slots that hold zeros, to be used as far as they fit.
    """

    def __init__(self, batch_size: int, last_position: int = sys.maxsize, spare: Sequence[Storage] = ()):
        self.plan = plan = WritePlan()
        self.batch_rows, self.last_position, self._used = batch_size, last_position, 0
        if spare and spare[0][0].shape[2] <= 2 * self._longest:  # else it was made for much longer texts
            plan.capacity = spare[0][0].shape[2]
        rest = iter(spare)
        # Not `self.plan`: a cycle would keep a call's keys and values until the collector comes by.
        super().__init__(layer_class_to_replicate=lambda: SlotLayer(plan, batch_size, next(rest, (None, None))))

    def reserve(self, slots: int) -> None:
        """Makes room for `slots` slots at the next forward: by doubling, so that growth costs linear time, up to what
        the longest text wants."""
        self._used = max(self._used, slots)
        if self.plan.capacity < slots:
            needed = -(-slots // _FIRST_CAPACITY) * _FIRST_CAPACITY
            self.plan.capacity = max(min(2 * self.plan.capacity, self._longest), needed)

    @property
    def _longest(self) -> int:
        return self.last_position + 2 + _FIRST_CAPACITY

    def cleared(self) -> list[Storage]:
        """The slots of all layers without the text, for another cache. This one is not to be used any more."""
        storages = [(layer.keys, layer.values) for layer in self.layers if layer.is_initialized]
        for storage in storages:
            for states in storage:
                states[:, :, : self._used].zero_()
        return storages

    def import_columns(self, cache: Cache, slots: torch.Tensor) -> None:
        """Copies a user's cache in, column `c` of row `b` to `slots[b, c]`.

        Args:
            cache (`Cache`): holds `P` columns a row; sliding layers may have kept the last ones only.
            slots (`Tensor` of shape `[batch, P]`): padding columns point to the bin.
        """
        columns = slots.shape[1]
        self.reserve(columns + 1)
        for index, source in enumerate(cache.layers):
            while len(self.layers) <= index:
                self.layers.append(self.layer_class_to_replicate())
            if getattr(source, "keys", None) is None or source.keys.numel() == 0:
                continue
            held = _held_columns(source, columns)
            layer = self.layers[index]
            layer.make_room(source.keys, source.values)
            rows = _all_rows(self.batch_rows, source.keys.device)
            target = slots[:, columns - held :].to(source.keys.device)
            layer.keys[rows, :, target] = source.keys[:, :, :held].transpose(1, 2)
            layer.values[rows, :, target] = source.values[:, :, :held].transpose(1, 2)

    def export_columns(self, cache: Cache, slots: torch.Tensor) -> None:
        """Appends columns to a user's cache through its own `update`, so that its kind and rules stay its own.

        Args:
            cache (`Cache`): grown in place.
            slots (`Tensor` of shape `[batch, n]`): the slots whose contents become the `n` new columns.
        """
        past = cache.get_seq_length()
        position = {"cache_position": torch.arange(slots.shape[1], device=slots.device) + past}
        for index, layer in enumerate(self.layers):
            if layer.is_initialized:
                rows, columns = _all_rows(self.batch_rows, layer.device), slots.to(layer.device)
                keys = layer.keys[rows, :, columns].transpose(1, 2).contiguous()
                values = layer.values[rows, :, columns].transpose(1, 2).contiguous()
                cache.update(keys, values, index, position)


def _all_rows(batch_size: int, device: torch.device) -> torch.Tensor:
    return torch.arange(batch_size, device=device)[:, None]


def _held_columns(layer: CacheLayerMixin, columns: int) -> int:
    """How many of the last `columns` tokens a layer still holds at the front of its tensors."""
    stored = layer.keys.shape[2]
    window = getattr(layer, "sliding_window", None) or (stored if layer.is_sliding else None)
    if window is None or columns < window or not hasattr(layer, "max_cache_len"):
        return min(columns, stored)
    raise SaguaroError(
        "the static sliding-window cache that was passed in is past its window and cannot be read column by column; "
        "pass a DynamicCache, or no cache."
    )
