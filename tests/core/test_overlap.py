# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""What overlap is worth, on a simulated accelerator: forwards that take a set time without using this machine's cores.

Both models sleep, as a host does while a device works, and give their true scores. So the schedule is the only thing
that is timed, and Theorem 7 must come true.
"""

from __future__ import annotations

import copy
import functools
import time

import pytest
import torch

import hf_saguaro
from hf_saguaro import SaguaroConfig
from hf_saguaro.generation import theory

from ..conftest import perturbed, tiny_llama


pytestmark = pytest.mark.timed


def taking(model, seconds):
    """A copy of `model` whose forwards take `seconds`."""
    model = copy.deepcopy(model)
    stock = model.forward

    @functools.wraps(stock)
    def forward(*args, **kwargs):
        due = time.perf_counter() + seconds
        out = stock(*args, **kwargs)
        time.sleep(max(due - time.perf_counter(), 0))
        return out

    model.forward = forward
    return model


@pytest.fixture(scope="module")
def pair():
    target = tiny_llama(0)
    return target, perturbed(target, 0.12)


PROMPT = torch.arange(3, 10)[None]
VERIFY, VERIFY_OF_PERFECT = 0.1, 0.15


def run(pair, draft_seconds, tokens=40, verify=VERIFY, **fields):
    target, draft = taking(pair[0], verify), taking(pair[1], draft_seconds)
    target.generate(PROMPT, max_new_tokens=tokens, do_sample=False, assistant_model=draft,
                    speculation=SaguaroConfig(**fields))  # fmt: skip
    return hf_saguaro.last_stats(target)


@pytest.mark.parametrize("k, primary", [(2, 1.0), (4, 0.5), (4, 1.0)])
def test_measured_speed_is_theorem_7s(pair, k, primary):
    stats = run(pair, primary * VERIFY / (k + 1), num_assistant_tokens=k, fan_out=3, execution="async", backup="draft")
    assert stats.measured_speedup >= 0.9 * stats.predicted_speedup


@pytest.mark.slow
@pytest.mark.parametrize("fan_out", [1, 3])
@pytest.mark.parametrize("k", [2, 4, 7])
@pytest.mark.parametrize("primary", [0.25, 0.5, 1.0, 2.0])
def test_measured_speed_is_theorem_7s_everywhere(pair, k, primary, fan_out):
    stats = run(pair, primary * VERIFY / (k + 1), num_assistant_tokens=k, fan_out=fan_out, execution="async",
                backup="draft")  # fmt: skip
    assert stats.measured_speedup >= 0.9 * stats.predicted_speedup


def test_overlap_wins_what_the_formula_says(pair):
    k, draft_seconds = 3, VERIFY / 4
    run_async = run(
        pair, draft_seconds, num_assistant_tokens=k, fan_out=5, execution="async", backup="draft", tokens=60
    )
    run_sync = run(pair, draft_seconds, num_assistant_tokens=k, execution="sync", tokens=60)

    def seconds_per_token(stats):
        return stats.decode_seconds / stats.tokens_in_rounds

    measured = seconds_per_token(run_sync) / seconds_per_token(run_async)
    t, t_p = k * draft_seconds / VERIFY, (k + 1) * draft_seconds / VERIFY
    formula = theory.async_over_sync(run_async.hit_rate, t, t_p)
    tokens = run_async.tokens_per_round / run_sync.tokens_per_round
    assert measured == pytest.approx(formula * tokens, rel=0.1)
    assert measured > 1.1


def test_a_draft_ten_times_slower_never_holds_a_round_up_for_longer_than_a_pass(pair):
    verify, draft = 0.02, 0.2
    stats = run(pair, draft, verify=verify, tokens=12, num_assistant_tokens=4, fan_out=2, execution="async")
    decoding = stats.decode_seconds
    # The first chain is drafted before anything is known of the draft's cost: one pass more.
    assert decoding < stats.rounds * 1.15 * (verify + draft) + 2 * draft


def test_a_useless_draft_costs_little(pair):
    """The floor: within 5% of decoding without a draft over 256 tokens, whatever the draft costs."""
    target = pair[0]
    useless = tiny_llama(9)
    plain, with_draft = [], []
    for _ in range(2):  # a busy moment of this machine only ever adds to a time
        plain.append(run((target, useless), 0.0, tokens=256, verify=0.02, execution="autoregressive").decode_seconds)
        with_draft.append(run((target, useless), 0.004, tokens=256, verify=0.02).decode_seconds)
    assert min(with_draft) < 1.05 * min(plain)


@pytest.fixture
def two_threads():
    """The default considers overlap only where there are two threads to share."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def test_a_perfect_draft_is_nearly_ideal(pair, two_threads):
    """A free and perfect draft: K + 1 tokens a verify, but for the first steps, which measure."""
    target = pair[0]
    stats = run((target, copy.deepcopy(target)), 0.0, tokens=256, verify=VERIFY_OF_PERFECT, num_assistant_tokens=8)
    # A draft on this machine is nearly free only while the machine is idle: what the target waited for it is left out.
    free = stats.decode_seconds - stats.wait_seconds
    assert stats.tokens_in_rounds * VERIFY_OF_PERFECT / free >= 0.9 * 9


def test_auto_finds_what_pays(pair, two_threads):
    """A cheap, good draft beside an accelerator: the default is clearly faster than plain decoding."""
    stats = run((pair[0], perturbed(pair[0], 0.03)), 0.015, tokens=150, verify=0.1)
    assert stats.measured_speedup > 1.3
