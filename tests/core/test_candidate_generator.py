# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""The same drafter behind Transformers' own assisted loop."""

from __future__ import annotations

import threading

import pytest
import torch

from hf_saguaro import SaguaroCandidateGenerator, SaguaroConfig, SaguaroError


@pytest.fixture
def stock_loop(target, monkeypatch):
    """Runs the stock assisted loop with our generator; the generators that it made are collected."""
    made = []

    def run(draft, config, prompt, **kwargs):
        def get(self, generation_config, logits_processor, **_):
            made.append(SaguaroCandidateGenerator(draft, generation_config, logits_processor, config))
            return made[-1]

        monkeypatch.setattr(type(target), "_get_candidate_generator", get)
        return target.generate(prompt, assistant_model=draft, **kwargs)

    yield run
    for generator in made:
        generator.close()


@pytest.mark.parametrize("draft", ["good", "unrelated", "itself"])
@pytest.mark.parametrize("fan_out", [0, 3])
def test_stock_loop_gives_plain_greedy_text(target, drafts, prompt, stock_loop, draft, fan_out):
    plain = target.generate(prompt, max_new_tokens=30, do_sample=False)
    config = SaguaroConfig(num_assistant_tokens=4, fan_out=fan_out)
    out = stock_loop(drafts[draft], config, prompt, max_new_tokens=30, do_sample=False)
    assert out.tolist() == plain.tolist()


def test_a_prompt_of_one_token(target, drafts, stock_loop):
    prompt = torch.tensor([[5]])
    plain = target.generate(prompt, max_new_tokens=12, do_sample=False)
    assert stock_loop(drafts["good"], None, prompt, max_new_tokens=12, do_sample=False).tolist() == plain.tolist()


def test_processors_that_look_at_the_text(target, drafts, prompt, stock_loop):
    kwargs = dict(max_new_tokens=30, do_sample=False, repetition_penalty=1.5, no_repeat_ngram_size=2)
    plain = target.generate(prompt, **kwargs)
    out = stock_loop(drafts["good"], SaguaroConfig(num_assistant_tokens=4, fan_out=2), prompt, **kwargs)
    assert out.tolist() == plain.tolist()


def test_sampled_candidates_come_with_the_scores_they_were_drawn_from(target, drafts, prompt, stock_loop):
    """The target as its own draft is then accepted by the stock loop every time: 4 tokens and its own in each round."""
    calls = []
    stock = SaguaroCandidateGenerator.get_candidates

    def counted(self, input_ids, *args, **kwargs):
        calls.append(input_ids.shape[1])
        return stock(self, input_ids, *args, **kwargs)

    SaguaroCandidateGenerator.get_candidates = counted
    try:
        config = SaguaroConfig(num_assistant_tokens=4, fan_out=3)
        stock_loop(drafts["itself"], config, prompt, max_new_tokens=30, do_sample=True, temperature=0.7, top_k=10)
    finally:
        SaguaroCandidateGenerator.get_candidates = stock
    assert [b - a for a, b in zip(calls, calls[1:])] == [5] * 5


def test_dropping_the_generator_ends_its_thread(target, drafts, prompt):
    before = threading.active_count()
    generator = SaguaroCandidateGenerator(drafts["good"], target.generation_config)
    generator.get_candidates(prompt)
    assert threading.active_count() == before + 1
    del generator
    assert threading.active_count() == before


def test_a_draft_that_cannot_draft_is_refused(target):
    with pytest.raises(SaguaroError, match="not a Transformers model"):
        SaguaroCandidateGenerator(torch.nn.Linear(2, 2), target.generation_config)
