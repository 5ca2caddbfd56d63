# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Target and draft on cards of their own: the text is the same, and the host looks at a card once a round.

The cards are stand-ins, so that this is tested where there are none.
"""

from __future__ import annotations

import contextlib
import threading
from unittest import mock

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, SequenceBiasLogitsProcessor

import hf_saguaro
from hf_saguaro import SaguaroConfig
from hf_saguaro.adaptation import AdaptationConfig, OnlineAdapter
from hf_saguaro.compat import CACHE_KEY
from hf_saguaro.generation.candidate_generator import SaguaroCandidateGenerator
from hf_saguaro.generation.draft_worker import DraftWorker
from hf_saguaro.generation.estimates import estimates_of
from hf_saguaro.generation.policy import Policy

from ..conftest import VOCAB, perturbed, tiny_llama
from ..stand_in_device import compiler, on, stand_in_devices


pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler, for stand-in devices")

# Of the target and the draft.
PLACES = [("cuda:0", "cuda:0"), ("cuda:0", "cuda:1"), ("cuda:0", "cpu"), ("cpu", "cuda:0")]
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
# Processors that look at the text, hold tensors of their own, or both.
PROCESSORS = {
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 3,
    "min_new_tokens": 3,
    "suppress_tokens": [3, 4],
    "bad_words_ids": [[8], [6, 7]],
    "sequence_bias": [[[12], 2.0], [[13, 14], -3.0]],
    "encoder_repetition_penalty": 1.2,
    "eos_token_id": list(range(2, 12)),  # rows stop one after the other
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def target():
    return tiny_llama(0, layers=1)


@pytest.fixture(scope="module")
def draft(target):
    return perturbed(target, 0.05)


@pytest.fixture
def ragged():
    ids = torch.randint(2, VOCAB, (2, 7), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def far(inputs, device):
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def generate(target, draft, inputs, new_tokens=12, k=3, execution="sync", arguments=None, **settings):
    config = SaguaroConfig(num_assistant_tokens=k, execution=execution, fan_out=2, seed=7, **settings)
    arguments = {"do_sample": False, "max_new_tokens": new_tokens} | (arguments or {})
    out = target.generate(**inputs, assistant_model=draft, speculation=config, **arguments)
    stats = hf_saguaro.last_stats(target)
    assert stats.draft_failure is None
    return out, stats


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("arguments", [{}, SAMPLING, PROCESSORS], ids=["greedy", "sampled", "processors"])
def test_the_text_and_what_is_accepted_are_those_of_one_device(target, draft, ragged, places, arguments):
    here, there = generate(target, draft, ragged, arguments=arguments)
    assert there.mean_accepted > 0.5
    if arguments is not SAMPLING:
        assert here.equal(target.generate(**ragged, **{"do_sample": False, "max_new_tokens": 12, **arguments}))
    with stand_in_devices():
        models = [on(place, model) for place, model in zip(places, (target, draft))]
        out, stats = generate(*models, far(ragged, places[0]), arguments=arguments)
        assert str(out.device) == places[0] and out.tolist() == here.tolist()
    assert stats.accepted_by_depth == there.accepted_by_depth and stats.rounds == there.rounds


@pytest.mark.parametrize("places", PLACES)
def test_overlapped_rounds_on_cards(target, draft, ragged, places):
    here = target.generate(**ragged, do_sample=False, max_new_tokens=12)
    with stand_in_devices():
        models = [on(place, model) for place, model in zip(places, (target, draft))]
        out, stats = generate(*models, far(ragged, places[0]), execution="async")
        assert out.tolist() == here.tolist()
    assert stats.cache_hits > 0


@pytest.mark.parametrize("settings", [{}, {"cache_bias": 0.5}], ids=["rejection", "saguaro sampling"])
@pytest.mark.parametrize("places", PLACES)
def test_rejection_verification_on_cards(target, draft, ragged, places, settings):
    """In turns its text hangs on the seed alone."""
    settings = {"verification": "rejection", "arguments": {"do_sample": True}, **settings}
    here, _ = generate(target, draft, ragged, **settings)
    with stand_in_devices():
        models = [on(place, model) for place, model in zip(places, (target, draft))]
        out, _ = generate(*models, far(ragged, places[0]), **settings)
        assert out.tolist() == here.tolist()


def waits(target, draft, inputs, new_tokens, adapts=False, **settings):
    """Of a text of two lengths: how much more often the host waited for the longer one, by thread; and its rounds more."""
    seen = []
    for length in (new_tokens, 2 * new_tokens):
        with stand_in_devices() as counted, contextlib.ExitStack() as stack:
            models = [on("cuda:0", model) for model in (target, draft)]
            if adapts:
                settings["adaptation"] = stack.enter_context(OnlineAdapter(models[1], AdaptationConfig(device="cpu")))
            _, stats = generate(*models, far(inputs, "cuda:0"), length, **settings)
        seen.append((counted.by_host, stats))
    (few, short), (many, long) = seen
    return many - few, long.rounds - short.rounds


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"arguments": SAMPLING},
        {"arguments": {"repetition_penalty": 1.3}},
        {"arguments": SAMPLING, "verification": "rejection", "cache_bias": 0.5},
        {"adapts": True},
    ],
    ids=["greedy", "sampled", "penalty", "rejection", "feedback"],
)
def test_with_a_fixed_k_the_host_waits_for_the_verdict_and_nothing_else(target, draft, ragged, settings):
    by_thread, rounds = waits(target, draft, ragged, 8, **settings)
    assert by_thread == {"MainThread": rounds}


def test_beside_the_target_the_draft_waits_for_its_forks_and_nothing_else(target, draft, ragged):
    by_thread, rounds = waits(target, draft, ragged, 8, execution="async")
    assert by_thread["MainThread"] == rounds and 0 < by_thread["hf_saguaro-draft"] <= rounds
    assert len(by_thread) == 2


def test_a_draft_that_may_end_chains_on_its_own_doubt_is_asked_once_a_token(target, draft, ragged, monkeypatch):
    monkeypatch.setattr(Policy, "pass_pays", lambda self, confidence: len(confidence) < 3)
    by_thread, rounds = waits(target, draft, ragged, 8, k="auto")
    assert rounds > 1 and 2 * rounds < by_thread["MainThread"] <= (1 + 3) * rounds


def test_what_the_host_did_not_wait_for_is_not_given_a_time(target, draft, ragged, monkeypatch):
    monkeypatch.setattr(Policy, "pass_pays", lambda self, confidence: True)
    with stand_in_devices():
        models = [on("cuda:0", model) for model in (target, draft)]
        for k, tells in ((3, False), ("auto", True)):
            _, stats = generate(*models, far(ragged, "cuda:0"), 8, k=k)
            seen = estimates_of(*models, len(ragged["input_ids"]))
            assert (seen.draft_pass.value is not None) == tells
            assert (stats.predicted_speedup is not None) == tells


@pytest.mark.parametrize("elsewhere", ["cuda:1", "cpu"])
@pytest.mark.parametrize("settings", [{}, {"arguments": PROCESSORS}, {"verification": "rejection", "arguments": SAMPLING}],
                         ids=["greedy", "processors", "rejection"])  # fmt: skip
def test_a_draft_elsewhere_asks_the_targets_device_for_nothing(target, draft, ragged, settings, elsewhere):
    """What it asked for would come when the target is done with the round, and the draft would work after it, not beside."""
    with stand_in_devices() as counted:
        models = [on("cuda:0", target), on(elsewhere, draft)]
        generate(*models, far(ragged, "cuda:0"), execution="async", **settings)
    of_draft = {(source, end) for thread, source, end in counted.between_devices if thread == "hf_saguaro-draft"}
    assert (elsewhere, "cuda:0") in of_draft and ("cuda:0", elsewhere) not in of_draft


def test_a_target_spread_over_cards(draft, ragged):
    """As `device_map="auto"` leaves it: every layer's inputs follow it, the scores come back to the first card."""
    target = tiny_llama(0, layers=2)
    here, there = generate(target, draft, ragged)
    with stand_in_devices():
        spread, second = on("cuda:0", target), on("cuda:1", target)
        spread.model.layers[1] = second.model.layers[1]
        add_hook_to_module(spread.model.layers[1], AlignDevicesHook("cuda:1", io_same_device=True))
        out, stats = generate(spread, on("cuda:1", draft), far(ragged, "cuda:0"))
        assert out.tolist() == here.tolist()
    assert stats.accepted_by_depth == there.accepted_by_depth


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("arguments", [{}, {"repetition_penalty": 1.3}], ids=["greedy", "penalty"])
def test_a_cache_comes_back_on_the_targets_device_and_is_continued(target, draft, places, arguments):
    prompt = torch.randint(2, VOCAB, (1, 7), generator=torch.Generator().manual_seed(3))
    here = target.generate(prompt, do_sample=False, max_new_tokens=12, **arguments)
    with stand_in_devices():
        models, cache = [on(place, model) for place, model in zip(places, (target, draft))], DynamicCache()
        text = prompt.to(places[0])
        for _ in range(2):
            text, _ = generate(*models, {"input_ids": text, CACHE_KEY: cache}, 6, arguments=arguments)
        assert text.tolist() == here.tolist() and str(cache.layers[0].keys.device) == places[0]


