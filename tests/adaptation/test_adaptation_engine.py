# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Through `model.generate`: the target's text whatever is swapped, and feedback that is exactly that text."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteria

from hf_saguaro import SaguaroConfig, SaguaroError, last_stats, make_draft
from hf_saguaro.adaptation import AdaptationConfig, OnlineAdapter, resolve


VOCAB = 97


def tiny_target(seed=0, layers=3):
    torch.manual_seed(seed)
    sizes = dict(
        hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3
    )
    config = LlamaConfig(
        vocab_size=VOCAB,
        num_hidden_layers=layers,
        eos_token_id=None,
        pad_token_id=0,
        max_position_embeddings=512,
        **sizes,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture
def draft(target):
    """The target with noise in its last layer."""
    draft = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in draft.model.layers[-1].parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3 * parameter.std())
    return draft


@pytest.fixture
def adapter(draft):
    config = AdaptationConfig(
        layers="all", learning_rate=1e-2, publish_every_rounds=1, validate=False, train_every_tokens=64
    )
    with OnlineAdapter(draft, config) as adapter:
        adapter.pause()
        yield adapter


def prompts(count, length=6):
    return torch.randint(2, VOCAB, (count, 1, length), generator=torch.Generator().manual_seed(3))


def speculate(target, draft, adaptation, prompt, new_tokens=16, **kwargs):
    settings = {"execution": "sync", "num_assistant_tokens": 3, "seed": 11}
    settings |= {key: kwargs.pop(key) for key in list(kwargs) if key in ("execution", "verification")}
    config = SaguaroConfig(adaptation=adaptation, **settings)
    kwargs = {"do_sample": False} | kwargs
    return target.generate(prompt, assistant_model=draft, max_new_tokens=new_tokens, speculation=config, **kwargs)


@pytest.fixture
def random_swaps(adapter, monkeypatch):
    """Every round serves another random adapter; the list counts them."""
    swaps, generator = [], torch.Generator().manual_seed(5)
    weights = adapter._weights
    shapes = adapter._trainer.loop.learner.student.snapshot()

    def swap():
        noise = {
            name: tuple(torch.randn(matrix.shape, generator=generator) * 0.1 for matrix in pair)
            for name, pair in shapes.items()
        }
        weights.write(weights.merge(noise))
        swaps.append(1)

    monkeypatch.setattr(adapter, "before_round", swap)
    return swaps


