# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Bad input is refused before any token; a fault on either side leaves nothing behind."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, GenerationConfig, MambaConfig, MambaForCausalLM, T5Config

import hf_saguaro
from hf_saguaro import SaguaroConfig, SaguaroError
from hf_saguaro.generation.drafter import Drafter
from hf_saguaro.generation.slot_model import SlotModel

from ..conftest import tiny_llama


class Tokens(list):
    """A streamer that keeps what it is given."""

    def put(self, value):
        self.append(value)

    def end(self):
        pass


def refused(target, prompt, match, **kwargs):
    """The call raises SaguaroError, and no token was made: the streamer saw the prompt at most."""
    streamer = Tokens()
    kwargs = {"max_new_tokens": 4, "do_sample": False, "speculation": "saguaro", **kwargs}
    with pytest.raises(SaguaroError, match=match):
        target.generate(prompt, streamer=streamer, **kwargs)
    assert len(streamer) <= 1


def test_what_cannot_be_honoured_is_refused_by_name(target, drafts, prompt):
    draft = drafts["good"]
    refused(target, prompt, "assistant_model")
    with pytest.raises(SaguaroError, match="num_beams"):
        target.generate(prompt, assistant_model=draft, num_beams=2, speculation="saguaro")
    refused(target, prompt, "guidance_scale", assistant_model=draft, guidance_scale=1.5)
    refused(target, prompt, "quantized", assistant_model=draft, cache_implementation="quantized")
    refused(target, prompt, "offloaded", assistant_model=draft, cache_implementation="offloaded")
    refused(target, prompt, "different vocabularies", assistant_model=tiny_llama(1, vocab_size=120))
    refused(target, prompt, "not a Transformers model", assistant_model=torch.nn.Linear(2, 2))
    refused(target, prompt, "output_attentions", assistant_model=draft, output_attentions=True,
            return_dict_in_generate=True)  # fmt: skip
    with pytest.raises(ValueError, match="num_return_sequences"):  # Transformers' own refusal
        target.generate(prompt, assistant_model=draft, do_sample=False, num_return_sequences=2, speculation="saguaro")
    refused(target, prompt, "prefill_chunk_size", assistant_model=draft, prefill_chunk_size=4)
    refused(target, prompt, "one of|use 'saguaro'", assistant_model=draft, speculation="sagaro")
    refused(target, prompt, "unknown speculation field", assistant_model=draft, speculation={"num_draft": 3})


def test_models_that_cannot_take_part_are_refused_by_name(target, drafts, prompt):
    mamba = MambaForCausalLM(MambaConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1, state_size=4))
    refused(target, prompt, "MambaForCausalLM.*recurrent state", assistant_model=mamba)
    t5 = AutoModelForSeq2SeqLM.from_config(
        T5Config(vocab_size=97, d_model=16, num_layers=1, d_ff=16, num_heads=2, d_kv=8)
    )
    refused(target, prompt, "encoder-decoder", assistant_model=t5)
    with torch.device("meta"):
        meta = tiny_llama(1)
    refused(target, prompt, "meta", assistant_model=meta)
    flex = copy.deepcopy(drafts["good"])
    flex.config._attn_implementation = "flex_attention"
    refused(target, prompt, "flex_attention", assistant_model=flex)


def test_a_target_that_counts_positions_itself_is_refused_by_name(prompt):
    """BART's decoder takes no positions: over slots it would place every token after a rejected one wrongly."""
    from transformers import BartConfig, BartForCausalLM

    config = BartConfig(vocab_size=97, d_model=16, decoder_layers=1, decoder_ffn_dim=16, decoder_attention_heads=2,
                        is_encoder_decoder=False, pad_token_id=0, bos_token_id=1, eos_token_id=2, init_std=0.5)  # fmt: skip
    target = BartForCausalLM(config)
    for _ in range(2):  # whatever mode the model is in, and it stays in it
        training = [module.training for module in target.modules()]
        refused(target, prompt, "BartForCausalLM", assistant_model=copy.deepcopy(target))
        assert [module.training for module in target.modules()] == training
        target.eval()


