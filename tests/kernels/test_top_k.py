# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Top-k with residual: the k best log-probabilities, and the log of all the mass beside them."""

import pytest
import torch

from hf_saguaro import kernels
from hf_saguaro.kernels import reference


def top_k(device, scores, k):
    log_probs, token_ids, log_residual = kernels.top_k_with_residual(scores.to(device), k)
    assert log_probs.dtype == log_residual.dtype == torch.float32 and token_ids.dtype == torch.int64
    assert log_probs.shape == token_ids.shape == (scores.shape[0], k) and log_residual.shape == scores.shape[:1]
    return log_probs.cpu(), token_ids.cpu(), log_residual.cpu()


# The truth is computed in float64. Tolerance 3e-6 in every dtype: the kernels convert to float32 first.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocab_size", "k"), [(1, 1, 1), (4, 97, 5), (2, 9001, 24), (1, 500, 500)])
def test_log_probabilities_and_residual(any_device, generator, rows, vocab_size, k, dtype):
    scores = (torch.randn(rows, vocab_size, generator=generator) * 3).to(dtype)
    log_probs, token_ids, log_residual = top_k(any_device, scores, k)
    truth = scores.double().log_softmax(-1)
    order = truth.sort(dim=-1, descending=True, stable=True)
    assert token_ids.equal(order.indices[:, :k])
    torch.testing.assert_close(log_probs.double(), order.values[:, :k], atol=3e-6, rtol=1e-6)
    torch.testing.assert_close(log_residual.double(), order.values[:, k:].logsumexp(-1), atol=3e-6, rtol=1e-6)


def test_a_tiny_residual_keeps_its_digits(any_device):
    scores = torch.zeros(1, 9000)
    scores[0, :2] = 40.0
    log_residual = top_k(any_device, scores, 2)[2]
    expected = torch.tensor(8998.0).log() - 40 - torch.tensor(2.0).log()
    torch.testing.assert_close(log_residual, expected[None], atol=1e-5, rtol=0)


def test_nothing_is_left_beside_all_that_is_possible(any_device):
    scores = torch.full((2, 5000), -torch.inf)
    scores[0, [7, 4500]] = 0.0
    scores[1, 3] = 2.0
    log_probs, token_ids, log_residual = top_k(any_device, scores, 3)
    half = torch.tensor(0.5).log().item()
    torch.testing.assert_close(log_probs, torch.tensor([[half, half, -torch.inf], [0, -torch.inf, -torch.inf]]))
    assert token_ids.tolist() == [[7, 4500, 0], [3, 0, 1]]
    assert log_residual.tolist() == [-torch.inf, -torch.inf]


def test_equal_scores_come_by_rising_token(any_device):
    scores = torch.zeros(1, 9000)
    scores[0, [8999, 5000, 4000]] = 1.0
    scores[0, 0] = -0.0
    assert top_k(any_device, scores, 6)[1].tolist() == [[4000, 5000, 8999, 0, 1, 2]]


@pytest.mark.parametrize(("vocab_size", "k", "dtype"), [(49_152, 32, torch.bfloat16), (262_144, 3, torch.float32)])
def test_kernel_equals_the_reference_on_large_vocabularies(triton_device, generator, vocab_size, k, dtype):
    scores = torch.randn(1, vocab_size, generator=generator).to(dtype)
    results, expected = top_k(triton_device, scores, k), reference.top_k_with_residual(scores, k)
    assert results[1].equal(expected[1])
    torch.testing.assert_close(results[0], expected[0], atol=3e-6, rtol=1e-6)
    torch.testing.assert_close(results[2], expected[2], atol=3e-6, rtol=1e-6)


def test_kernel_reads_any_strides(triton_device, generator):
    scores = torch.randn(5000, 6, generator=generator).T[::2]
    results, expected = top_k(triton_device, scores, 4), reference.top_k_with_residual(scores, 4)
    assert results[1].equal(expected[1])
    torch.testing.assert_close(results[2], expected[2], atol=3e-6, rtol=1e-6)
