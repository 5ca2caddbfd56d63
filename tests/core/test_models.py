# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""The matrix of architectures: tiny random configs, sdpa and eager, greedy text identical to plain `generate`.

To add a model, add a line to `MODELS`.
"""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import hf_saguaro
from hf_saguaro import SaguaroConfig, SaguaroError, compat

from ..conftest import VOCAB, perturbed


GQA = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
WINDOW = dict(sliding_window=8)
HYBRID = dict(**WINDOW, layer_types=["sliding_attention", "full_attention"])
MODELS = {
    "llama": GQA,
    "qwen2": GQA,
    "qwen3": dict(GQA, head_dim=8),
    "mistral": dict(GQA, **WINDOW),
    "mixtral": dict(GQA, num_local_experts=3, num_experts_per_tok=2, **WINDOW),
    "gemma2": dict(GQA, head_dim=8, **HYBRID),
    "gemma3_text": dict(GQA, head_dim=8, **HYBRID),
    "llama4_text": dict(GQA, head_dim=8, intermediate_size_mlp=64, num_local_experts=2, attention_chunk_size=8,
                        layer_types=["chunked_attention", "full_attention"], no_rope_layers=[1, 0]),
    "phi": dict(GQA, num_key_value_heads=4),
    "phi3": dict(GQA, **WINDOW),
    "gpt2": dict(n_embd=32, n_layer=2, n_head=4, n_positions=256),
    "gpt_neox": dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4),
    "opt": dict(hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32),
    "falcon": dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=False),
    "olmo2": GQA,
    "smollm3": dict(GQA, no_rope_layers=[1, 0]),
    "stablelm": GQA,
    "cohere": GQA,
    "cohere2": dict(GQA, head_dim=8, **HYBRID),
    "granite": GQA,
}  # fmt: skip
SPECIAL = dict(vocab_size=VOCAB, bos_token_id=1, eos_token_id=None, pad_token_id=0, initializer_range=0.3)


def tiny(name, attention):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **SPECIAL, **MODELS[name])
    config._attn_implementation = attention
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.parametrize("execution", ["async", "sync"])
def test_a_draft_in_int8_changes_no_text(execution):
    target = tiny("llama", "sdpa")
    quantization = pytest.importorskip("torch.ao.quantization")  # to leave torch one day
    draft = quantization.quantize_dynamic(copy.deepcopy(target), {torch.nn.Linear})
    ids = torch.randint(2, VOCAB, (2, 11), generator=torch.Generator().manual_seed(1))
    plain = target.generate(ids, max_new_tokens=24, do_sample=False)
    config = SaguaroConfig(num_assistant_tokens=3, fan_out=2, execution=execution, backup="draft")
    out = target.generate(ids, max_new_tokens=24, do_sample=False, assistant_model=draft, speculation=config)
    assert out.tolist() == plain.tolist()
    stats = hf_saguaro.last_stats(target)
    assert stats.draft_failure is None
    assert stats.accepted_tokens > 0.7 * stats.drafted_tokens > 0


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_is_plain_generates(name, attention):
    """Prompts of 5 and 11 tokens and 24 new ones, so that windows and chunks of 8 are passed in prompt and text."""
    try:
        target = tiny(name, attention)
    except ValueError as error:
        if attention == "sdpa" and "scaled_dot_product_attention" in str(error):
            pytest.skip(f"{name} has no sdpa attention in this Transformers version")
        raise
    draft = perturbed(target, 0.1)
    ids = torch.randint(2, VOCAB, (2, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    single = ids[1:]
    for inputs in ({"input_ids": single}, {"input_ids": ids, "attention_mask": mask}):
        plain = target.generate(**inputs, max_new_tokens=24, do_sample=False)
        for execution in ("async", "sync"):
            config = SaguaroConfig(num_assistant_tokens=3, fan_out=2, execution=execution, backup="draft")
            out = target.generate(
                **inputs, max_new_tokens=24, do_sample=False, assistant_model=draft, speculation=config
            )
            assert out.tolist() == plain.tolist(), (execution, len(inputs))


@pytest.mark.parametrize("name", ["gpt2", "opt"])
@pytest.mark.parametrize("execution", ["async", "sync"])
def test_a_table_of_positions_may_end_with_the_text(name, execution):
    """The rows end apart, so a block that fits one row runs past the end of the other's table."""
    torch.manual_seed(0)
    limit = {"gpt2": dict(n_positions=24), "opt": dict(max_position_embeddings=24)}[name]
    config = AutoConfig.for_model(name, **{**SPECIAL, **MODELS[name], **limit})
    target = AutoModelForCausalLM.from_config(config).eval()
    target.generation_config.pad_token_id = 0
    ids = torch.randint(2, VOCAB, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :6] = mask[1, :1] = 0
    for inputs in ({"input_ids": ids[:1]}, {"input_ids": ids, "attention_mask": mask}):
        plain = target.generate(**inputs, max_new_tokens=16, do_sample=False)
        for scale in (0.1, 1.0):
            out = target.generate(**inputs, max_new_tokens=16, do_sample=False, assistant_model=perturbed(target, scale),
                                  speculation=SaguaroConfig(num_assistant_tokens=6, fan_out=2, execution=execution, backup="draft"))  # fmt: skip
            assert out.tolist() == plain.tolist()
            assert hf_saguaro.last_stats(target).draft_failure is None


