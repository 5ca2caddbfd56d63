# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""The shape of the speculation cache: Theorem 12 of arXiv 2603.03251 and its integer version."""

from __future__ import annotations

import itertools

import pytest

from hf_saguaro import SaguaroConfig
from hf_saguaro.generation.acceptance import Proposal
from hf_saguaro.generation.estimates import Estimates
from hf_saguaro.generation.fan_out import accept_length_distribution, allocate, geometric, hit_rate
from hf_saguaro.generation.policy import Policy


# acceptance, exponent, K, budget -> F_0 .. F_K, and the hit rates of that shape and of the uniform one
THEOREM_12 = [
    (0.8, 1.0, 7, 24, [3.90, 3.49, 3.12, 2.79, 2.49, 2.23, 2.00, 3.99], 0.684, 0.667),
    (0.9, 1.0, 7, 24, [2.93, 2.78, 2.64, 2.50, 2.37, 2.25, 2.13, 6.40], 0.720, 0.667),
    (0.6, 1.0, 7, 24, [6.06, 4.70, 3.64, 2.82, 2.18, 1.69, 1.31, 1.60], 0.739, 0.667),
    (0.78, 0.5, 4, 20, [4.36, 3.69, 3.13, 2.65, 6.17], 0.517, 0.500),
]


@pytest.mark.parametrize("acceptance, exponent, k, budget, shape, best, uniform", THEOREM_12)
def test_the_capped_geometric_shape(acceptance, exponent, k, budget, shape, best, uniform):
    rates = [acceptance] * k
    assert geometric(rates, budget, exponent) == pytest.approx(shape, abs=0.006)
    assert hit_rate(rates, shape, exponent) == pytest.approx(best, abs=0.001)
    assert hit_rate(rates, [budget / (k + 1)] * (k + 1), exponent) == pytest.approx(uniform, abs=0.001)


def test_a_backup_that_is_never_right_gets_its_forks_at_the_front():
    shape = geometric([0.05] * 7, 24)
    assert shape[:4] == pytest.approx([18.6, 4.2, 0.9, 0.2], abs=0.06) and max(shape[4:]) < 0.06


def caught(distribution, counts, exponent=1.0):
    """Share of outcomes that `counts` forks catch, where a single fork of a depth already catches half of it, and so on."""
    return sum(p * (2 - f**-exponent) for p, f in zip(distribution, counts) if f)


@pytest.mark.parametrize("rates", [[0.8] * 3, [0.3, 0.9, 0.9], [0.05, 0.5, 0.5], [0.98] * 3])
@pytest.mark.parametrize("budget", [1, 4, 9])
def test_integer_counts_catch_as_much_as_any(rates, budget):
    distribution = accept_length_distribution(rates)
    counts = allocate(rates, budget)
    assert sum(counts) == budget and len(counts) == 4
    every = (split for split in itertools.product(range(budget + 1), repeat=4) if sum(split) == budget)
    assert caught(distribution, counts) == pytest.approx(max(caught(distribution, split) for split in every))


def counts_after(config, acceptances, width):
    """The fan-out that a policy picks for a chain of `width`, after rounds that accepted so many of eight tokens."""
    seen = Estimates()
    for accepted in acceptances:
        seen.saw_chain(8, accepted, [], copied=False)
    proposal = Proposal(tokens=_Width(width), lengths=[width], point_mass=[False])
    return Policy(SaguaroConfig(**config), seen, can_overlap=True).fan_out(proposal)


class _Width:
    def __init__(self, width):
        self.shape = (1, width)


def test_the_shape_follows_what_was_accepted():
    rejected = counts_after({"fan_out": 3}, [0] * 40, 4)
    whole = counts_after({"fan_out": 3}, [8] * 40, 4)
    assert sum(rejected) == sum(whole) == 15
    assert rejected[0] == max(rejected) > 8 and whole[-1] == max(whole) > 8


def test_a_depth_of_its_own_is_measured():
    """Second tokens that always fail: that is where the forks go, and none to lengths that do not happen."""
    counts = counts_after({"fan_out": 3}, [1] * 60, 4)
    assert counts[1] == max(counts) and counts[1] > 2 * counts[0]


def test_copies_have_a_shape_of_their_own():
    drafted = Estimates()
    for _ in range(40):
        drafted.saw_chain(8, 8, [], copied=False)
    policy = Policy(SaguaroConfig(fan_out=3), drafted, can_overlap=True)
    proposals = [Proposal(tokens=_Width(4), lengths=[4], point_mass=[copied]) for copied in (False, True)]
    of_draft, of_copy = map(policy.fan_out, proposals)
    assert of_draft[-1] > of_copy[-1] and of_copy[0] > of_draft[0]


def test_uniform_and_explicit_counts():
    assert counts_after({"fan_out": 2, "fan_out_shape": "uniform"}, [], 3) == [2, 2, 2, 2]
    # The last count is for a chain that was accepted whole, also where the chain is shorter than K.
    config = {"fan_out": [3, 1, 0, 5], "num_assistant_tokens": 3}
    assert counts_after(config, [], 3) == [3, 1, 0, 5]
    assert counts_after(config, [], 1) == [3, 5]
    assert counts_after({"fan_out": 0}, [], 3) == [0, 0, 0, 0]
