# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""What a stream does to the draft: it rises, follows, keeps, and is left alone where there is nothing to learn."""

from __future__ import annotations

import copy

import pytest
import torch
from toy_serving import HashTarget, MarkovTarget, plain_text, random_prompts, serve, teach, tiny_draft

from hf_saguaro.adaptation.gate import ShadowGate
from hf_saguaro.adaptation.losses import rounds_needed


def stream(adapter, target, parts, first_seed=0, prompts=20):
    for part in range(parts):
        teach(adapter, target, random_prompts(prompts, seed=first_seed + part))
        assert adapter.flush(60)


@torch.no_grad()
def measured(draft, target, prompts=24, new_tokens=16, k=4):
    """Accepted tokens a round of greedy decoding, on prompts that nobody trained on. The texts are the target's whatever
    the draft does, so one pass over them tells where the draft would have been right."""
    rounds = 0
    for prompt in random_prompts(prompts, seed=999):
        text = plain_text(target, prompt, new_tokens)
        favourites = draft(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
        rounds += rounds_needed([float(own == token) for own, token in zip(favourites, text)], k)
    return prompts * new_tokens / rounds - 1


@pytest.mark.parametrize("loss", ["kl", "reverse_kl", "acceptance"])
def test_accepted_tokens_rise_on_prompts_not_trained_on(make_adapter, loss):
    target, adapter = MarkovTarget(), make_adapter(loss=loss)
    before = measured(adapter.draft, target)
    stream(adapter, target, 5)
    assert adapter.version >= 1
    assert measured(adapter.draft, target) > before + 0.2


def test_a_draft_with_a_wrapped_forward_learns_too(make_adapter):
    draft, calls = tiny_draft(), []
    own = draft.forward

    def forward(*args, **kwargs):
        calls.append(kwargs)
        return own(*args, **kwargs)

    draft.forward = forward
    target, adapter = MarkovTarget(), make_adapter(draft)
    stream(adapter, target, 5)
    assert adapter.version >= 1 and not calls
    draft(torch.tensor([[5, 6]]))
    assert calls  # what serves is wrapped as before


def test_follows_a_shift_and_keeps_what_it_learned(make_adapter):
    first, second = MarkovTarget(0), MarkovTarget(1)
    adapter = make_adapter()
    bare = copy.deepcopy(adapter.draft)
    stream(adapter, first, 5)
    gain_first = measured(adapter.draft, first) - measured(bare, first)
    assert gain_first > 0.5

    stream(adapter, second, 6, first_seed=100)
    assert measured(adapter.draft, second) - measured(bare, second) > 0.3  # follows
    stream(adapter, first, 2, first_seed=200)
    assert measured(adapter.draft, first) - measured(bare, first) > 0.5 * gain_first  # keeps


def test_floor_takes_a_harmful_adapter_off_within_twenty_prompts_and_puts_it_back(make_adapter):
    """The draft knows domain B; its adapter knows A. On B the bare draft must serve, on A again the adapter."""
    first, second = MarkovTarget(0), MarkovTarget(1)
    knows_second = make_adapter()
    stream(knows_second, second, 5)
    draft = tiny_draft()
    merged = [weight.clone() for weight in knows_second._weights.serving]
    knows_second.close()
    adapter = make_adapter(draft)
    adapter.close()
    with torch.no_grad():
        for weight, own in zip(adapter._weights.serving, merged):
            weight.copy_(own)

    adapter = make_adapter(draft, learning_rate=3e-2)
    stream(adapter, first, 5)
    assert adapter.version >= 1 and measured(draft, first) > 0.5
    served = adapter.version

    adapter._trainer.loop.learner.config.learning_rate = 0.0  # the floor must do it, not learning
    for prompts in (8, 8):
        teach(adapter, second, random_prompts(prompts, seed=300 + prompts))
        assert adapter.flush(60)
    assert adapter.version == 0
    assert adapter.history()[-1]["event"] == "bare draft" and adapter.history()[-1]["gain_over_bare"] < 0

    teach(adapter, first, random_prompts(12, seed=400))
    assert adapter.flush(60)
    assert adapter.version == served and adapter.history()[-1]["event"] == "adapter returned"


def test_nothing_is_published_where_nothing_can_be_learned(make_adapter):
    adapter = make_adapter()
    stream(adapter, HashTarget(), 6)
    assert adapter.version == 0 and adapter.metrics()["published"] == 0
    assert adapter.metrics()["refused"] >= 2
    # Candidates without promise shrink the share of time that training takes.
    assert adapter._trainer._share < adapter.config.max_train_fraction / 6


def test_sampled_traffic_is_learned_at_its_own_temperature(make_adapter):
    target, adapter = MarkovTarget(sharpness=2.0), make_adapter(top_k_logits=16)
    for part in range(5):
        teach(adapter, target, random_prompts(16, seed=part), temperature=0.7)
        assert adapter.flush(60)
    assert adapter.version >= 1
    kept = adapter._buffer.validation()
    assert {sequence.temperature for sequence in kept} == {0.7}
    gate = ShadowGate(adapter._trainer.loop.learner.student)
    gate.measure(-1, None, kept)
    gate.measure(-2, adapter._publisher.adapter_of(adapter.version), kept)
    assert sum(sequence.rounds[-2] for sequence in kept) < sum(sequence.rounds[-1] for sequence in kept)


def test_rejected_branches_are_learned_from_when_asked(make_adapter):
    """Without the discard term the branch's rows change nothing; with it they do."""

    def trained(**config):
        adapter = make_adapter(validate=False, **config)
        session = adapter.begin([torch.tensor([1, 2, 3])])
        scores = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * 4
        session.observe(0, torch.tensor([4, 5, 6, 7]), 1, int(scores[1].argmax()), scores)
        session.end()
        assert adapter.flush(60)
        weights = [weight.clone() for weight in adapter._weights.serving]
        adapter.close()
        return weights

    def same(one, other):
        return all(torch.equal(a, b) for a, b in zip(one, other))

    assert same(trained(), trained(discard_weight=0.0))
    assert not same(trained(), trained(discard_weight=0.5))


def test_flush_with_the_same_seed_and_feedback_gives_the_same_weights(make_adapter):
    def run(seed):
        adapter = make_adapter(seed=seed)
        stream(adapter, MarkovTarget(), 3, prompts=16)
        weights = [weight.clone() for weight in adapter._weights.serving]
        events = [{key: value for key, value in event.items() if key != "time"} for event in adapter.history()]
        adapter.close()
        return weights, events

    (one, events_one), (again, events_again), (other, _) = run(0), run(0), run(1)
    assert events_one == events_again and all(torch.equal(a, b) for a, b in zip(one, again))
    assert not all(torch.equal(a, b) for a, b in zip(one, other))


def test_empty_or_broken_feedback_leaves_no_trace(make_adapter):
    adapter = make_adapter()
    learner = adapter._trainer.loop.learner
    before = learner.student.snapshot()
    teach(adapter, MarkovTarget(), random_prompts(1), new_tokens=4)
    sequence = adapter._buffer.take_fresh(1) or adapter._buffer.validation()
    sequence[0].teacher.log_probs.fill_(torch.nan)
    assert learner.step([]) is None and learner.step(sequence) is None
    assert learner.steps == 0 and learner.discarded_steps == 2 and not learner._optimizer.state
    assert all(torch.equal(a, b) for name in before for a, b in zip(before[name], learner.student.snapshot()[name]))


def test_text_is_the_targets_while_the_draft_learns(make_adapter):
    target, adapter = MarkovTarget(), make_adapter(train_every_tokens=32, max_train_fraction=1.0)
    adapter.resume()  # in the background, as it likes
    prompts = random_prompts(12, seed=4)
    served = serve(adapter, adapter.draft, target, prompts, new_tokens=12)
    assert served.texts == [plain_text(target, prompt, len(text)) for prompt, text in zip(prompts, served.texts)]
