# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Fork selection: the best tokens of every depth without the one that was sent."""

import pytest
import torch

from hf_saguaro import kernels
from hf_saguaro.kernels import reference


def select(device, scores, sent, lengths, fan_out):
    sent, lengths = torch.as_tensor(sent), torch.as_tensor(lengths)
    tokens = kernels.select_forks(scores.to(device), sent.to(device), lengths.to(device), fan_out)
    assert tokens.dtype == torch.int64 and tokens.shape == (scores.shape[0], sum(fan_out))
    return tokens.cpu()


def plain_forks(scores, sent, lengths, fan_out):
    """Sorts the tokens of every depth by (score, token) and leaves out the sent one."""
    result = []
    for b, length in enumerate(lengths.tolist()):
        row = []
        for depth, width in enumerate(fan_out):
            order = sorted(range(scores.shape[2]), key=lambda v: (-scores[b, depth, v].item(), v))
            left = [v for v in order if scores[b, depth, v] > -torch.inf]
            if depth < length:
                left = [v for v in left if v != sent[b, depth]]
            left = left if depth <= length else []
            row += left[:width] + [-1] * (width - len(left[:width]))
        result.append(row)
    return torch.tensor(result)


def test_the_sent_token_is_excluded_until_everything_is_accepted(any_device):
    scores = torch.tensor([[[5.0, 4, 3, 2, 1], [1, 5, 4, 3, 2], [3, 2, 5, 4, 1]]])
    assert select(any_device, scores, [[0, 3]], [2], [2, 3, 1]).tolist() == [[1, 2, 1, 2, 4, 2]]


def test_nothing_is_excluded_at_the_rows_own_length_and_nothing_prepared_beyond(any_device):
    scores = torch.tensor([[5.0, 4, 3, 2, 1]]).expand(3, 3, 5)
    forks = select(any_device, scores, [[0, 0]] * 3, [2, 1, 0], [1, 1, 2])
    assert forks.tolist() == [[1, 1, 0, 1], [1, 0, -1, -1], [0, -1, -1, -1]]


def test_depths_may_have_no_fork_and_more_forks_than_tokens(any_device):
    scores = torch.tensor([[[1.0, 2, 3], [3, 2, 1]]])
    assert select(any_device, scores, [[2]], [1], [5, 0]).tolist() == [[1, 0, -1, -1, -1]]
    assert select(any_device, scores, [[2]], [1], [0, 4]).tolist() == [[0, 1, 2, -1]]
    assert select(any_device, scores, [[2]], [1], [0, 0]).shape == (1, 0)


def test_impossible_tokens_are_no_forks(any_device):
    scores = torch.full((1, 2, 5000), -torch.inf)
    scores[0, 0, [4999, 17]] = torch.tensor([1.0, 2.0])
    scores[0, 1, 3] = -1e30
    assert select(any_device, scores, [[17]], [1], [2, 2]).tolist() == [[4999, -1, 3, -1]]


def test_without_a_chain_there_is_one_depth(any_device):
    scores = torch.tensor([[[1.0, 3, 2]]])
    assert select(any_device, scores, torch.empty(1, 0, dtype=torch.int64), [0], [2]).tolist() == [[1, 2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("batch", "depth", "vocab_size"), [(3, 2, 47), (2, 3, 301), (1, 0, 9)])
def test_forks_are_those_of_a_plain_sort(any_device, generator, batch, depth, vocab_size, dtype):
    """Whole numbers tie everywhere, also around the last place, and -0.0 ties with 0.0."""
    scores = torch.randint(-3, 3, (batch, depth + 1, vocab_size), generator=generator).to(dtype)
    scores = torch.where(torch.rand(scores.shape, generator=generator) < 0.1, -scores, scores)
    scores = scores.masked_fill(torch.rand(scores.shape, generator=generator) < 0.2, -torch.inf)
    sent = scores[:, :depth].argmax(-1)
    lengths = torch.randint(0, depth + 1, (batch,), generator=generator)
    lengths[0] = depth
    fan_out = [3, 1, 6, 2][: depth + 1]
    expected = plain_forks(scores, sent, lengths, fan_out)
    assert select(any_device, scores, sent, lengths, fan_out).equal(expected)


def test_many_rows(any_device, generator):
    batch = 64 if any_device == "cuda" else 10
    scores = torch.randn(batch, 2, 33, generator=generator)
    sent, lengths = torch.zeros(batch, 1, dtype=torch.int64), torch.arange(batch) % 2
    assert select(any_device, scores, sent, lengths, [2, 3]).equal(plain_forks(scores, sent, lengths, [2, 3]))


@pytest.mark.parametrize(("vocab_size", "dtype"), [(32_000, torch.bfloat16), (151_936, torch.float32)])
def test_kernel_equals_the_reference_on_large_vocabularies(triton_device, generator, vocab_size, dtype):
    scores = torch.randn(1, 2, vocab_size, generator=generator).to(dtype)
    sent, lengths = scores[:, :1].argmax(-1), torch.tensor([1])
    assert select(triton_device, scores, sent, lengths, [3, 7]).equal(
        reference.select_forks(scores, sent, lengths, [3, 7])
    )


def test_kernel_reads_any_strides(triton_device, generator):
    scores = torch.randn(3, 5000, 4, generator=generator).permute(0, 2, 1)[:, ::2]
    sent = torch.zeros(3, 2, dtype=torch.int64)[:, ::2]
    lengths = torch.tensor([1, 7, 0, 7, 1, 7])[::2]
    assert select(triton_device, scores, sent, lengths, [2, 2]).equal(
        reference.select_forks(scores, sent, lengths, [2, 2])
    )


def test_wider_lists_than_the_kernel_holds(triton_device, generator):
    scores = torch.randn(1, 1, 400, generator=generator)
    sent = torch.empty(1, 0, dtype=torch.int64)
    wanted = scores[0, 0].sort(descending=True, stable=True).indices[:300]
    assert select(triton_device, scores, sent, [0], [300])[0].equal(wanted)
