# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""The simulated accelerator: the true text at a set pace."""

from __future__ import annotations

import time

import pytest
import torch

import hf_saguaro
from hf_saguaro import SaguaroConfig, SaguaroError
from hf_saguaro.cli.simulate import SimulatedTarget


NEW_TOKENS = 24


def generate(model, prompt, **kwargs):
    return model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NEW_TOKENS, **kwargs
    )


@pytest.fixture
def simulated(target, prompt):
    simulated = SimulatedTarget(target, seconds=0.0)
    simulated.learn(prompt, NEW_TOKENS)
    return simulated


def test_plain_generate_writes_the_targets_text(target, simulated, prompt):
    assert torch.equal(generate(simulated, prompt), generate(target, prompt))


@pytest.mark.parametrize("execution", ["sync", "async"])
def test_speculation_writes_the_same_text_and_accepts_the_same_tokens(target, drafts, simulated, prompt, execution):
    config = SaguaroConfig(execution=execution, num_assistant_tokens=3, fan_out=2, backup="draft")
    figures = []
    for model in (target, simulated):
        text = generate(model, prompt, assistant_model=drafts["fair"], speculation=config)
        stats = hf_saguaro.last_stats(model)
        figures.append((text.tolist(), stats.rounds, stats.accepted_tokens))
    assert figures[0] == figures[1] and figures[0][2] > 0


def test_stock_assisted_generation_runs_on_it_too(target, drafts, simulated, prompt):
    assert torch.equal(generate(simulated, prompt, assistant_model=drafts["good"]), generate(target, prompt))


@pytest.mark.timed
def test_a_forward_takes_the_set_time_and_no_core(simulated, prompt):
    simulated.seconds = 0.05
    began, worked = time.perf_counter(), time.process_time()
    generate(simulated, prompt)
    assert 0.05 * NEW_TOKENS <= time.perf_counter() - began < 2 * 0.05 * NEW_TOKENS
    assert time.process_time() - worked < 0.5 * 0.05 * NEW_TOKENS


def test_only_learned_prompts_are_known(simulated, prompt):
    with pytest.raises(SaguaroError, match="only knows the prompts"):
        generate(simulated, prompt.flip(1))


def test_a_batch_is_refused(simulated, prompt):
    with pytest.raises(SaguaroError, match="one sequence"):
        generate(simulated, prompt.repeat(2, 1))
