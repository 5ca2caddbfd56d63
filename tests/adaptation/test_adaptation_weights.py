# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""The draft is the user's: what it was before comes back, bit for bit, and nothing else is ever touched."""

from __future__ import annotations

import builtins
import copy
import gc
import subprocess
import sys
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from toy_serving import VOCAB, MarkovTarget, random_prompts, teach, tiny_draft
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from hf_saguaro import SaguaroError, make_draft
from hf_saguaro.adaptation import AdaptationConfig, OnlineAdapter, resolve


def tiny_gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=128)).eval()


def tiny_qwen2():
    torch.manual_seed(0)
    sizes = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2
    )
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCAB, tie_word_embeddings=True, **sizes)).eval()


def tiny_gemma3():
    torch.manual_seed(0)
    sizes = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2
    )
    config = Gemma3TextConfig(vocab_size=VOCAB, head_dim=8, sliding_window=8, **sizes)
    return Gemma3ForCausalLM(config).eval()


FAMILIES = {"llama": lambda: tiny_draft(layers=3), "qwen2": tiny_qwen2, "gpt2": tiny_gpt2, "gemma3": tiny_gemma3}


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]()


def state_of(model):
    """Everything of a model that a user can see."""
    return {
        "bits": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "pointers": {name: parameter.data_ptr() for name, parameter in model.named_parameters()},
        "requires_grad": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "training": {name: module.training for name, module in model.named_modules()},
        "modules": {name: type(module) for name, module in model.named_modules()},
        "hooks": {
            name: len(module._forward_pre_hooks) + len(module._forward_hooks) for name, module in model.named_modules()
        },
        "grads": [parameter.grad for parameter in model.parameters()],
        "config": model.config.to_dict(),
    }


def assert_same_state(model, state):
    now = state_of(model)
    for name, tensor in state.pop("bits").items():
        assert torch.equal(now["bits"][name], tensor), name
    now.pop("bits")
    assert now == state


def learn_and_publish(adapter, prompts=6):
    teach(adapter, MarkovTarget(), random_prompts(prompts))
    assert adapter.flush(60)
    assert adapter.version >= 1, adapter.history()


def test_the_draft_comes_back_bit_for_bit(family):
    before = state_of(family)
    with OnlineAdapter(family, AdaptationConfig(validate=False, publish_every_rounds=1, learning_rate=1e-2)) as adapter:
        adapter.pause()
        learn_and_publish(adapter)
        changed = [
            name for name, tensor in before["bits"].items() if not torch.equal(family.state_dict()[name], tensor)
        ]
        assert changed and not any("embed" in name or "wte" in name or "head" in name for name in changed)
        pointers = {name: parameter.data_ptr() for name, parameter in family.named_parameters()}
        assert pointers == before["pointers"]
        assert {name: type(module) for name, module in family.named_modules()} == before["modules"]
    assert_same_state(family, before)


def test_bfloat16_draft_comes_back_and_does_not_drift():
    draft = tiny_draft().to(torch.bfloat16)
    before = state_of(draft)
    with OnlineAdapter(draft, AdaptationConfig()) as adapter:
        weights = adapter._weights
        student = adapter._trainer.loop.learner.student
        with torch.no_grad():
            for matrix in student.parameters:
                matrix.normal_(std=0.1)
        assert all(matrix.dtype == torch.float32 for matrix in student.parameters)
        snapshot = student.snapshot()
        weights.write(weights.merge(snapshot))
        once = [weight.clone() for weight in weights.serving]
        for _ in range(50):
            weights.write(weights.pristine)
            weights.write(weights.merge(snapshot))
        assert all(torch.equal(one, now) for one, now in zip(once, weights.serving))
    assert_same_state(draft, before)


def test_the_draft_comes_back_after_an_exception_and_without_close():
    draft = tiny_draft()
    before = state_of(draft)
    config = AdaptationConfig(validate=False, publish_every_rounds=1)
    with pytest.raises(RuntimeError, match="user"), OnlineAdapter(draft, config) as adapter:
        learn_and_publish(adapter)
        raise RuntimeError("user")
    assert_same_state(draft, copy.deepcopy(before))

    adapter = OnlineAdapter(draft, config)
    learn_and_publish(adapter)
    del adapter
    gc.collect()
    assert_same_state(draft, before)


def test_serving_weights_are_what_peft_would_serve(family):
    """Merged from the pristine copy, the published weights compute what the LoRA copy computes."""
    with OnlineAdapter(family, AdaptationConfig(lora_alpha=16, layers="all")) as adapter:
        student = adapter._trainer.loop.learner.student
        with torch.no_grad():
            for matrix in student.parameters:
                matrix.normal_(std=0.05)
        adapter._weights.write(adapter._weights.merge(student.snapshot()))
        tokens = torch.tensor([[5, 6, 7, 8]])
        student._selected = torch.arange(4)
        with torch.no_grad():
            expected = student.model(input_ids=tokens).logits
            torch.testing.assert_close(family(tokens).logits, expected, atol=1e-4, rtol=1e-4)


def test_training_never_touches_what_serves(make_adapter):
    adapter = make_adapter(validate=False, publish_every_rounds=10_000)
    before = state_of(adapter.draft)
    teach(adapter, MarkovTarget(), random_prompts(8))
    assert adapter.flush(60) and adapter.metrics()["steps"] >= 2
    assert_same_state(adapter.draft, before)


