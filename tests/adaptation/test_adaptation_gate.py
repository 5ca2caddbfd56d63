# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Bad candidates do not serve, what slips through is taken back, and the history says why."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from toy_serving import MarkovTarget, random_prompts, serve, teach

from hf_saguaro.adaptation.gate import (
    AcceptanceRate,
    Canary,
    Candidate,
    StaticFloor,
    Verdict,
    paired_t,
    student_quantile,
)


@pytest.fixture
def learned(make_adapter):
    """An adapter that has learned and published, and the target it learned from."""
    target, adapter = MarkovTarget(), make_adapter()
    for part in range(3):
        teach(adapter, target, random_prompts(24, seed=part))
        assert adapter.flush(60)
    assert adapter.version >= 1, adapter.history()
    return adapter, target


def candidate_like(adapter, change):
    loop = adapter._trainer.loop
    matrices = {
        name: tuple(change(matrix.clone()) for matrix in pair)
        for name, pair in adapter._publisher.adapter_of(adapter.version).items()
    }
    return Candidate(matrices, adapter.version, loop.base(), step=0, origin="sabotage")


def noise(matrix):
    return torch.randn(matrix.shape, generator=torch.Generator().manual_seed(1)) * 0.05


def one_nan(matrix):
    matrix.view(-1)[0] = torch.nan
    return matrix


SABOTAGE = {
    "nan": (one_nan, "not finite"),
    "infinite": (lambda matrix: matrix + torch.inf, "not finite"),
    "blown up": (lambda matrix: matrix * 30, "change too large"),
    "noise": (noise, "worse than"),
    "zero": (torch.zeros_like, "no better than what serves"),
    "wrong shape": (lambda matrix: matrix[:, :-1], "wrong shape"),
}


@pytest.mark.parametrize("kind", SABOTAGE)
def test_sabotaged_candidates_are_refused(learned, kind):
    adapter, _ = learned
    change, reason = SABOTAGE[kind]
    served = [weight.clone() for weight in adapter._weights.serving]
    version = adapter.version
    assert not adapter._trainer.loop.nominate(candidate_like(adapter, change)).passed
    assert adapter.flush(60) and adapter.version == version
    refusal = next(event for event in adapter.history()[::-1] if event.get("origin") == "sabotage")
    assert refusal["event"] == "refused"
    if kind == "noise":  # whichever of the two it falls behind first
        assert refusal["reason"] in ("worse than the bare draft", "no better than what serves")
    else:
        assert refusal["reason"] == reason
    assert all(torch.equal(now, before) for now, before in zip(adapter._weights.serving, served))


def test_sign_flip_is_refused(learned):
    adapter, _ = learned
    flipped = candidate_like(adapter, lambda matrix: matrix)
    flipped = dataclasses.replace(flipped, adapter={name: (a, -b) for name, (a, b) in flipped.adapter.items()})
    assert not adapter._trainer.loop.nominate(flipped).passed
    assert adapter.history()[-1]["gain_over_serving"] < 0


@pytest.mark.parametrize(
    ("field", "value", "reason"), [("parent", 77, "stale parent"), ("base", "another draft", "wrong base")]
)
def test_strangers_are_refused(learned, field, value, reason):
    adapter, _ = learned
    candidate = dataclasses.replace(candidate_like(adapter, lambda matrix: matrix), **{field: value})
    assert not adapter._trainer.loop.nominate(candidate).passed
    assert adapter.history()[-1]["event"] == "refused" and adapter.history()[-1]["reason"] == reason


def test_candidate_that_waited_while_its_parent_was_replaced_is_refused(learned):
    adapter, _ = learned
    publisher, version = adapter._publisher, adapter.version
    candidate = candidate_like(adapter, lambda matrix: matrix)
    publisher.stage_candidate(candidate, Verdict(True, "slipped through"))
    publisher.apply()
    assert adapter.version == version + 1
    publisher.stage_candidate(candidate, Verdict(True, "slipped through"))
    publisher.apply()
    assert adapter.version == version + 1 and adapter.history()[-1]["reason"] == "stale parent"


def test_what_slips_through_is_rolled_back_within_160_rounds(learned):
    adapter, target = learned
    serve(adapter, adapter.draft, target, random_prompts(12, seed=50))  # live rounds: the canary's reference
    good = [weight.clone() for weight in adapter._weights.serving]
    version, before = adapter.version, adapter._publisher.rounds
    adapter._publisher.stage_candidate(candidate_like(adapter, noise), Verdict(True, "slipped through"))
    serve(adapter, adapter.draft, target, random_prompts(14, seed=51))

    events = {event["event"]: event for event in adapter.history()}
    assert events["rolled back"]["reason"] == "accepts less than before"
    assert events["rolled back"]["rate"] < events["rolled back"]["reference"]
    assert events["rolled back"]["round"] - before <= 160
    assert adapter.version == version
    assert all(torch.equal(now, then) for now, then in zip(adapter._weights.serving, good))
    assert adapter.metrics()["rolled_back"] == 1

    # The learner starts over from what serves, at half the rate.
    assert adapter.flush(60)
    assert adapter.metrics()["learning_rate"] == pytest.approx(adapter.config.learning_rate / 2)


