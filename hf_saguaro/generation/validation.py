# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""What cannot be honoured is said before any token is made: what was given, why it cannot work, what to do instead."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import GenerationConfig, LogitsProcessorList
from transformers.cache_utils import QuantizedCache
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.generation.utils import GenerationMixin

from .. import compat
from ..config import SaguaroConfig
from ..errors import SaguaroError


# Attention implementations that read an additive 4D mask rightly.
_MASKED_ATTENTION = ("eager", "sdpa")
# Rotary embeddings whose angles depend on the length of what is read: a block of K + 1 tokens is not a step of one.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
# Arguments of a decoding method that the loop uses or may leave alone.
_KNOWN_KWARGS = {
    "attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache_position", "past_key_values", "cache",
    "output_attentions", "output_hidden_states", "return_dict", "inputs_embeds",
}  # fmt: skip


def check_config(generation_config: GenerationConfig, config: SaguaroConfig, draft: nn.Module | None) -> None:
    """What can be seen from `generate`'s settings alone."""
    if draft is None and config.execution != "autoregressive":
        raise SaguaroError(
            "`speculation` was given without `assistant_model`; pass the draft model as `assistant_model=`, or set "
            "`execution='autoregressive'` to decode without one."
        )
    if (generation_config.num_beams or 1) > 1:
        raise SaguaroError(f"`num_beams`={generation_config.num_beams}: beams cannot be verified. Use `num_beams=1`.")
    for name in (
        "guidance_scale",
        "penalty_alpha",
        "dola_layers",
        "prefill_chunk_size",
        "prompt_lookup_num_tokens",
        "assistant_early_exit",
        "constraints",
        "force_words_ids",
    ):
        value = getattr(generation_config, name, None)
        if value is not None and not (name == "guidance_scale" and value == 1):
            raise SaguaroError(
                f"`{name}`={value!r} is another way to decode and does not mix with speculation. Leave it out."
            )
    if generation_config.cache_implementation in ("quantized", "offloaded", "offloaded_static", "paged"):
        raise SaguaroError(
            f"`cache_implementation`={generation_config.cache_implementation!r}: the loop keeps keys and values in slots of "
            "its own, so the saving would be lost. Leave it out, or use 'dynamic' or 'static'."
        )


def check_models(target: nn.Module, draft: nn.Module | None, tokenizers: tuple[Any, Any]) -> None:
    """Whether the pair can work together."""
    _check_model(target, "the target")
    if "prepare_inputs_for_generation" in vars(target):
        raise SaguaroError(
            f"{type(target).__name__} has its inputs prepared by something around it (PEFT prompt tuning, for one), which the "
            "loop would leave out. Use a LoRA, or generate without `speculation`."
        )
    if "local" in (getattr(target.config, "attention_layers", None) or ()):
        raise SaguaroError(
            f"{type(target).__name__} builds the masks of its local layers itself and takes the last columns for the newest "
            "tokens. Use another model, or generate without `speculation`."
        )
    if type(target)._sample is not GenerationMixin._sample:
        raise SaguaroError(f"{type(target).__name__} has a decoding loop of its own, which speculation would replace.")
    if draft is None:
        return
    check_draft(draft)
    if not same_vocabulary(target, draft, tokenizers) and None in tokenizers:
        raise SaguaroError(
            f"the target has {_vocab_size(target)} token ids and the draft {_vocab_size(draft)}: they are different "
            "vocabularies. Use a draft with the target's tokenizer, or pass `tokenizer` and `assistant_tokenizer` to have "
            "the draft's text encoded again."
        )


def same_vocabulary(target: nn.Module, draft: nn.Module, tokenizers: tuple[Any, Any]) -> bool:
    """Whether token ids mean the same to both. Sizes may differ by under 1%: padded tails that no text uses."""
    ours, theirs = _vocab_size(target), _vocab_size(draft)
    if None not in tokenizers:
        return tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    return abs(ours - theirs) <= 0.01 * max(ours, theirs)


def check_draft(draft: nn.Module) -> None:
    """Whether a model can draft."""
    _check_model(draft, "the draft (`assistant_model`)")


