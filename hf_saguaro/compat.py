# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Everything that differs between the supported Transformers versions (4.57 to 5.x). No other file asks."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, GenerationConfig
from transformers.generation import utils as generation_utils
from transformers.generation.utils import GenerationMixin


# Transformers 5.24 renamed the cache argument of every forward, of `generate` and of the outputs.
CACHE_KEY = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)

# What the generation mode hooks into; all there from 4.57 on.
HOOKS = (
    (GenerationConfig, "get_generation_mode"),
    (GenerationMixin, "_validate_generation_mode"),
    (GenerationMixin, "_extract_generation_mode_kwargs"),
    (generation_utils, "GENERATION_MODES_MAPPING"),
)

# A config that nobody touched holds this, in 4.57 from the start, later once `generate` has filled its defaults in.
_ASSISTANT_TOKENS = (
    GenerationConfig().num_assistant_tokens or GenerationConfig._get_default_generation_params()["num_assistant_tokens"]
)


def chosen_assistant_tokens(generation_config: GenerationConfig) -> int | None:
    """`num_assistant_tokens` of a `generate` call, or `None` if it has the default, which nobody may have asked for."""
    count = generation_config.num_assistant_tokens
    return None if count == _ASSISTANT_TOKENS else count


def mask_length(model_kwargs: dict[str, Any], generation_config: GenerationConfig, input_ids: torch.Tensor) -> int:
    """Columns of the attention mask that `generate` was given, cached ones included.

    From 5.20 on a mask of ones is dropped before the decoding method sees it; what is left of it is its length on the
    config (5.24) and the width of the position ids made from it.
    """
    mask = model_kwargs.get("attention_mask")
    if mask is not None:
        return mask.shape[1]
    recorded = getattr(generation_config, "_mask_length", None)
    if recorded is not None:
        return recorded
    positions = model_kwargs.get("position_ids")
    return input_ids.shape[1] if positions is None else max(positions.shape[-1], input_ids.shape[1])


def prepared_cache(model: nn.Module, model_kwargs: dict[str, Any], generation_config: GenerationConfig) -> Any:
    """The cache of a call, or `None`. 5.0 leaves it to the first forward to make one that the caller may ask for."""
    cache = model_kwargs.get(CACHE_KEY)
    if cache is None and generation_config.use_cache and generation_config.return_dict_in_generate:
        return DynamicCache(config=model.config.get_text_config(decoder=True))
    return cache


def is_users_cache(cache: Any) -> bool:
    """Whether a cache outlives the call. Before 5.24 `generate` does not tell a user's cache from its own."""
    return getattr(cache, "_is_user_defined", CACHE_KEY != "cache")


def unwrap(model: nn.Module) -> nn.Module:
    """The Transformers model inside `torch.compile` and PEFT wrappers."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and hasattr(model, "get_base_model"):
            inner = model.get_base_model()
        if inner is None or inner is model:
            return model
        model = inner


def is_compiled(model: nn.Module) -> bool:
    """Whether any part of a model runs through `torch.compile`, as a wrapper or in place."""
    return any(
        hasattr(module, "_orig_mod")
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
        for module in model.modules()
    )


def execution_device(model: nn.Module) -> torch.device:
    """Where a model wants its inputs. Weights that accelerate offloads lie on 'meta' until their layer's turn."""
    if model.device.type != "meta":
        return model.device
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", [hook]):
            device = getattr(each, "execution_device", None)
            if device is not None:
                return torch.device(device)
    return model.device