def test_a_processor_that_has_been_used_follows_the_draft_too(target, draft):
    """Some make their tensors at the first call, and keep them in lists."""
    prompt = torch.randint(2, VOCAB, (1, 7), generator=torch.Generator().manual_seed(3))
    bias = SequenceBiasLogitsProcessor([[[12], 2.0], [[13, 14], -3.0], [[20, 21, 22], 5.0]])
    here = target.generate(prompt, do_sample=False, max_new_tokens=8, logits_processor=LogitsProcessorList([bias]))
    bias.prepared_bias_variables = False
    with stand_in_devices():
        models, given = [on("cuda:0", target), on("cuda:1", draft)], {"input_ids": prompt.to("cuda:0")}
        for _ in range(2):
            out, _ = generate(
                *models, given, arguments={"max_new_tokens": 8, "logits_processor": LogitsProcessorList([bias])}
            )
            assert out.tolist() == here.tolist()


def test_the_draft_works_on_the_streams_of_the_caller():
    entered = []

    @contextlib.contextmanager
    def stream(of):
        entered.append((threading.current_thread().name, of))
        yield

    with mock.patch.multiple(torch.cuda, current_stream=lambda device: f"the caller's on {device}", stream=stream):
        worker = DraftWorker(None, [torch.device("cuda:1"), torch.device("cpu")])
        name = worker.submit(lambda: [*entered, threading.current_thread().name]).result()
        worker.close()
    assert name == [(name[-1], "the caller's on cuda:1"), name[-1]] and name[-1] != threading.current_thread().name