def test_only_the_chosen_modules_are_adapted():
    draft = tiny_draft(layers=6)
    for config, expected in [
        (AdaptationConfig(), {4, 5}),
        (AdaptationConfig(layers="all"), set(range(6))),
        (AdaptationConfig(layers=[0, -1]), {0, 5}),
    ]:
        with OnlineAdapter(draft, config) as adapter:
            assert {int(name.split(".")[2]) for name in adapter._weights.names} == expected
    with OnlineAdapter(draft, AdaptationConfig(target_modules=["q_proj", "down_proj"], layers=[1])) as adapter:
        assert adapter._weights.names == ["model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj"]
    for wrong in (AdaptationConfig(layers=[6]), AdaptationConfig(target_modules=["lm_head"])):
        with pytest.raises(SaguaroError):
            OnlineAdapter(draft, wrong)


def test_a_draft_that_shares_layers_with_the_target_is_refused(make_adapter):
    target = tiny_draft(seed=3)
    adapter = make_adapter(target)
    with pytest.raises(SaguaroError, match="make_draft"):
        adapter.attach(target)
    # Shared embeddings alone do no harm: they are never adapted.
    draft = make_draft(target, keep_layers=2)
    draft.model.embed_tokens.weight = target.model.embed_tokens.weight
    make_adapter(draft).attach(target)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_a_draft_in_int8_is_refused():
    quantization = pytest.importorskip("torch.ao.quantization")  # to leave torch one day
    with pytest.raises(SaguaroError, match="quantised ones cannot learn"):
        OnlineAdapter(quantization.quantize_dynamic(tiny_draft(), {torch.nn.Linear}))


def test_drafts_that_cannot_be_adapted_are_refused_by_name():
    peft_draft = get_peft_model(tiny_draft(), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(SaguaroError, match="merge_and_unload"):
        OnlineAdapter(peft_draft)

    quantised = tiny_draft()
    quantised.is_quantized = True
    with pytest.raises(SaguaroError, match="quantised"):
        OnlineAdapter(quantised)

    tied = tiny_draft()
    tied.model.layers[1].mlp.up_proj.weight = tied.model.layers[0].mlp.up_proj.weight
    with pytest.raises(SaguaroError, match="share one weight"):
        OnlineAdapter(tied)

    with torch.inference_mode():
        frozen = tiny_draft()
    with pytest.raises(SaguaroError, match="inference_mode"):
        OnlineAdapter(frozen)


def test_a_second_adapter_of_an_open_draft_is_refused(make_adapter):
    adapter = make_adapter()
    with pytest.raises(SaguaroError, match="already"):
        OnlineAdapter(adapter.draft)
    adapter.close()
    adapter.close()
    make_adapter(adapter.draft)
    for use in (lambda: adapter.attach(tiny_draft()), lambda: adapter.begin([]), lambda: adapter.save_pretrained("x")):
        with pytest.raises(SaguaroError, match="closed"):
            use()
    assert adapter.history()[-1]["event"] == "closed" and adapter.version == 0 and not adapter.flush()


def test_resolve_keeps_one_adapter_a_draft():
    draft, other = tiny_draft(), tiny_draft()
    adapter = resolve(True, draft)
    try:
        assert resolve(True, draft) is adapter and resolve(AdaptationConfig(), draft) is adapter
        assert resolve({}, draft) is adapter and resolve(adapter, draft) is adapter
        with pytest.raises(SaguaroError, match="another draft"):
            resolve(adapter, other)
        with pytest.raises(SaguaroError, match="already"):
            resolve(AdaptationConfig(r=2), draft)
        with pytest.raises(SaguaroError, match="adaptation"):
            resolve("yes", draft)
    finally:
        adapter.close()
    again = resolve({"r": 2}, draft)
    assert again is not adapter and again.config.r == 2
    again.close()


def test_nobody_is_kept_alive():
    draft = tiny_draft()
    resolve(True, draft)
    teach(resolve(True, draft), MarkovTarget(), random_prompts(1))
    assert resolve(True, draft).flush(60)
    dead_draft, dead_adapter = weakref.ref(draft), weakref.ref(resolve(True, draft))
    del draft
    gc.collect()
    assert dead_draft() is None and dead_adapter() is None


def test_without_peft_the_error_names_the_extra(monkeypatch):
    real_import = builtins.__import__

    def no_peft(name, *args, **kwargs):
        if name == "peft":
            raise ImportError("No module named 'peft'")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_peft)
    with pytest.raises(SaguaroError, match=r"pip install hf_saguaro\[adapt\]"):
        OnlineAdapter(tiny_draft())


def test_importing_needs_none_of_the_extras():
    code = "import hf_saguaro.adaptation, sys; sys.exit(any(name in sys.modules for name in ('peft', 'datasets', 'pyarrow')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_the_global_generator_does_not_notice():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    OnlineAdapter(tiny_draft_without_seed()).close()
    assert torch.equal(torch.rand(3), expected)


def tiny_draft_without_seed():
    state = torch.get_rng_state()
    draft = tiny_draft()
    torch.set_rng_state(state)
    return draft


@pytest.mark.parametrize(
    "wrong",
    [
        {"r": 0},
        {"loss": "mse"},
        {"max_train_fraction": 0},
        {"max_train_fraction": 1.5},
        {"layers": "some"},
        {"layers": []},
        {"learning_rate": -1},
        {"validate": "false"},
        {"seed": 0.5},
        {"target_modules": [1]},
    ],
)
def test_config_refuses_what_cannot_work(wrong):
    with pytest.raises(SaguaroError, match=next(iter(wrong))):
        AdaptationConfig(**wrong)


def test_config_goes_through_json_and_names_unknown_fields():
    config = AdaptationConfig(r=4, layers=[1, 2], device=torch.device("cpu"))
    assert AdaptationConfig.from_dict(config.to_dict()) == config
    with pytest.raises(SaguaroError, match="rank"):
        AdaptationConfig.from_dict({"rank": 4})
    with pytest.raises(TypeError):
        AdaptationConfig(rank=4)