@pytest.mark.parametrize("name", ["roberta", "xlm-roberta", "camembert"])
def test_encoders_turned_decoders(name):
    """Without `position_ids` these count from their padding id on; `generate` always passes them."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**SPECIAL, "pad_token_id": 1}, is_decoder=True, hidden_size=32, intermediate_size=64,
                                  num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=80)  # fmt: skip
    target = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(2, VOCAB, (1, 9), generator=torch.Generator().manual_seed(1))
    plain = target.generate(ids, max_new_tokens=12, do_sample=False)
    kwargs = dict(max_new_tokens=12, do_sample=False, assistant_model=perturbed(target, 0.1),
                  speculation=SaguaroConfig(num_assistant_tokens=3, execution="async"))  # fmt: skip
    if int(transformers.__version__.split(".")[0]) < 5:  # there they take no mask of their own
        with pytest.raises(SaguaroError, match="cannot read tokens from slots"):
            target.generate(ids, **kwargs)
    else:
        assert target.generate(ids, **kwargs).tolist() == plain.tolist()


def test_padding_between_tokens_is_refused_where_windows_count_it():
    target = tiny("mistral", "sdpa")
    ids = torch.randint(2, VOCAB, (1, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 4:6] = 0
    with pytest.raises(SaguaroError, match="padding between"):
        target.generate(ids, attention_mask=mask, max_new_tokens=3, assistant_model=copy.deepcopy(target),
                        speculation="saguaro")  # fmt: skip
    # A window that nothing reaches beyond counts nothing.
    target = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("mistral", **SPECIAL, **{**GQA, "sliding_window": 64})
    )
    target.generation_config.pad_token_id = 0
    kwargs = dict(attention_mask=mask, max_new_tokens=12, do_sample=False)
    out = target.eval().generate(ids, **kwargs, assistant_model=perturbed(target, 0.1), speculation="saguaro")
    assert out.tolist() == target.generate(ids, **kwargs).tolist()


@pytest.mark.parametrize("name", ["gemma3_text", "mistral", "llama4_text", "gemma2"])
def test_sliding_caches_go_back_and_forth_past_their_window(name):
    target = tiny(name, "eager")
    draft = perturbed(target, 0.1)
    cache = DynamicCache(config=target.config)
    ids = torch.randint(2, VOCAB, (1, 5), generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        out = target.generate(ids, max_new_tokens=9, do_sample=False, assistant_model=draft,
                              speculation=SaguaroConfig(num_assistant_tokens=3, execution="async"),
                              **{compat.CACHE_KEY: cache})  # fmt: skip
        assert out.tolist() == target.generate(ids, max_new_tokens=9, do_sample=False).tolist()
        ids = torch.cat([out, torch.tensor([[7, 8]])], dim=1)
    plain = target.generate(ids, max_new_tokens=9, do_sample=False, **{compat.CACHE_KEY: cache})
    assert plain.tolist() == target.generate(ids, max_new_tokens=9, do_sample=False).tolist()


@pytest.mark.parametrize("name, match", [("bloom", "ALiBi"), ("mpt", "ALiBi"), ("falcon", "ALiBi")])
def test_alibi_models_are_refused_by_name(name, match):
    sizes = {
        "bloom": dict(hidden_size=32, n_layer=1, n_head=4),
        "mpt": dict(d_model=32, n_layers=1, n_heads=4, max_seq_len=64),
        "falcon": dict(MODELS["falcon"], alibi=True),
    }
    config = AutoConfig.for_model(name, **SPECIAL, **sizes[name])
    target = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with pytest.raises(SaguaroError, match=match):
        target.generate(torch.tensor([[5, 6]]), max_new_tokens=3, assistant_model=copy.deepcopy(target),
                        speculation="saguaro")  # fmt: skip


def test_a_vision_language_target_works_on_text_and_refuses_pictures_by_name():
    torch.manual_seed(0)
    text = transformers.LlamaConfig(**SPECIAL, **GQA)
    vision = transformers.CLIPVisionConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                                           image_size=8, patch_size=4)  # fmt: skip
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=3, image_token_id=3)
    target = transformers.LlavaForConditionalGeneration(config).eval()
    target.generation_config.eos_token_id, target.generation_config.pad_token_id = None, 0
    draft = transformers.LlamaForCausalLM(text).eval()
    ids = torch.tensor([[5, 6, 7]])
    plain = target.generate(ids, max_new_tokens=12, do_sample=False)
    out = target.generate(ids, max_new_tokens=12, do_sample=False, assistant_model=draft, speculation="saguaro")
    assert out.tolist() == plain.tolist()
    with pytest.raises(SaguaroError, match="pixel_values"):
        target.generate(ids, pixel_values=torch.zeros(1, 3, 8, 8), max_new_tokens=4, assistant_model=draft,
                        speculation="saguaro")  # fmt: skip
