# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""The text is the target's, token for token, whatever the draft, K, F, mode and timing."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

import hf_saguaro
from hf_saguaro import SaguaroConfig
from hf_saguaro.generation.policy import Policy

from ..conftest import VOCAB


DRAFTS = ("good", "fair", "unrelated", "constant", "itself")


@pytest.fixture(scope="module")
def plain(target):
    texts = {}

    def generate(prompt, new_tokens):
        key = (tuple(prompt.flatten().tolist()), new_tokens)
        if key not in texts:
            texts[key] = target.generate(prompt, max_new_tokens=new_tokens, do_sample=False)
        return texts[key]

    return generate


@pytest.mark.parametrize("execution", ["async", "sync"])
@pytest.mark.parametrize("k", range(1, 9))
def test_greedy_text_is_plain_generates(target, drafts, prompt, plain, k, execution):
    for draft in DRAFTS:
        for fan_out in range(5) if execution == "async" else [0]:
            config = SaguaroConfig(num_assistant_tokens=k, fan_out=fan_out, execution=execution)
            out = target.generate(
                prompt, max_new_tokens=3 * k, do_sample=False, assistant_model=drafts[draft], speculation=config
            )
            assert out.tolist() == plain(prompt, 3 * k).tolist(), (draft, fan_out)


@pytest.mark.parametrize("execution", ["async", "sync"])
@pytest.mark.parametrize("k", [1, 3, 5])
def test_texts_of_every_length(target, drafts, prompt, plain, k, execution):
    config = SaguaroConfig(num_assistant_tokens=k, fan_out=2, execution=execution)
    for new_tokens in range(1, 3 * k):
        out = target.generate(
            prompt, max_new_tokens=new_tokens, do_sample=False, assistant_model=drafts["good"], speculation=config
        )
        assert out.tolist() == plain(prompt, new_tokens).tolist()


@pytest.mark.parametrize("backup", ["draft", "prompt_lookup", "none", "auto"])
@pytest.mark.parametrize("execution", ["async", "sync", "auto", "autoregressive"])
@pytest.mark.parametrize("draft", ["fair", "unrelated"])
def test_no_backup_and_no_mode_changes_the_text(target, drafts, prompt, plain, draft, execution, backup):
    for k in ("auto", 4):
        config = SaguaroConfig(num_assistant_tokens=k, execution=execution, backup=backup)
        out = target.generate(
            prompt, max_new_tokens=50, do_sample=False, assistant_model=drafts[draft], speculation=config
        )
        assert out.tolist() == plain(prompt, 50).tolist()