def test_a_target_with_a_mask_of_its_own_is_refused_by_name(prompt):
    """GPT-Neo's local layers take the last columns for the newest tokens, which rows of different lengths are not."""
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    config = GPTNeoConfig(vocab_size=97, hidden_size=16, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]],
                          window_size=4, initializer_range=0.5, bos_token_id=1, eos_token_id=2)  # fmt: skip
    target = GPTNeoForCausalLM(config).eval()
    refused(target, prompt, "GPTNeoForCausalLM", assistant_model=copy.deepcopy(target))


def test_a_draft_that_computes_nothing_but_nan_only_costs_time(target, drafts, prompt):
    broken = copy.deepcopy(drafts["good"])
    broken.lm_head.weight.data.fill_(float("nan"))
    plain = target.generate(prompt, max_new_tokens=20, do_sample=False)
    for fields in ({}, {"execution": "async", "num_assistant_tokens": 3}, {"execution": "sync"}):
        out = target.generate(prompt, max_new_tokens=20, do_sample=False, assistant_model=broken,
                              speculation=SaguaroConfig(**fields))  # fmt: skip
        assert out.tolist() == plain.tolist()


def test_embeddings_as_prompt_are_refused(target, drafts, prompt):
    with pytest.raises(SaguaroError, match="inputs_embeds"):
        target.generate(inputs_embeds=target.get_input_embeddings()(prompt), max_new_tokens=4,
                        assistant_model=drafts["good"], speculation="saguaro")  # fmt: skip