def test_rollback_can_be_switched_off(make_adapter):
    adapter, target = make_adapter(rollback=False), MarkovTarget()
    teach(adapter, target, random_prompts(40))
    adapter._publisher.stage_candidate(
        Candidate(adapter._trainer.loop.learner.student.snapshot(), 0, adapter._trainer.loop.base(), 0),
        Verdict(True, ""),
    )
    serve(adapter, adapter.draft, target, random_prompts(2))
    assert adapter.version == 1 and adapter._publisher._canary is None


def test_no_validation_publishes_without_held_out_text(make_adapter):
    adapter = make_adapter(validate=False)
    teach(adapter, MarkovTarget(), random_prompts(4))
    assert adapter.flush(60) and adapter.version == 1
    assert adapter.history()[-1]["reason"] == "sane"


def test_every_publication_beat_what_served_before_on_held_out_text(learned):
    adapter, _ = learned
    for event in adapter.history():
        if event["event"] == "published":
            assert event["accepted_candidate"] > event["accepted_serving"]
            assert event["accepted_candidate"] >= event["accepted_bare"]
            assert event["t"] >= event["t_required"] and event["sequences"] >= 4
    json.dumps(adapter.history(), allow_nan=False)
    json.dumps(adapter.metrics(), allow_nan=False)


def test_trying_again_and_again_raises_the_bar(learned):
    adapter, _ = learned
    gate = adapter._trainer.loop.gate
    serving = adapter._publisher.adapter_of(adapter.version)
    required = [
        gate.examine(serving, adapter.version, serving, adapter._buffer.validation()).figures["t_required"]
        for _ in range(4)
    ]
    assert required == sorted(required) and len(set(required)) == 4


def test_floor_serves_the_bare_draft_and_returns():
    floor = StaticFloor()
    assert floor.judge(serves_bare=False) is None  # nothing seen
    for extra in (2, 3, 2, 3):
        floor.saw(number=0, rows=64, bare_rounds=30, adapter_rounds=30 + extra)
    assert not floor.judge(serves_bare=False).passed
    assert floor.judge(serves_bare=True) is None
    for extra in (5, 6, 5, 6, 5, 6, 5, 6):
        floor.saw(number=0, rows=64, bare_rounds=30, adapter_rounds=30 - extra)
    assert floor.judge(serves_bare=True).passed
    assert floor.judge(serves_bare=False) is None


def test_canary_forgives_noise_and_finds_a_drop():
    def rounds(rate, count, generator):
        for _ in range(count):
            accepted = 0
            while accepted < 4 and float(torch.rand((), generator=generator)) < rate:
                accepted += 1
            yield accepted

    false_alarms = missed = 0
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        reference = AcceptanceRate(200)
        for accepted in rounds(0.6, 300, generator):
            reference.saw(4, accepted)
        for rate in (0.6, 0.25):
            canary, verdict = Canary(reference), None
            for accepted in rounds(rate, 160, generator):
                verdict = canary.saw(4, accepted)
                if verdict is not None:
                    break
            false_alarms += rate == 0.6 and not verdict.passed
            missed += rate == 0.25 and verdict.passed
    assert missed == 0 and false_alarms <= 2


def test_rate_does_not_move_with_the_length_of_the_chains():
    generator = torch.Generator().manual_seed(0)
    rates = []
    for k in (1, 6):
        rate = AcceptanceRate(10_000)
        for _ in range(3000):
            accepted = 0
            while accepted < k and float(torch.rand((), generator=generator)) < 0.5:
                accepted += 1
            rate.saw(k, accepted)
        rates.append(rate.rate)
    assert rates[0] == pytest.approx(rates[1], abs=0.04)


def test_quantile_is_students():
    stats = pytest.importorskip("scipy.stats")
    for freedom in (5, 11, 47):
        for probability in (0.975, 0.995, 0.9995):
            assert student_quantile(probability, freedom) == pytest.approx(stats.t.ppf(probability, freedom), rel=0.12)
    differences = [1.0, 2.0, 0.5, -0.25]
    assert paired_t(differences) == pytest.approx(stats.ttest_1samp(differences, 0).statistic)
