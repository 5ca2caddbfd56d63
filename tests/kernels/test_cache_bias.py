# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Saguaro sampling: the biased law, the q that goes with the drawn token, and what it does to acceptance."""

import pytest
import torch
from scipy import stats

from hf_saguaro import kernels
from hf_saguaro.kernels import reference


def draw(device, scores, fan_out, bias, noise=None):
    noise = torch.zeros(scores.shape) if noise is None else noise
    tokens, log_q, log_q_token = kernels.biased_draw(scores.to(device), fan_out, bias, noise.to(device))
    assert tokens.dtype == torch.int64 and log_q.dtype == log_q_token.dtype == torch.float32
    return tokens.cpu(), log_q.cpu(), log_q_token.cpu()


# p, q and F of a worked example: C, the biased q, the acceptance sum(min(p, q_C)), the residual's share on the top 2.
P = torch.tensor([0.4, 0.2, 0.3, 0.1])
Q = torch.tensor([0.5, 0.3, 0.15, 0.05])
TABLE = [
    (1.0, [0.5, 0.3, 0.15, 0.05], 0.800, 0.0),
    (0.75, [0.4688, 0.2812, 0.1875, 0.0625], 0.850, 0.0),
    (0.5, [0.4167, 0.25, 0.25, 0.0833], 0.933, 0.0),
    (0.35, [0.3646, 0.2188, 0.3125, 0.1042], 0.965, 1.0),
    (0.25, [0.3125, 0.1875, 0.375, 0.125], 0.900, 1.0),
    (1e-9, [0.0, 0.0, 0.75, 0.25], 0.400, 1.0),
]


@pytest.mark.parametrize(("bias", "biased", "acceptance", "share"), TABLE)
def test_the_worked_example(any_device, bias, biased, acceptance, share):
    q = draw(any_device, Q.log()[None], 2, bias)[1][0].exp()
    torch.testing.assert_close(q, torch.tensor(biased), atol=6e-5, rtol=0)
    torch.testing.assert_close(torch.minimum(P, q).sum().item(), acceptance, atol=6e-4, rtol=0)
    residual = (P - q).clamp(min=0)
    residual[residual < 1e-6] = 0
    torch.testing.assert_close((residual[:2].sum() / residual.sum()).item(), share, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("fan_out", "bias"), [(0, 0.3), (3, 1.0), (10, 0.3), (12, 0.3)])
def test_no_bias_is_the_softmax(any_device, generator, fan_out, bias):
    """Also when every token is biased, which renormalising undoes."""
    scores = torch.randn(2, 10, generator=generator)
    torch.testing.assert_close(draw(any_device, scores, fan_out, bias)[1], scores.log_softmax(-1), atol=1e-6, rtol=1e-6)


def test_ties_for_the_last_biased_place_go_to_the_lowest_token(any_device):
    scores = torch.zeros(1, 5000)
    scores[0, 40] = 1.0
    log_q = draw(any_device, scores, 3, 0.5)[1][0]
    torch.testing.assert_close((log_q[[0, 1]] - log_q[2]).exp(), torch.tensor([0.5, 0.5]))
    assert (log_q[2:40] == log_q[4999]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_q_is_normalised_and_belongs_to_the_token(any_device, generator, dtype):
    scores = (torch.randn(3, 5003, generator=generator) * 4).to(dtype)
    scores[1, 100:] = -torch.inf
    noise = reference.keyed_gumbel(3, torch.arange(3), torch.arange(3), 5003)
    tokens, log_q, log_q_token = draw(any_device, scores, 4, 0.3, noise)
    torch.testing.assert_close(log_q.double().exp().sum(-1), torch.ones(3, dtype=torch.float64), atol=1e-5, rtol=0)
    assert log_q.gather(1, tokens[:, None])[:, 0].equal(log_q_token)
    assert tokens.equal((log_q + noise).argmax(-1)) and log_q_token.isfinite().all()
    assert (log_q[1, 100:] == -torch.inf).all()


def test_tokens_are_drawn_from_q(fast_device):
    draws = 40_000
    scores = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.9, -torch.inf])
    rows = torch.arange(draws)
    noise = reference.keyed_gumbel(5, rows, rows % 3, 6)
    tokens, log_q, _ = draw(fast_device, scores.expand(draws, 6), 2, 0.25, noise)
    counts, wanted = tokens.bincount(minlength=6).double(), log_q[0].double().softmax(0) * draws
    assert counts[5] == 0
    assert stats.chisquare(counts[:5].numpy(), wanted[:5].numpy()).pvalue > 0.01
    unbiased = scores.double().softmax(0)[:5] * draws
    assert stats.chisquare(counts[:5].numpy(), unbiased.numpy()).pvalue < 1e-6, "the test has no power"


# Log-probabilities are compared with 2e-6 in every dtype: scores are converted to float32 first.
@pytest.mark.parametrize(
    ("rows", "vocab_size", "dtype", "fan_out"),
    [
        (1, 97, torch.float32, 1),
        (5, 1031, torch.bfloat16, 4),
        (1, 8200, torch.float16, 40),
        (1, 128_256, torch.bfloat16, 5),
        (2, 700, torch.float32, 300),
    ],
)
def test_kernel_equals_the_reference(triton_device, generator, rows, vocab_size, dtype, fan_out):
    scores = (torch.randn(rows, vocab_size, generator=generator) * 3).to(dtype)
    noise = reference.keyed_gumbel(1, torch.arange(rows), torch.arange(rows), vocab_size)
    tokens, log_q, log_q_token = draw(triton_device, scores, fan_out, 0.4, noise)
    expected = reference.biased_draw(scores, fan_out, 0.4, noise)
    assert tokens.equal(expected[0])
    torch.testing.assert_close(log_q, expected[1], atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(log_q_token, expected[2], atol=2e-6, rtol=1e-6)


def test_kernel_reads_any_strides(triton_device, generator):
    scores = torch.randn(5000, 6, generator=generator).T[::2]
    noise = torch.randn(3, 10_000, generator=generator)[:, ::2]
    tokens, log_q, _ = draw(triton_device, scores, 3, 0.5, noise)
    expected = reference.biased_draw(scores, 3, 0.5, noise)
    assert tokens.equal(expected[0])
    torch.testing.assert_close(log_q, expected[1], atol=2e-6, rtol=1e-6)