def test_scores_lie_where_the_ids_lie(target, draft, ragged):
    wanted = {"return_dict_in_generate": True, "output_scores": True}
    here = target.generate(**ragged, do_sample=False, max_new_tokens=6, **wanted)
    with stand_in_devices():
        out, _ = generate(
            on("cuda:0", target), on("cuda:1", draft), far(ragged, "cuda:0"), arguments={**wanted, "max_new_tokens": 6}
        )
        assert {str(scores.device) for scores in out.scores} == {"cuda:0"}
        for scores, plain in zip(out.scores, here.scores, strict=True):
            assert torch.allclose(scores.cpu(), plain, atol=1e-4)


def test_the_candidate_generator_on_another_card(draft):
    ids = torch.randint(2, VOCAB, (1, 7), generator=torch.Generator().manual_seed(3))
    processors, settings = LogitsProcessorList(), GenerationConfig(do_sample=False, max_length=30)
    config = SaguaroConfig(num_assistant_tokens=3, fan_out=2, backup="draft")
    texts = []
    with stand_in_devices():
        for place, ids_place in (("cpu", "cpu"), ("cuda:1", "cuda:0")):
            candidates = SaguaroCandidateGenerator(on(place, draft), settings, processors, config)
            text = ids.to(ids_place)
            for _ in range(3):
                text, _ = candidates.get_candidates(text)
                assert str(text.device).startswith(ids_place)
            candidates.close()
            texts.append(text.tolist())
    assert texts[0] == texts[1]


@pytest.mark.parametrize("place", ["cuda:0", "cuda:1", "cpu"])
def test_an_adapter_learns_on_the_host_what_a_card_serves(target, draft, ragged, place):
    settings = AdaptationConfig(
        layers="all",
        publish_every_rounds=1,
        validate=False,
        train_every_tokens=16,
        device="cpu",
        max_train_fraction=1.0,
    )
    here = target.generate(**ragged, do_sample=False, max_new_tokens=12)
    with stand_in_devices():
        far_target, far_draft = on("cuda:0", target), on(place, draft)
        with OnlineAdapter(far_draft, settings) as adapter:
            for _ in range(2):
                out, _ = generate(far_target, far_draft, far(ragged, "cuda:0"), adaptation=adapter)
                assert out.tolist() == here.tolist()
                adapter.flush(60)
            out, stats = generate(far_target, far_draft, far(ragged, "cuda:0"), adaptation=adapter)
            assert out.tolist() == here.tolist() and stats.adapter_version[1] > 0
            served, own = (model.model.layers[0].mlp.up_proj.weight for model in (far_draft, draft))
            assert str(served.device) == place and not torch.equal(served.cpu(), own)
