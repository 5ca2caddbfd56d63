# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Sampling follows the target's law exactly, on every path that a token can come from.

A tiny target over six tokens; the law of its first three new tokens is enumerated and compared with what many sequences
in one batch sampled. The paths: misses and first rounds (sync), hits (async, everything prepared), copies (prompt lookup).
"""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy.stats import chisquare
from transformers import LogitsProcessor, LogitsProcessorList

import hf_saguaro
from hf_saguaro import SaguaroConfig
from hf_saguaro.generation.acceptance import RejectionVerification

from ..conftest import perturbed, tiny_llama


V, DRAWS, BATCH = 6, 20_000, 2_000
PROMPT = torch.tensor([[3, 1, 4]])
WARP = {"temperature": 0.9, "top_p": 0.97}


@pytest.fixture(scope="module")
def pair():
    target = tiny_llama(2, vocab_size=V, layers=1, initializer_range=0.25)
    return target, perturbed(target, 0.6, seed=1)


@pytest.fixture(scope="module")
def law(pair):
    """P(first three tokens), by enumeration through the stock processors."""
    target, _ = pair
    from transformers import TemperatureLogitsWarper, TopPLogitsWarper

    warp = LogitsProcessorList([TemperatureLogitsWarper(WARP["temperature"]), TopPLogitsWarper(WARP["top_p"])])
    probabilities = {}
    with torch.no_grad():
        for path in itertools.product(range(V), repeat=2):
            ids = torch.cat([PROMPT, torch.tensor([path])], dim=1)
            p = warp(None, target(ids).logits[0, -3:].float()).softmax(-1)
            for last in range(V):
                probabilities[(*path, last)] = float(p[0, path[0]] * p[1, path[1]] * p[2, last])
    return probabilities


def sample(pair, config, **kwargs):
    """`[DRAWS, 3]` tokens, and the stats of the last batch."""
    target, draft = pair
    drawn = []
    for start in range(DRAWS // BATCH):
        fields = {**config, "seed": 1000 + start}
        out = target.generate(PROMPT, max_new_tokens=5, do_sample=True, num_return_sequences=BATCH, assistant_model=draft,
                              top_k=0, speculation=SaguaroConfig(**fields), **WARP, **kwargs)  # fmt: skip
        drawn.append(out[:, 3:6])
    return torch.cat(drawn), hf_saguaro.last_stats(target)


def p_values(drawn, law):
    """Chi-square of the first token, the first pair, the third token and the triple."""
    views = {
        "first": lambda path: path[:1],
        "pair": lambda path: path[:2],
        "third": lambda path: path[2:],
        "triple": lambda path: path,
    }
    counted = {}
    for name, view in views.items():
        expected: dict = {}
        for path, p in law.items():
            expected[view(path)] = expected.get(view(path), 0.0) + p * len(drawn)
        seen = dict.fromkeys(expected, 0)
        for path in map(tuple, drawn.tolist()):
            seen[view(path)] += 1
        if any(count and expected[key] == 0 for key, count in seen.items()):
            return {"a token of probability zero": 0.0}
        frequent = [key for key, count in expected.items() if count >= 5]
        rest = [key for key, count in expected.items() if 0 < count < 5]
        observed = [seen[key] for key in frequent] + [sum(seen[key] for key in rest)] * bool(rest)
        wanted = [expected[key] for key in frequent] + [sum(expected[key] for key in rest)] * bool(rest)
        counted[name] = chisquare(observed, wanted, sum_check=False).pvalue if len(wanted) > 1 else 1.0
    return counted


PATHS = {
    "sync": {"execution": "sync", "num_assistant_tokens": 2},
    "hits": {
        "execution": "async",
        "num_assistant_tokens": 2,
        "fan_out": V,
        "fan_out_shape": "uniform",
        "backup": "draft",
    },
    "misses": {"execution": "async", "num_assistant_tokens": 2, "fan_out": 0, "backup": "draft"},
    "copies": {"execution": "sync", "num_assistant_tokens": 2, "backup": "prompt_lookup"},
    "none": {"execution": "async", "num_assistant_tokens": 1, "fan_out": 2, "backup": "none"},
}


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=pytest.mark.slow if path in ("copies", "none") else ()) for path in PATHS]
)
def test_every_path_follows_the_targets_law(pair, law, path, verification):
    drawn, stats = sample(pair, {**PATHS[path], "verification": verification})
    assert min(p_values(drawn, law).values()) > 1e-3
    if path == "hits":
        assert stats.row_hits > 0.2 * stats.row_rounds


@pytest.mark.parametrize("bias", [pytest.param(0.5, marks=pytest.mark.slow), 0.2])
def test_saguaro_sampling_follows_the_targets_law(pair, law, bias):
    config = {**PATHS["hits"], "verification": "rejection", "cache_bias": bias}
    drawn, _ = sample(pair, config)
    assert min(p_values(drawn, law).values()) > 1e-3


def test_rows_held_in_step_follow_the_targets_law(pair, law):
    """A user's processor in a batch: a row that could have gone on proposes the rest again, with the same numbers."""

    class Watcher(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores

    drawn, stats = sample(
        pair, {**PATHS["sync"], "verification": "rejection"}, logits_processor=LogitsProcessorList([Watcher()])
    )
    assert min(p_values(drawn, law).values()) > 1e-3
    assert stats.accepted_tokens > 0


def test_control_the_drafts_law_is_not_the_targets(pair, law):
    """What passes above has power: the draft's own samples fail."""
    target, draft = pair
    torch.manual_seed(0)
    drawn = draft.generate(PROMPT, max_new_tokens=3, do_sample=True, num_return_sequences=DRAWS, top_k=0, **WARP)[:, 3:]
    assert min(p_values(drawn, law).values()) < 1e-6


def test_control_a_q_that_is_not_the_one_drawn_from(pair, law, monkeypatch):
    """A q recomputed after the fact, here at another temperature, must show."""
    stock = RejectionVerification.draw

    def other_law(self, scores, rows, positions):
        tokens, law_of_draw = stock(self, scores, rows, positions)
        return tokens, law_of_draw * 0.5

    monkeypatch.setattr(RejectionVerification, "draw", other_law)
    drawn, _ = sample(pair, {**PATHS["sync"], "verification": "rejection"})
    assert min(p_values(drawn, law).values()) < 1e-6
