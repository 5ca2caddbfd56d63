# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Coupled verification: the noised argmax per row, and how many proposals equal it."""

import pytest
import torch
from scipy import stats
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_saguaro import kernels
from hf_saguaro.kernels import reference


DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def random_round(batch, depth, vocab_size, dtype, generator):
    """Scores, proposals of which many are the greedy choice, and ragged lengths with a finished row."""
    scores = (torch.randn(batch, depth + 1, vocab_size, generator=generator) * 3).to(dtype)
    proposals = scores[:, :depth].argmax(-1)
    wrong = torch.rand(batch, depth, generator=generator) < 0.2
    proposals = torch.where(wrong, (proposals + 1) % vocab_size, proposals)
    lengths = torch.randint(0, depth + 1, (batch,), generator=generator)
    lengths[0] = depth
    if batch > 2:
        lengths[1] = 0
    return scores, proposals, lengths


def on(device, *tensors):
    return [tensor.to(device) for tensor in tensors]


def assert_same(results, expected):
    for result, wanted in zip(results, expected):
        assert result.dtype == torch.int64 and result.cpu().equal(wanted)


# --- what it computes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("proposals", "length", "accepted", "token"),
    [
        ([1, 2, 3], 3, 3, 0),  # all accepted: the bonus token
        ([0, 2, 3], 3, 0, 1),  # rejected at once
        ([1, 2, 0], 3, 2, 3),  # rejected at the last
        ([1, 0, 3], 3, 1, 2),  # a later match does not count
        ([1, 2, 3], 2, 2, 3),  # the third is not a proposal
        ([1, 2, 3], 0, 0, 1),  # finished row
    ],
)
def test_accepts_as_far_as_proposals_equal_choices(any_device, proposals, length, accepted, token):
    scores = torch.eye(4)[[1, 2, 3, 0]][None]
    results = kernels.coupled_verification(*on(any_device, scores, torch.tensor([proposals]), torch.tensor([length])))
    assert [result.tolist() for result in results] == [[accepted], [token], [[1, 2, 3, 0]]]


def test_without_proposals_it_chooses_one_token(any_device):
    scores = torch.tensor([[[0.0, 2.0, 1.0]], [[5.0, 2.0, 1.0]]])
    nothing, lengths = torch.empty(2, 0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    accepted, token, choices = kernels.coupled_verification(*on(any_device, scores, nothing, lengths))
    assert (accepted.tolist(), token.tolist(), choices.tolist()) == ([0, 0], [1, 0], [[1], [0]])


def test_choices_are_those_of_a_plain_loop_with_the_same_noise(any_device, generator):
    scores, proposals, lengths = random_round(3, 2, 61, torch.float32, generator)
    rows, positions = torch.tensor([0, 5, 1]), torch.tensor([10, 2, 0])
    _, _, choices = kernels.coupled_verification(
        *on(any_device, scores, proposals, lengths),
        temperature=0.7,
        seed=99,
        rows=rows.to(any_device),
        positions=positions.to(any_device),
    )
    for b in range(3):
        for j in range(3):
            noise = reference.keyed_gumbel(99, rows[b : b + 1], positions[b : b + 1] + j, 61)[0]
            assert choices[b, j].item() == (scores[b, j] / 0.7 + noise).argmax().item()


def test_seed_and_precomputed_noise_are_the_same(any_device, generator):
    scores, proposals, lengths = on(any_device, *random_round(2, 3, 1025, torch.bfloat16, generator))
    rows, positions = on(any_device, torch.tensor([4, 0]), torch.tensor([7, 8]))
    keyed = kernels.coupled_verification(
        scores, proposals, lengths, temperature=1.3, seed=-3, rows=rows, positions=positions
    )
    steps = torch.arange(4, device=any_device)
    noise = kernels.keyed_gumbel(-3, rows.repeat_interleave(4), (positions[:, None] + steps).flatten(), 1025)
    given = kernels.coupled_verification(scores, proposals, lengths, temperature=1.3, noise=noise.view(2, 4, 1025))
    assert all(a.equal(b) for a, b in zip(keyed, given))


def test_no_proposal_can_change_a_choice(any_device, generator):
    scores, proposals, lengths = on(any_device, *random_round(2, 3, 40, torch.float32, generator))
    key = {"seed": 1, "rows": lengths * 0, "positions": lengths * 0}
    choices = kernels.coupled_verification(scores, proposals, lengths, **key)[2]
    assert kernels.coupled_verification(scores, (proposals + 1) % 40, lengths * 0, **key)[2].equal(choices)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_go_to_the_lowest_token(any_device, dtype):
    scores = torch.zeros(1, 4, 9000, dtype=dtype)
    scores[0, 0, [8999, 300, 1500]] = 2.0
    scores[0, 1, [600, 44]] = 2.0
    scores[0, 2] = -torch.inf
    scores[0, 3, :10] = -1.0
    scores[0, 3, 10] = -0.0  # equal to the zeros behind it
    nothing = torch.zeros(1, 3, dtype=torch.int64)
    choices = kernels.coupled_verification(*on(any_device, scores, nothing, torch.tensor([3])))[2]
    assert choices.tolist() == [[300, 44, 0, 10]]


def test_a_token_of_minus_infinity_is_never_chosen(any_device, generator):
    scores = torch.randn(4, 2, 130, generator=generator)
    allowed = torch.rand(4, 2, 130, generator=generator) < 0.05
    allowed[..., 129] = True
    scores = scores.masked_fill(~allowed, -torch.inf)
    key = on(any_device, torch.arange(4), torch.arange(4))
    proposals, lengths = torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, dtype=torch.int64)
    choices = kernels.coupled_verification(
        *on(any_device, scores, proposals, lengths), temperature=5.0, seed=8, rows=key[0], positions=key[1]
    )[2]
    assert allowed.gather(2, choices.cpu()[..., None]).all()