def _check_model(model: nn.Module, who: str) -> None:
    name = type(compat.unwrap(model)).__name__
    config = getattr(model, "config", None)
    if config is None or not hasattr(compat.unwrap(model), "generate"):
        raise SaguaroError(f"{who} is a {name}, not a Transformers model that generates text.")
    if getattr(config, "is_encoder_decoder", False):
        raise SaguaroError(f"{who}, {name}, is an encoder-decoder; speculation needs a decoder-only model.")
    if getattr(compat.unwrap(model), "_is_stateful", False):
        raise SaguaroError(f"{who}, {name}, keeps a recurrent state that cannot be taken back after a rejected token.")
    text = config.get_text_config(decoder=True)
    attention = getattr(text, "_attn_implementation", None)
    if attention not in _MASKED_ATTENTION:
        raise SaguaroError(
            f"{who}, {name}, was loaded with attn_implementation={attention!r}, which takes no tree mask. Load it with "
            "attn_implementation='sdpa'."
        )
    if getattr(text, "alibi", False) or text.model_type in ("bloom", "mpt"):
        raise SaguaroError(
            f"{who}, {name}, takes positions from its mask (ALiBi), so a tree of tokens cannot be read in one pass. Use a "
            "model with rotary or learned positions."
        )
    offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())  # accelerate brings the weights in time
    if not offloaded and any(parameter.is_meta for parameter in model.parameters()):
        raise SaguaroError(
            f"{who}, {name}, has weights on the 'meta' device, so nothing to compute with. Load its weights."
        )


def check_inputs(model: nn.Module, generation_config: GenerationConfig, processors: LogitsProcessorList,
                 model_kwargs: dict[str, Any], synced_gpus: bool) -> None:  # fmt: skip
    """What only shows once `generate` has prepared its inputs."""
    if model_kwargs.get("inputs_embeds") is not None:
        raise SaguaroError("`inputs_embeds`: a draft continues token ids, not embeddings. Pass `input_ids`.")
    unknown = sorted(key for key, value in model_kwargs.items() if key not in _KNOWN_KWARGS and _holds_something(value))
    given = ", ".join(f"`{key}`" for key in unknown)
    if "mm_encoder_outputs" in unknown:  # what Transformers makes of them before a decoding method is called
        given = "`pixel_values` or another input of an encoder"
    if given:
        raise SaguaroError(
            f"{given}: speculation works on text alone and would have to leave this out. Drop it, or generate without "
            "`speculation`."
        )
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    original = rope.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", None)
    if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE and generation_config.max_length > (original or 0):
        raise SaguaroError(
            f"`rope_type`={rope['rope_type']!r} turns keys by the length of what is read, and texts of up to "
            f"{generation_config.max_length} tokens pass the {original} from which that matters. Lower `max_new_tokens`, or "
            "generate without `speculation`."
        )
    if any(isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor) for processor in processors):
        raise SaguaroError("classifier-free guidance keeps a cache of its own that cannot be taken back. Leave it out.")
    if isinstance(model_kwargs.get(compat.CACHE_KEY), QuantizedCache):
        raise SaguaroError(
            "a QuantizedCache was passed in; its tokens cannot be read back exactly. Pass a DynamicCache."
        )
    if synced_gpus:
        raise SaguaroError("`synced_gpus`: rounds of different ranks would not line up. Use `synced_gpus=False`.")
    if generation_config.return_dict_in_generate:
        for name in ("output_hidden_states", "output_attentions"):
            if getattr(generation_config, name):
                raise SaguaroError(
                    f"`{name}`: a round reads several tokens in one pass and does not keep it. Leave it out."
                )


def _vocab_size(model: nn.Module) -> int:
    return model.config.get_text_config(decoder=True).vocab_size


def _holds_something(value: Any) -> bool:
    """Whether an argument carries anything: a multimodal model is handed an empty record even for text alone."""
    if isinstance(value, dict):
        return any(map(_holds_something, value.values()))
    return value is not None and value is not False
