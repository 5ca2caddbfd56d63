# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Additive attention masks over slots: who sees what.

A query sees the text up to its limit, and, on a branch of a tree, that branch's own earlier tokens (section 1.5 of the
project's SSD notes draws an example). Masks are float tensors, 0 or the dtype's minimum: the one form that eager and
sdpa attention both read rightly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PretrainedConfig


@dataclass(frozen=True)
class AttentionKinds:
    """Which kinds of attention layers a model mixes.

    Attributes:
        windows (`dict[str, int | None]`): layer type -> sliding window, `None` for full attention.
        chunks (`dict[str, int]`): layer type -> attention chunk (Llama 4).
    """

    windows: dict[str, int | None]
    chunks: dict[str, int]

    @classmethod
    def of(cls, config: PretrainedConfig) -> AttentionKinds:
        """Reads the layers' kinds from the cache that Transformers itself would build for `config`."""
        config = config.get_text_config(decoder=True)
        layers = DynamicCache(config=config).layers
        types = getattr(config, "layer_types", None) or []
        if not types:
            window = next((layer.sliding_window for layer in layers if layer.is_sliding), None)
            types, layers = ["sliding_attention" if window else "full_attention"], [window]
        else:
            layers = [layer.sliding_window if layer.is_sliding else None for layer in layers] or [None] * len(types)
        windows, chunks = {}, {}
        for kind, window in zip(types, layers):
            if kind == "chunked_attention":
                chunks[kind] = config.attention_chunk_size
                window = None
            windows.setdefault(kind, window)
        return cls(windows, chunks)

    @property
    def only_full(self) -> bool:
        return not self.chunks and not any(self.windows.values())

    @property
    def shortest_span(self) -> float:
        """Tokens that the shortest window or chunk holds; infinity for full attention."""
        return min([*filter(None, self.windows.values()), *self.chunks.values()], default=math.inf)

    def masks(self, visible: torch.Tensor, query_positions: torch.Tensor, slot_positions: torch.Tensor,
              dtype: torch.dtype) -> torch.Tensor | dict[str, torch.Tensor]:  # fmt: skip
        """Turns visibility into what the model's forward takes: one mask, or one for each kind of layer.

        Args:
            visible (`Tensor` of shape `[R, n, S]`, bool): what the tree alone allows.
            query_positions (`Tensor` of shape `[R, n]`) and slot_positions (`[R, S]`): positions in the text.

        Returns:
            Additive masks of shape `[R, 1, n, S]`.
        """
        if self.only_full:
            return additive(visible, dtype)
        distance = query_positions[:, :, None] - slot_positions[:, None, :]
        masks = {}
        for kind, window in self.windows.items():
            seen = visible
            if window is not None:
                seen = visible & (distance < window)
            elif kind in self.chunks:
                chunk = self.chunks[kind]
                seen = visible & (query_positions[:, :, None] // chunk == slot_positions[:, None, :] // chunk)
            masks[kind] = additive(seen, dtype)
        return masks if len(masks) > 1 else next(iter(masks.values()))


def additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`[R, n, S]` bool -> `[R, 1, n, S]` float, 0 where seen."""
    mask = torch.full(visible.shape, torch.finfo(dtype).min, dtype=dtype, device=visible.device)
    return mask.masked_fill_(visible, 0.0)[:, None]


def causal(limits: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Text visibility: slots 1 up to each query's limit.

    Args:
        limits (`Tensor` of shape `[R, n]`): the last slot that each query sees; 0 sees nothing.
        slots (`Tensor` of shape `[S]`): 0, 1, .. S-1.

    Returns:
        `Tensor` of shape `[R, n, S]`, bool.
    """
    return (slots <= limits[:, :, None]) & (slots > 0)


@dataclass
class TreeLayout:
    """Where a tree of `M` branches keeps its tokens: pass `s` writes slots `start + s*M .. start + (s+1)*M - 1`.

    Attributes:
        limits (`Tensor` of shape `[R, M]`): the last text slot that each branch sees.
        start (`int`): first scratch slot, the same for every row.
    """

    limits: torch.Tensor
    start: int

    @property
    def branches(self) -> int:
        return self.limits.shape[1]

    def end(self, step: int) -> int:
        return self.start + (step + 1) * self.branches

    def positions(self, step: int) -> torch.Tensor:
        """`[R, M]`: the text position of every branch's token in pass `step` (slot `p + 1` is position `p`)."""
        return self.limits + step

    def visible(self, step: int, slots: torch.Tensor) -> torch.Tensor:
        """`[R, M, S]` bool for pass `step`; slots from `end(step)` on have not been written."""
        branch = torch.arange(self.branches, device=slots.device)
        written = (slots >= self.start) & (slots < self.end(step))
        own = written & ((slots - self.start) % self.branches == branch[:, None])
        return causal(self.limits, slots) | own

    def slot_positions(self, slots: torch.Tensor) -> torch.Tensor:
        """`[R, S]`: the text position of what each slot holds."""
        text = (slots - 1).expand(self.limits.shape[0], -1)
        scratch = slots[self.start :] - self.start
        branch_position = self.limits[:, scratch % self.branches] + scratch // self.branches
        return torch.cat([text[:, : self.start], branch_position], dim=1)
