# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""How `generate` learns the word `speculation`.

Three additive names (a class attribute that makes the argument legal, an entry in the table of decoding methods, the
method) and two wrapped functions that act on it alone. Without `speculation=` both hand straight on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import GenerationConfig
from transformers.generation import utils as generation_utils
from transformers.generation.utils import GenerationMixin

from . import compat
from .config import SaguaroConfig
from .errors import SaguaroError
from .generation.strategy import saguaro_decoding
from .generation.validation import check_config, check_models


MODE = "saguaro"
_METHOD = "_saguaro_decoding"
_stock: dict[str, Any] = {}


def enable() -> None:
    """Makes `model.generate(..., assistant_model=draft, speculation="saguaro")` work. Importing `hf_saguaro` calls it.

    Raises:
        SaguaroError: if this Transformers version lacks what the mode hooks into.
    """
    if is_enabled():
        return
    missing = [name for owner, name in compat.HOOKS if not hasattr(owner, name)]
    if missing:
        raise SaguaroError(
            f"this Transformers version lacks {', '.join(missing)}, which speculation hooks into; install one from 4.57 on "
            "and below 6."
        )
    _stock["mode"] = GenerationConfig.get_generation_mode
    _stock["validate"] = GenerationMixin._validate_generation_mode
    GenerationConfig.speculation = None
    GenerationConfig.get_generation_mode = _with_speculation(_stock["mode"])
    GenerationMixin._validate_generation_mode = _with_own_checks(_stock["validate"])
    GenerationMixin._saguaro_decoding = saguaro_decoding
    generation_utils.GENERATION_MODES_MAPPING[MODE] = _METHOD


def disable() -> None:
    """Gives back stock Transformers exactly."""
    if not is_enabled():
        return
    GenerationConfig.get_generation_mode = _stock.pop("mode")
    GenerationMixin._validate_generation_mode = _stock.pop("validate")
    del GenerationConfig.speculation
    del GenerationMixin._saguaro_decoding
    del generation_utils.GENERATION_MODES_MAPPING[MODE]


def is_enabled() -> bool:
    """Whether `generate` knows `speculation=`."""
    return bool(_stock)


def custom_generate(draft: nn.Module, config: SaguaroConfig | dict | str = MODE) -> Callable:
    """The entry that patches nothing: `model.generate(**inputs, custom_generate=hf_saguaro.custom_generate(draft))`.

    Transformers hands neither `streamer` nor `tokenizer` on to such a function, so streaming and `stop_strings` need
    `speculation=`.

    Args:
        draft (`PreTrainedModel`): the draft model.
        config (`SaguaroConfig`, `dict` or `str`, *optional*): as for `speculation=`.
    """
    config = SaguaroConfig.resolve(config)

    def decode(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        check_config(generation_config, config, draft)
        check_models(model, draft, (None, None))
        generation_config.speculation = config
        return saguaro_decoding(
            model,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            assistant_model=draft,
            **model_kwargs,
        )

    return decode


def _with_speculation(stock: Callable) -> Callable:
    @functools.wraps(stock)
    def get_generation_mode(self, assistant_model=None):
        # The stock assisted loop hands its draft a copy of the target's config: a draft never speculates itself.
        if getattr(self, "speculation", None) is None or getattr(self, "is_assistant", False):
            return stock(self, assistant_model)
        check_config(self, SaguaroConfig.of(self), assistant_model)
        return MODE

    return get_generation_mode


def _with_own_checks(stock: Callable) -> Callable:
    @functools.wraps(stock)
    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        if generation_mode != MODE:
            return stock(self, generation_mode, generation_config, generation_mode_kwargs)
        tokenizers = tuple(generation_mode_kwargs.get(name) for name in ("tokenizer", "assistant_tokenizer"))
        check_models(self, generation_mode_kwargs.get("assistant_model"), tokenizers)

    return _validate_generation_mode