@pytest.mark.parametrize("fan_out", [1, 3])
@pytest.mark.parametrize(
    "sampling",
    [
        {"do_sample": False},
        {"do_sample": True, "temperature": 0.7},
        {"do_sample": True},
        {"do_sample": True, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    ],
)
def test_the_target_as_its_own_draft_is_always_accepted_and_always_hit(target, drafts, prompt, sampling, fan_out):
    config = SaguaroConfig(num_assistant_tokens=4, fan_out=fan_out, execution="async", backup="draft", seed=1)
    target.generate(prompt, max_new_tokens=41, assistant_model=drafts["itself"], speculation=config, **sampling)
    stats = hf_saguaro.last_stats(target)
    assert stats.accepted_by_depth[:4] == [0, 0, 0, 0] and stats.rounds == 8
    assert stats.cache_hits == stats.rounds - 1  # the first round has nothing that could have been prepared


@pytest.mark.parametrize("temperature", [0.4, 0.7, 1.0, 1.5])
def test_the_draft_is_warped_once(target, drafts, prompt, temperature):
    """With the target as its own draft rejection sampling accepts everything too, at every temperature."""
    config = SaguaroConfig(num_assistant_tokens=4, execution="sync", verification="rejection", seed=3)
    target.generate(prompt, max_new_tokens=41, do_sample=True, temperature=temperature, top_k=20,
                    assistant_model=drafts["itself"], speculation=config)  # fmt: skip
    stats = hf_saguaro.last_stats(target)
    assert stats.accepted_tokens == stats.drafted_tokens


SAMPLING = [
    {"temperature": 1.0, "top_k": 0},
    {"temperature": 0.7, "top_k": 20},
    {"top_p": 0.8},
    {"min_p": 0.05, "top_k": 0},
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
]


@pytest.mark.parametrize("sampling", SAMPLING)
def test_coupled_sampling_gives_the_same_text_with_any_draft_and_none(target, drafts, prompt, sampling):
    def sample(draft, **fields):
        config = SaguaroConfig(seed=11, **fields)
        return target.generate(
            prompt, max_new_tokens=24, do_sample=True, assistant_model=draft, speculation=config, **sampling
        ).tolist()

    expected = sample(None, execution="autoregressive")
    for draft in drafts.values():
        for fields in ({"execution": "sync"}, {"execution": "async", "fan_out": 3}, {"backup": "prompt_lookup"}):
            for k in (1, 4):
                assert sample(draft, num_assistant_tokens=k, **fields) == expected


def test_set_seed_repeats_a_sampled_text_and_the_next_one_differs(target, drafts, prompt):
    def sample():
        return target.generate(
            prompt, max_new_tokens=30, do_sample=True, assistant_model=drafts["fair"], speculation="saguaro"
        ).tolist()

    torch.manual_seed(0)
    first, second = sample(), sample()
    torch.manual_seed(0)
    assert sample() == first != second


@pytest.mark.parametrize("where", ["grow", "glue", "chain", "harvest", "plant"])
def test_a_slow_draft_changes_no_token(target, drafts, prompt, plain, monkeypatch, where):
    """Sleeping anywhere in the draft's work moves the moment of the verdict, and nothing else."""
    from hf_saguaro.generation.drafter import Drafter

    stock = getattr(Drafter, where)

    def slow(self, *args, **kwargs):
        time.sleep(0.02)
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(Drafter, where, slow)
    config = SaguaroConfig(num_assistant_tokens=3, fan_out=2, execution="async")
    out = target.generate(
        prompt, max_new_tokens=20, do_sample=False, assistant_model=drafts["good"], speculation=config
    )
    assert out.tolist() == plain(prompt, 20).tolist()


def test_a_slow_target_changes_no_token(target, drafts, prompt, plain, monkeypatch):
    from hf_saguaro.generation.verifier import Verifier

    stock = Verifier.forward

    def slow(self, *args):
        time.sleep(0.03)
        return stock(self, *args)

    monkeypatch.setattr(Verifier, "forward", slow)
    config = SaguaroConfig(num_assistant_tokens=3, fan_out=2, execution="async")
    out = target.generate(
        prompt, max_new_tokens=20, do_sample=False, assistant_model=drafts["good"], speculation=config
    )
    assert out.tolist() == plain(prompt, 20).tolist()
    assert hf_saguaro.last_stats(target).hit_rate > 0.5


@pytest.mark.slow
def test_a_compiled_draft_changes_no_token(target, drafts, prompt, plain):
    config = SaguaroConfig(num_assistant_tokens=3, execution="sync", compile=True)
    for _ in range(2):
        out = target.generate(
            prompt, max_new_tokens=20, do_sample=False, assistant_model=drafts["unrelated"], speculation=config
        )
        assert out.tolist() == plain(prompt, 20).tolist()
    stats = hf_saguaro.last_stats(target)
    assert stats.draft_failure is None and stats.compile_seconds == 0.0  # the second call compiles nothing


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", ["good", "fair", "itself"])
def test_a_mode_may_change_with_every_round(target, drafts, kind, batch, monkeypatch):
    """Also where a round of another mode is left with what an overlapped one prepared for it."""
    modes = ["autoregressive", "sync", "async", "autoregressive", "async", "sync", "sync", "async", "async"]
    seen = itertools.cycle(modes)
    monkeypatch.setattr(Policy, "_best_execution", lambda policy: next(seen))
    monkeypatch.setattr(Policy, "may_overlap", True)
    prompts = torch.randint(2, VOCAB, (batch, 7), generator=torch.Generator().manual_seed(8))
    mask = torch.ones_like(prompts)
    mask[1:, :2] = 0
    kwargs = dict(attention_mask=mask, max_new_tokens=40, do_sample=False)
    plain = target.generate(prompts, **kwargs)
    config = SaguaroConfig(num_assistant_tokens=3, fan_out=2)
    assert target.generate(prompts, assistant_model=drafts[kind], speculation=config, **kwargs).equal(plain)
    stats = hf_saguaro.last_stats(target)
    assert len(stats.rounds_by_execution) == 3 and (stats.row_hits or kind == "fair")
    if kind == "itself" and batch == 1:  # a draft that knows the text as it is now is right every time
        assert stats.accepted_tokens == stats.drafted_tokens
