# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Where a model keeps its decoder layers, and which of their linear maps are adapted."""

from __future__ import annotations

from torch import nn
from transformers.pytorch_utils import Conv1D

from ..errors import SaguaroError
from .config import AdaptationConfig


def find_decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The name of the list of decoder layers and the list: `("model.layers", ...)`, `("transformer.h", ...)`.

    It is the `ModuleList` as long as the config says; of several, the one with most parameters.

    Raises:
        SaguaroError: where no such list exists.
    """
    depth = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == depth
    ]
    if not lists:
        raise SaguaroError(
            f"{type(model).__name__} has no list of {depth} decoder layers, so its layers cannot be chosen from; "
            "use a decoder-only Transformers model."
        )
    return max(lists, key=lambda found: sum(parameter.numel() for parameter in found[1].parameters()))


def modules_to_adapt(model: nn.Module, config: AdaptationConfig) -> list[str]:
    """Full names of the linear maps that `config` chooses, in the order of the model.

    Only modules inside decoder layers are ever chosen: embeddings and output heads, which may be tied to each other or
    shared with the target, stay as they are.

    Raises:
        SaguaroError: where a layer does not exist or nothing is left to adapt.
    """
    prefix, layers = find_decoder_layers(model)
    chosen = _chosen_layers(config.layers, len(layers))
    names = []
    for index in chosen:
        for name, module in layers[index].named_modules():
            if isinstance(module, (nn.Linear, Conv1D)) and _is_target(name, config.target_modules):
                names.append(f"{prefix}.{index}.{name}")
    if not names and not _examples(model):
        raise SaguaroError(
            f"{type(model).__name__} has no linear layer in floating point, and quantised ones cannot learn; load the draft in "
            "float32, bfloat16 or float16 (the target may stay quantised)."
        )
    if not names:
        raise SaguaroError(
            f"`target_modules`={config.target_modules!r} matches no linear layer in layers {chosen} of "
            f"{type(model).__name__}; use 'all-linear' or endings of names such as {_examples(layers[0])}."
        )
    return names


def _chosen_layers(layers: str | list[int], depth: int) -> list[int]:
    if layers == "all":
        return list(range(depth))
    if layers == "last_third":
        return list(range(depth - max(1, depth // 3), depth))
    missing = [layer for layer in layers if not -depth <= layer < depth]
    if missing:
        raise SaguaroError(f"`layers` names {missing}, but the draft has layers 0 to {depth - 1}.")
    return sorted({layer % depth for layer in layers})


def _is_target(name: str, target_modules: str | list[str]) -> bool:
    if target_modules == "all-linear":
        return True
    return any(name == target or name.endswith(f".{target}") for target in target_modules)


def _examples(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))][:3]
