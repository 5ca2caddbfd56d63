# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""What `generate` was given: which tokens are real, which are already cached, which have to be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from .. import compat
from ..errors import SaguaroError


@dataclass
class Prompt:
    """Prompts in terms of real positions: padding does not count, wherever it stands.

    Attributes:
        new_ids (`Tensor` of shape `[B, n]`), new_positions (`Tensor` of shape `[B, n]`): columns still to be read; -1
            marks padding.
        column_slots (`Tensor` of shape `[B, M]`): the slot of every column, cached ones first; padding is in the bin.
        cached (`int`): columns that a cache handed in holds already.
        lengths (`list[int]`): real tokens of each row, cached ones included.
        known_tokens (`list[Tensor]`): the real tokens of each row that came as ids; a draft knows no others.
        offsets (`list[int]`): real tokens of each row that are in the cache only.
    """

    new_ids: torch.Tensor
    new_positions: torch.Tensor
    column_slots: torch.Tensor
    cached: int
    lengths: list[int]
    known_tokens: list[torch.Tensor]
    offsets: list[int]

    @classmethod
    def of(cls, input_ids: torch.Tensor, model_kwargs: dict[str, Any], generation_config: GenerationConfig) -> Prompt:
        """Reads the arguments of a decoding method.

        Raises:
            SaguaroError: where ids, mask and cache do not fit together.
        """
        columns = compat.mask_length(model_kwargs, generation_config, input_ids)
        mask = model_kwargs.get("attention_mask")
        real = (
            torch.ones(len(input_ids), columns, dtype=torch.bool, device=input_ids.device)
            if mask is None
            else mask.bool()
        )
        cache = model_kwargs.get(compat.CACHE_KEY)
        cached = 0 if cache is None else int(cache.get_seq_length())
        given = input_ids.shape[1]
        # With the mask as wide as the ids, these are the whole text; else they are what the cache does not hold yet.
        first_new = cached if given == columns else 0
        if first_new >= given or (given != columns and given + cached != columns):
            raise SaguaroError(
                f"{given} ids, an attention mask of {columns} columns and a cache of {cached} tokens do not fit together. "
                "Pass all ids (more than the cache holds), or only the new ones with a mask over all of them."
            )
        if not bool(real[:, -1].all()):
            raise SaguaroError(
                "the attention mask ends in padding; a decoder continues the last column. Pad on the left "
                "(`tokenizer.padding_side = 'left'`)."
            )
        positions = real.long().cumsum(dim=-1) - 1
        positions = positions.where(real, -1)
        _check_positions(model_kwargs.get("position_ids"), positions)
        known = real[:, columns - given :]
        return cls(
            new_ids=input_ids[:, first_new:],
            new_positions=positions[:, cached:],
            column_slots=positions + 1,
            cached=cached,
            lengths=real.sum(dim=1).tolist(),
            known_tokens=[row[keep] for row, keep in zip(input_ids, known)],
            offsets=real[:, : columns - given].sum(dim=1).tolist(),
        )

    def refuse_holes(self) -> None:
        """For models with sliding windows: those count columns in plain `generate`, and positions here.

        Raises:
            SaguaroError: where padding stands between real tokens.
        """
        real = self.column_slots > 0
        if bool((real[:, :-1] & ~real[:, 1:]).any()):
            raise SaguaroError(
                "the attention mask has padding between real tokens, and the model's sliding window counts padding too. "
                "Close the gaps, or generate without `speculation`."
            )


def _check_positions(given: torch.Tensor | None, positions: torch.Tensor) -> None:
    """`position_ids` may be passed (`generate` makes them itself), but not others than the mask says."""
    if given is None:
        return
    own = positions[:, -given.shape[-1] :]
    if given.shape[-1] > own.shape[1] or bool(((given != own) & (own >= 0)).any()):
        raise SaguaroError(
            "`position_ids` differ from what the attention mask says (0, 1, .. over the real tokens); other positions would "
            "be lost. Leave them out, or generate without `speculation`."
        )