def digest(model):
    return [parameter.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("execution", ["sync", "async"])
def test_greedy_text_is_plain_generates_with_a_random_adapter_in_every_round(
    target, draft, adapter, random_swaps, execution
):
    before = digest(target)
    for prompt in prompts(50 if execution == "sync" else 10):
        plain = target.generate(prompt, max_new_tokens=8, do_sample=False)
        assert speculate(target, draft, adapter, prompt, 8, execution=execution).tolist() == plain.tolist()
    assert len(random_swaps) > 30
    assert all(torch.equal(now, then) for now, then in zip(target.parameters(), before))


@pytest.mark.parametrize("execution", ["sync", "async"])
def test_sampled_text_depends_on_the_seed_alone_with_a_random_adapter_in_every_round(
    target, draft, adapter, random_swaps, execution
):
    for prompt in prompts(6):
        alone = speculate(target, draft, None, prompt, 10, execution="autoregressive", do_sample=True, temperature=0.8)
        swapped = speculate(target, draft, adapter, prompt, 10, execution=execution, do_sample=True, temperature=0.8)
        assert swapped.tolist() == alone.tolist()


@pytest.mark.parametrize("execution", ["sync", "autoregressive"])
@pytest.mark.parametrize("batch", [1, 3])
def test_feedback_is_the_emitted_text_after_its_prompt(target, draft, adapter, batch, execution):
    """Also where nothing is drafted: the draft learns from what the target says."""
    prompt = torch.cat(list(prompts(batch)), dim=0)
    if batch > 1:
        prompt[0, :2] = 0  # left padding
    mask = (prompt != 0).long()
    out = speculate(target, draft, adapter, prompt, attention_mask=mask, execution=execution)
    collected = sum(adapter._buffer.contents().values(), [])
    assert len(collected) == batch
    for row in out:
        tokens = row[row.ne(0).nonzero()[0, 0] :].tolist()
        # Without an EOS rule a row whose text is complete goes on until the others are done.
        assert any(sequence.tokens[: len(tokens)].tolist() == tokens for sequence in collected)
    for sequence in collected:
        assert sequence.rows >= 16
        text = sequence.tokens[sequence.first :].long()
        with torch.no_grad():
            logits = target(sequence.tokens[None].long()).logits[0, sequence.first - 1 : -1]
        assert text.tolist() == logits.argmax(-1).tolist() == sequence.teacher.token_ids[:, 0].tolist()
        expected = logits.log_softmax(-1).gather(1, sequence.teacher.token_ids.long())
        torch.testing.assert_close(sequence.teacher.log_probs, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("settings", "temperature"), [({"temperature": 0.5}, 0.5), ({}, 1.0)])
def test_feedback_of_sampled_text_carries_its_temperature(target, draft, adapter, settings, temperature):
    speculate(target, draft, adapter, prompts(1)[0], do_sample=True, **settings)
    (sequence,) = sum(adapter._buffer.contents().values(), [])
    assert sequence.temperature == temperature


def test_accepted_tokens_rise_while_it_serves(target, draft, adapter):
    streamed, held_out = torch.cat(list(prompts(16))), torch.cat(list(prompts(24)[16:]))

    def accepted():
        speculate(target, draft, adapter, held_out, 24)
        return last_stats(target).mean_accepted

    before = accepted()
    for _ in range(4):
        speculate(target, draft, adapter, streamed, 24)
        assert adapter.flush(60)
    assert adapter.version >= 1
    assert accepted() > before * 1.1
    assert last_stats(target).adapter_version == (adapter.version, adapter.version)


def test_it_serves_under_inference_mode_and_learns_after(target, draft, adapter):
    with torch.inference_mode():
        for prompt in prompts(4):
            speculate(target, draft, adapter, prompt)
    assert adapter.flush(60) and adapter.version == 1
    with torch.inference_mode():
        speculate(target, draft, adapter, prompts(1)[0])
        assert adapter.flush(60)


def test_an_exception_in_the_middle_ends_the_call(target, draft, adapter):
    class Stop(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            if input_ids.shape[1] > 10:
                raise KeyboardInterrupt
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    with pytest.raises(KeyboardInterrupt):
        speculate(target, draft, adapter, prompts(1)[0], stopping_criteria=[Stop()])
    assert adapter._running_calls == 0
    own = digest(draft)
    adapter.close()
    assert all(torch.equal(now, then) for now, then in zip(draft.parameters(), own))


def test_true_makes_an_adapter_that_stays_with_the_draft(target, draft):
    speculate(target, draft, True, prompts(1)[0])
    adapter = resolve(True, draft)
    assert adapter.metrics()["rounds"] > 0
    adapter.close()


def test_refusals_come_before_any_token(target, draft):
    shared = copy.copy(draft)
    shared_adapter = OnlineAdapter(shared, AdaptationConfig(layers="all"))
    with shared_adapter, pytest.raises(SaguaroError, match="shares"):
        speculate(shared, shared, shared_adapter, prompts(1)[0])
    closed = OnlineAdapter(draft)
    closed.close()
    with pytest.raises(SaguaroError, match="closed"):
        speculate(target, draft, closed, prompts(1)[0])


def test_a_draft_made_from_the_target_is_healed(target):
    draft = make_draft(target, keep_layers=[0, 2])
    with OnlineAdapter(
        draft, AdaptationConfig(layers="all", learning_rate=1e-2, publish_every_rounds=1, r=16)
    ) as adapter:
        adapter.pause()
        for _ in range(3):
            speculate(target, draft, adapter, torch.cat(list(prompts(20))), 16)
            assert adapter.flush(60)
        published = [event for event in adapter.history() if event["event"] == "published"]
        assert published and published[-1]["accepted_candidate"] > published[-1]["accepted_bare"]


def test_a_swap_keeps_the_pointers_and_recompiles_nothing(target, draft, adapter):
    compiled = torch.compile(draft, backend="eager", dynamic=False)
    tokens = prompts(1)[0]
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(draft, backend=counter, dynamic=False)
    with torch.no_grad():
        first = compiled(tokens, use_cache=False).logits.clone()
        compiled_once = counter.frame_count
        pointers = [parameter.data_ptr() for parameter in draft.parameters()]
        for prompt in prompts(6):
            speculate(target, draft, adapter, prompt)
        assert adapter.flush(60) and adapter.version == 1
        second = compiled(tokens, use_cache=False).logits
    assert counter.frame_count == compiled_once
    assert pointers == [parameter.data_ptr() for parameter in draft.parameters()]
    assert not torch.equal(first, second)
    torch.testing.assert_close(second, draft(tokens, use_cache=False).logits)