# --- top-k, top-p and min-p -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "filters",
    [{"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05}, {"top_p": 0.3}, {"min_p": 0.5}, {"top_k": 900}],
)
def test_warping_is_that_of_transformers(generator, dtype, filters):
    scores = (torch.randn(6, 500, generator=generator) * 3).to(dtype).float()
    classes = {
        "temperature": TemperatureLogitsWarper, "top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper,
    }  # fmt: skip
    expected = LogitsProcessorList(classes[name](value) for name, value in filters.items())(None, scores)
    assert reference.warp(scores, **filters).equal(expected)


def choices_at(device, scores, seeds, **filters):
    """What is chosen from one row of scores with many seeds."""
    count = len(seeds)
    rows = torch.tensor(seeds, device=device)
    nothing = torch.empty(count, 0, dtype=torch.int64, device=device)
    expanded = torch.tensor(scores, device=device).expand(count, 1, -1)
    tokens = kernels.coupled_verification(expanded, nothing, rows * 0, seed=5, rows=rows, positions=rows, **filters)[1]
    return set(tokens.tolist())


@pytest.mark.parametrize(
    ("scores", "filters", "kept"),
    [
        ([0.0, 0.1, 0.2, 0.3], {"top_k": 2}, {2, 3}),
        ([0.0, 0.0, 0.2, 0.0], {"top_k": 2}, {0, 1, 2, 3}),  # all that tie for the last place stay
        ([0.0, 0.0, 0.0, 0.0], {"top_p": 0.6}, {1, 2, 3}),  # half of them would not do
        ([0.0, 0.0, 0.0, 0.0], {"top_p": 0.5}, {2, 3}),  # of equal ones the lower ids go
        ([0.0, 0.1, 0.2, 0.3], {"top_p": 0.0}, {3}),
        ([0.0, 2.0, 2.0, 1.0], {"min_p": 1.0}, {1, 2}),
        ([0.0, 2.0, 1.9, 1.8], {"min_p": 0.85}, {1, 2}),
        ([0.0, 2.0, 1.9, 1.8], {"min_p": 0.85, "temperature": 0.5}, {1}),  # measured after the temperature
        ([0.0, 0.1, 0.2, 0.3], {"top_k": 2, "top_p": 0.5}, {3}),  # top-p goes by the mass that top-k left
        ([-float("inf"), 0.0, -float("inf"), 0.1], {"top_k": 4, "top_p": 0.99}, {1, 3}),
    ],
)
def test_every_kept_token_and_no_other_is_chosen(any_device, scores, filters, kept):
    assert choices_at(any_device, scores, range(25), **filters) == kept


def test_a_row_of_nothing_chooses_the_first(any_device):
    assert choices_at(any_device, [-float("inf")] * 5, [0, 1], top_k=2, top_p=0.5, min_p=0.1) == {0}


def test_choices_have_the_law_of_the_softmax(fast_device):
    draws = 40_000
    scores = torch.tensor([2.0, 1.0, 0.0, -torch.inf, -1.0, 1.5])
    rows = torch.arange(draws, device=fast_device)
    lengths = torch.zeros_like(rows)
    tokens = kernels.coupled_verification(
        scores.to(fast_device).expand(draws, 1, 6),
        torch.empty(draws, 0, dtype=torch.int64, device=fast_device),
        lengths,
        temperature=0.8,
        seed=123,
        rows=rows,
        positions=rows % 7,
    )[1]
    counts = tokens.cpu().bincount(minlength=6).double()
    wanted = (scores.double() / 0.8).softmax(0) * draws
    assert counts[3] == 0
    possible = wanted > 0
    assert stats.chisquare(counts[possible].numpy(), wanted[possible].numpy()).pvalue > 0.01
    untempered = scores.double().softmax(0)[possible] * draws
    assert stats.chisquare(counts[possible].numpy(), untempered.numpy()).pvalue < 1e-6, "the test has no power"


# --- the kernel and the reference -------------------------------------------------------------------------------------
# Equal in every dtype, with no tolerance: both convert to float32 first and round alike from there.


@pytest.mark.parametrize(
    ("noise", "batch", "depth", "vocab_size", "dtype"),
    [
        ("greedy", 1, 0, 97, torch.float32),
        ("greedy", 2, 16, 257, torch.bfloat16),
        ("greedy", 9, 1, 31, torch.float16),
        ("greedy", 1, 1, 151_936, torch.bfloat16),
        ("keyed", 3, 2, 1031, torch.float32),
        ("keyed", 1, 3, 4097, torch.float16),
        ("keyed", 1, 0, 49_152, torch.bfloat16),
        ("given", 3, 4, 1031, torch.bfloat16),
        ("given", 2, 1, 5000, torch.float32),
        ("given", 1, 0, 262_144, torch.float16),
    ],
)
def test_kernel_equals_the_reference(triton_device, generator, noise, batch, depth, vocab_size, dtype):
    arguments = random_round(batch, depth, vocab_size, dtype, generator)
    options = {}
    if noise == "keyed":
        options = {
            "seed": 2**40 + 9,
            "rows": torch.arange(batch),
            "positions": torch.arange(batch) * 5,
            "temperature": 0.6,
        }
    if noise == "given":
        options = {"noise": torch.randn(batch, depth + 1, vocab_size, generator=generator), "temperature": 2.0}
    moved = {k: v.to(triton_device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    results = kernels.coupled_verification(*on(triton_device, *arguments), **moved)
    assert_same(results, reference.coupled_verification(*arguments, **options))


# Scores in steps of a quarter tie everywhere, also at the ends of what a filter keeps.
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    ("noise", "batch", "depth", "vocab_size", "dtype", "filters"),
    [
        ("keyed", 2, 2, 1031, torch.float32, {"top_k": 50, "top_p": 0.9, "min_p": 0.02, "temperature": 0.8}),
        ("keyed", 3, 1, 5000, torch.bfloat16, {"top_k": 7}),
        ("keyed", 2, 2, 4097, torch.float16, {"top_p": 0.7, "temperature": 1.4}),
        ("keyed", 1, 1, 9000, torch.bfloat16, {"min_p": 0.3}),
        ("keyed", 1, 0, 151_936, torch.bfloat16, {"top_k": 20, "top_p": 0.8}),
        ("keyed", 2, 1, 300, torch.float32, {"top_k": 200, "top_p": 0.5}),
        ("given", 2, 3, 777, torch.float32, {"top_k": 5, "top_p": 0.6, "temperature": 2.0}),
        ("greedy", 2, 3, 777, torch.float32, {"top_k": 1, "top_p": 0.1, "min_p": 1.0}),
        ("keyed", 1, 2, 31, torch.float32, {"top_k": 64, "top_p": 0.0}),
    ],
)
def test_kernel_filters_as_the_reference(
    triton_device, generator, noise, batch, depth, vocab_size, dtype, filters, ties
):
    scores, proposals, lengths = random_round(batch, depth, vocab_size, dtype, generator)
    if ties:
        scores = (scores * 4).round() / 4
    options = dict(filters)
    if noise == "keyed":
        options |= {"seed": 77, "rows": torch.arange(batch), "positions": torch.arange(batch) * 5}
    if noise == "given":
        options |= {"noise": torch.randn(batch, depth + 1, vocab_size, generator=generator)}
    moved = {k: v.to(triton_device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    results = kernels.coupled_verification(*on(triton_device, scores, proposals, lengths), **moved)
    assert_same(results, reference.coupled_verification(scores, proposals, lengths, **options))


def test_kernel_reads_any_strides(triton_device, generator):
    wide = torch.randn(3, 700, 8, generator=generator)
    scores = wide.transpose(1, 2)[:, ::2]  # [3, 4, 700], the vocabulary strided by 8
    noise = torch.randn(4, 3, 1400, generator=generator).transpose(0, 1)[..., ::2]
    proposals = scores.argmax(-1)[:, :3]
    lengths = torch.tensor([3, 9, 1, 9, 2, 9])[::2]
    results = kernels.coupled_verification(
        *on(triton_device, scores, proposals, lengths), noise=noise.to(triton_device)
    )
    assert_same(results, reference.coupled_verification(scores, proposals, lengths, noise=noise))