def test_positions_that_differ_from_the_masks_are_refused(target, drafts):
    ids, mask = torch.tensor([[0, 5, 6], [5, 6, 7]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    kwargs = dict(attention_mask=mask, max_new_tokens=4, do_sample=False)
    own = torch.tensor([[0, 0, 1], [0, 1, 2]])
    plain = target.generate(ids, **kwargs)
    out = target.generate(ids, **kwargs, position_ids=own, assistant_model=drafts["good"], speculation="saguaro")
    assert out.tolist() == plain.tolist()
    with pytest.raises(SaguaroError, match="position_ids"):
        target.generate(ids, **kwargs, position_ids=own + 5, assistant_model=drafts["good"], speculation="saguaro")
    with pytest.raises(SaguaroError, match="position_ids"):
        target.generate(ids, **kwargs, position_ids=torch.arange(9)[None], assistant_model=drafts["good"],
                        speculation="saguaro")  # fmt: skip


def test_right_padding_is_refused(target, drafts):
    ids, mask = torch.tensor([[5, 6, 0], [5, 6, 7]]), torch.tensor([[1, 1, 0], [1, 1, 1]])
    with pytest.raises(SaguaroError, match="left"):
        target.generate(
            ids, attention_mask=mask, max_new_tokens=4, assistant_model=drafts["good"], speculation="saguaro"
        )


@pytest.mark.parametrize("fields", [
    {"num_assistant_tokens": 0}, {"num_assistant_tokens": 65}, {"num_assistant_tokens": 2.0}, {"num_assistant_tokens": True},
    {"fan_out": -1}, {"fan_out": [1, 2], "num_assistant_tokens": 4}, {"fan_out": [1]}, {"fan_out": "many"},
    {"fan_out_shape": "square"}, {"cache_bias": 0.0, "verification": "rejection"}, {"cache_bias": 0.5}, {"backup": "ngram"},
    {"execution": "parallel"}, {"verification": "lossy"}, {"seed": 1.5}, {"compile": "yes"}, {"draft_temperature": 0},
])  # fmt: skip
def test_config_values_that_cannot_work_are_refused_with_the_field_named(fields):
    with pytest.raises(SaguaroError, match="|".join(fields)):
        SaguaroConfig(**fields)


def test_unknown_config_fields():
    with pytest.raises(TypeError):
        SaguaroConfig(speed=11)
    with pytest.raises(SaguaroError, match="speed"):
        SaguaroConfig.from_dict({"speed": 11})


def test_config_round_trips_through_json_and_a_saved_generation_config(target, drafts, prompt, tmp_path):
    config = SaguaroConfig(num_assistant_tokens=3, fan_out=[2, 1, 1, 2], backup="draft")
    assert SaguaroConfig.from_dict(config.to_dict()) == config
    GenerationConfig(speculation=config, max_new_tokens=6, do_sample=False, pad_token_id=0).save_pretrained(tmp_path)
    loaded = GenerationConfig.from_pretrained(tmp_path)
    out = target.generate(prompt, generation_config=loaded, assistant_model=drafts["good"])
    assert hf_saguaro.last_stats(target).new_tokens == 6
    assert out.tolist() == target.generate(prompt, max_new_tokens=6, do_sample=False).tolist()


@pytest.mark.parametrize("execution", ["async", "sync"])
@pytest.mark.parametrize("where", ["prefill", "chain", "glue", "plant", "grow", "harvest"])
@pytest.mark.parametrize("after", [0, 2])
def test_a_draft_that_fails_is_left_out_and_the_text_is_whole(
    target, drafts, prompt, monkeypatch, caplog, where, execution, after
):
    plain = target.generate(prompt, max_new_tokens=24, do_sample=False)
    stock, calls = getattr(Drafter, where), []

    def failing(self, *args, **kwargs):
        calls.append(where)
        if len(calls) > after:
            raise RuntimeError("out of luck")
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(Drafter, where, failing)
    threads = threading.active_count()
    config = SaguaroConfig(num_assistant_tokens=3, fan_out=2, execution=execution, backup="draft")
    out = target.generate(
        prompt, max_new_tokens=24, do_sample=False, assistant_model=drafts["fair"], speculation=config
    )
    assert out.tolist() == plain.tolist()
    assert threading.active_count() == threads
    stats = hf_saguaro.last_stats(target)
    assert (stats.draft_failure is not None) == (len(calls) > after)
    if stats.draft_failure:
        assert "out of luck" in stats.draft_failure


@pytest.mark.parametrize("error", [ValueError("the target's own"), KeyboardInterrupt()])
def test_a_fault_of_the_target_reaches_the_caller_and_leaves_nothing(target, drafts, prompt, monkeypatch, error):
    stock, calls = SlotModel.forward, []

    def failing(self, *args, **kwargs):
        if self.model is target:
            calls.append(1)
            if len(calls) > 2:
                raise error
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(SlotModel, "forward", failing)
    before = threading.active_count(), torch.get_num_threads(), torch.get_default_dtype()
    draft = drafts["good"]
    weights = copy.deepcopy(draft.state_dict())
    with pytest.raises(type(error)):
        target.generate(prompt, max_new_tokens=30, do_sample=False, assistant_model=draft,
                        speculation=SaguaroConfig(num_assistant_tokens=2, execution="async"))  # fmt: skip
    assert (threading.active_count(), torch.get_num_threads(), torch.get_default_dtype()) == before
    assert all(torch.equal(weights[name], value) for name, value in draft.state_dict().items())


def test_models_come_back_as_they_were_given(target, drafts, prompt):
    draft = drafts["good"]

    def state(model):
        flags = [(p.requires_grad, p.data_ptr()) for p in model.parameters()]
        return (
            model.training,
            flags,
            model.generation_config.to_dict(),
            model.config.to_dict(),
            len(model._forward_hooks),
        )

    draft.train()
    before = state(target), state(draft), torch.get_num_threads()
    for execution in ("async", "sync"):
        target.generate(prompt, max_new_tokens=12, do_sample=False, assistant_model=draft,
                        speculation=SaguaroConfig(num_assistant_tokens=2, execution=execution))  # fmt: skip
    assert (state(target), state(draft), torch.get_num_threads()) == before
    draft.eval()


def test_disable_gives_back_stock_transformers(target, drafts, prompt):
    from transformers.generation import utils
    from transformers.generation.utils import GenerationMixin

    hf_saguaro.disable()
    try:
        assert not hf_saguaro.is_enabled()
        assert not hasattr(GenerationConfig, "speculation") and "saguaro" not in utils.GENERATION_MODES_MAPPING
        assert not hasattr(GenerationMixin, "_saguaro_decoding")
        with pytest.raises(ValueError, match="speculation"):
            target.generate(prompt, speculation="saguaro", assistant_model=drafts["good"])
    finally:
        hf_saguaro.enable()
        hf_saguaro.enable()
    assert hf_saguaro.is_enabled()
    hf_saguaro.disable()
    hf_saguaro.enable()


def test_without_speculation_a_seeded_call_is_stock(target, prompt):
    torch.manual_seed(0)
    ours = target.generate(prompt, max_new_tokens=10, do_sample=True)
    hf_saguaro.disable()
    try:
        torch.manual_seed(0)
        assert ours.tolist() == target.generate(prompt, max_new_tokens=10, do_sample=True).tolist()
    finally:
        hf_saguaro.enable()
