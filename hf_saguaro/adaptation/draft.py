# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""A draft for a target that has none: the target itself, with fewer layers."""

from __future__ import annotations

import copy

import torch
from torch import nn

from .. import compat
from ..errors import SaguaroError
from .layers import find_decoder_layers


def make_draft(target: nn.Module, keep_layers: int | list[int] | None = None) -> nn.Module:
    """A new, smaller model with some of the target's decoder layers.

    Without training such a draft agrees with its target the less the fewer layers it keeps; online adaptation heals it,
    `OnlineAdapter(make_draft(target), AdaptationConfig(layers="all"))`. It pays where the accepted tokens a round exceed
    the share of layers kept times the tokens drafted, hence the default of a half.

    Args:
        target (`PreTrainedModel`): a decoder-only model, on one device.
        keep_layers (`int` or `list[int]`, *optional*):
            How many layers to keep, spread evenly with the first and the last among them, or which. `None` keeps half.

    Returns:
        `PreTrainedModel`: of the target's class, in eval mode, on its device and in its dtype, with a copy of its
        `generation_config`. It shares no storage with the target.

    Raises:
        SaguaroError: for layers that the target does not have, or weights that are not loaded.
    """
    target = compat.unwrap(target)
    _, layers = find_decoder_layers(target)
    depth = len(layers)
    kept = _layers_to_keep(keep_layers, depth)
    if any(parameter.is_meta for parameter in target.parameters()):
        raise SaguaroError(
            "some of the target's weights are offloaded and cannot be copied; load it whole to make a draft."
        )

    # Every copy goes through one memo, so that the layers keep pointing at the one config; dropped layers are never copied.
    memo: dict[int, object] = {}
    with torch.inference_mode(False), torch.no_grad():
        own_layers = nn.ModuleList([copy.deepcopy(layers[index], memo) for index in kept])
        memo[id(layers)] = own_layers
        draft = copy.deepcopy(target, memo)
    for index, layer in enumerate(own_layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = index
    _shorten_config(draft.config.get_text_config(decoder=True), kept, depth)
    return draft.eval()


def _layers_to_keep(keep_layers: int | list[int] | None, depth: int) -> list[int]:
    count = max(1, depth // 2) if keep_layers is None else keep_layers
    if isinstance(count, bool) or not isinstance(count, (int, list, tuple)):
        raise SaguaroError(f"`keep_layers` is {keep_layers!r}; use a number of layers, a list of indices or None.")
    if isinstance(count, int):
        if not 1 <= count <= depth:
            raise SaguaroError(f"`keep_layers` is {count}, but the target has {depth} layers; use 1 to {depth}.")
        return [round(index * (depth - 1) / max(count - 1, 1)) for index in range(count)]
    kept = list(count)
    if not kept or len(set(kept)) != len(kept) or not all(0 <= index < depth for index in kept):
        raise SaguaroError(f"`keep_layers` is {kept}; use different indices from 0 to {depth - 1}.")
    return sorted(kept)


def _shorten_config(config, kept: list[int], depth: int) -> None:
    """The config of the kept layers: their number, and their share of every list with one entry a layer."""
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == depth:
            setattr(config, name, [value[index] for index in kept])
    config.num_hidden_layers = len(kept)
