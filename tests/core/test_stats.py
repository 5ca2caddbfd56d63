# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""What a run reports: identities that always hold, and the same figures everywhere."""

from __future__ import annotations

import json

import pytest
import torch

import hf_saguaro
from hf_saguaro import SaguaroConfig
from hf_saguaro.generation import theory

from ..conftest import VOCAB


MODES = {
    "async": dict(num_assistant_tokens=3, fan_out=2, execution="async", backup="draft"),
    "async, no backup": dict(num_assistant_tokens=3, fan_out=2, execution="async", backup="none"),
    "async, copies": dict(num_assistant_tokens=3, fan_out=2, execution="async", backup="prompt_lookup"),
    "sync": dict(num_assistant_tokens=3, execution="sync"),
    "alone": dict(execution="autoregressive"),
    "auto": {},
}


def run(target, draft, ids, config, tokens=30, **kwargs):
    out = target.generate(ids, max_new_tokens=tokens, do_sample=False, assistant_model=draft, return_dict_in_generate=True,
                          speculation=SaguaroConfig(**config), **kwargs)  # fmt: skip
    return out, out.saguaro


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("draft", ["fair", "constant"])
@pytest.mark.parametrize("rows", [1, 3])
def test_identities(target, drafts, prompt, mode, draft, rows):
    ids = torch.randint(2, VOCAB, (rows, 7), generator=torch.Generator().manual_seed(1))
    out, stats = run(target, drafts[draft], ids, MODES[mode], attention_mask=torch.ones_like(ids))
    assert stats is hf_saguaro.last_stats(target)
    assert stats.rounds == stats.cache_hits + stats.cache_misses
    assert stats.new_tokens == out.sequences.shape[1] * rows - ids.numel()
    # The token that the prefill gives belongs to no round.
    assert stats.tokens_in_rounds == stats.new_tokens - rows
    assert sum(stats.accepted_by_depth) == stats.row_rounds
    assert stats.accepted_tokens == sum(k * count for k, count in enumerate(stats.accepted_by_depth))
    assert all(hits <= count for hits, count in zip(stats.hits_by_depth, stats.accepted_by_depth))
    assert stats.accepted_tokens <= stats.drafted_tokens
    # Every row-round emits what it accepted and one token more; where a limit cuts it, that one may be missing.
    assert stats.tokens_in_rounds <= stats.accepted_tokens + stats.row_rounds <= stats.tokens_in_rounds + rows
    assert stats.tokens_per_round == stats.tokens_in_rounds / stats.rounds
    assert stats.hit_rate == stats.cache_hits / stats.rounds
    assert stats.mean_accepted == stats.accepted_tokens / stats.rounds
    assert sum(stats.rounds_by_execution.values()) == stats.rounds
    assert stats.draft_failure is None and stats.adapter_version is None
    spent = stats.prefill_seconds + stats.decode_seconds
    assert 0 < stats.verify_seconds <= stats.decode_seconds and spent <= stats.total_seconds


def test_what_ran_is_named(target, drafts, prompt):
    named = {mode: run(target, drafts["fair"], prompt, config)[1] for mode, config in MODES.items()}
    assert [named[mode].execution for mode in ("async", "sync", "alone")] == ["async", "sync", "autoregressive"]
    assert [named[mode].backup for mode in ("async", "async, copies", "async, no backup")] == [
        "draft", "prompt_lookup", "none"
    ]  # fmt: skip
    assert named["alone"].drafted_tokens == named["alone"].accepted_tokens == named["alone"].draft_seconds == 0
    assert named["sync"].cache_hits == 0


def test_the_prediction_is_theorem_7_on_the_measured_figures(target, drafts, prompt):
    _, stats = run(target, drafts["fair"], prompt, MODES["async"], tokens=60)
    assert 0 < stats.cache_hits < stats.rounds
    verify = stats.verify_seconds / stats.rounds
    expected = theory.ssd_speedup(
        stats.hit_rate,
        stats.tokens_per_round_on_hit,
        stats.tokens_per_round_on_miss,
        stats.primary_seconds / verify / stats.cache_hits,
        stats.backup_seconds / verify / stats.cache_misses,
    )
    assert stats.predicted_speedup == pytest.approx(expected)
    assert stats.measured_speedup == pytest.approx(stats.tokens_in_rounds * verify / stats.decode_seconds)


def test_a_report_for_machines_and_one_for_people(target, drafts, prompt):
    _, stats = run(target, drafts["fair"], prompt, MODES["async"])
    told = json.loads(json.dumps(stats.to_dict()))
    for name in ("rounds", "new_tokens", "hit_rate", "mean_accepted", "tokens_per_round", "tokens_per_round_on_hit",
                 "tokens_per_round_on_miss", "predicted_speedup", "execution", "backup", "accepted_by_depth"):  # fmt: skip
        assert told[name] == getattr(stats, name)
    assert f"{stats.new_tokens} tokens" in str(stats) and f"{stats.rounds} rounds (async" in str(stats)


def test_no_run_no_stats(drafts):
    assert hf_saguaro.last_stats(torch.nn.Linear(2, 2)) is None


def test_a_text_without_rounds(target, drafts, prompt):
    """One token comes with the prefill."""
    _, stats = run(target, drafts["good"], prompt, MODES["async"], tokens=1)
    assert stats.new_tokens == 1 and stats.rounds == 0
    assert stats.hit_rate == stats.mean_accepted == stats.tokens_per_round == 0.0
    assert stats.predicted_speedup is None and str(stats)
