# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Keyed noise: published Philox words, the documented layout, the law, and the same numbers from the kernel."""

import pytest
import torch
from scipy import stats

from hf_saguaro import kernels
from hf_saguaro.kernels import reference


ROWS = torch.tensor([0, 3, 2**31 + 7])
POSITIONS = torch.tensor([5, 2**31, 0])
# Known answers of Philox 4x32-10 from the Random123 distribution: counter, key, output words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox_words(counter, key):
    """Philox 4x32-10 on Python integers, which know no overflow."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        low, high = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & 0xFFFFFFFF, (low >> 32) ^ c3 ^ k1, low & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def documented_uniform(seed, row, position, token):
    key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    run, place = divmod(token, 1024)
    lane, block = divmod(place, 256)
    word = philox_words((run * 256 + block, position & 0xFFFFFFFF, row & 0xFFFFFFFF, 0), key)[lane]
    return ((word >> 9) + 0.5) / 2**23


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_gives_the_published_words(counter, key, words):
    tensors = tuple(torch.tensor([word]) for word in counter)
    assert tuple(int(word) & 0xFFFFFFFF for word in reference.philox_4x32(tensors, key)) == words
    assert philox_words(counter, key) == words


@pytest.mark.parametrize("seed", [0, 12345, -1, 2**63 + 17, -(2**40) - 3])
def test_every_token_has_the_number_that_the_layout_says(any_device, seed):
    uniforms = kernels.keyed_uniform(seed, ROWS.to(any_device), POSITIONS.to(any_device), 2100).cpu()
    for token in (0, 1, 255, 256, 511, 512, 1023, 1024, 1300, 2047, 2048, 2099):
        for index, (row, position) in enumerate(zip(ROWS.tolist(), POSITIONS.tolist())):
            assert uniforms[index, token].item() == documented_uniform(seed, row, position, token)


def test_seeds_count_modulo_two_to_the_64(any_device):
    def noise(seed):
        return kernels.keyed_uniform(seed, ROWS.to(any_device), POSITIONS.to(any_device), 50)

    assert noise(-5).equal(noise(2**64 - 5)) and noise(7).equal(noise(2**64 + 7))
    assert not noise(7).equal(noise(2**32 + 7)), "the upper half of the seed must count"


def test_noise_depends_on_its_own_row_position_and_token_only(any_device):
    rows, positions = torch.tensor([0, 1, 1]), torch.tensor([9, 9, 10])
    together = kernels.keyed_gumbel(3, rows.to(any_device), positions.to(any_device), 3000)
    alone = kernels.keyed_gumbel(3, rows[2:].to(any_device), positions[2:].to(any_device), 1030)
    assert together[2, :1030].equal(alone[0]), "batch neighbours and the size of the vocabulary must not matter"
    for first in range(3):
        for second in range(first):
            assert not together[first].eq(together[second]).any(), "rows and positions must differ everywhere"
    assert together[0].unique().numel() > 2990


def test_no_rows_give_no_noise(any_device):
    none = torch.empty(0, dtype=torch.int64, device=any_device)
    assert kernels.keyed_uniform(1, none, none, 7).shape == (0, 7)


def test_uniforms_never_reach_zero_or_one(monkeypatch):
    extremes = torch.tensor([[0, 0xFFFFFFFF]]).repeat(1, 128)
    monkeypatch.setattr(reference, "philox_4x32", lambda counter, key: (extremes,) * 4)
    uniforms = reference.keyed_uniform(0, torch.tensor([0]), torch.tensor([0]), 1024)
    assert uniforms.min() == 2**-24 and uniforms.max() == 1 - 2**-24
    noise = reference.keyed_gumbel(0, torch.tensor([0]), torch.tensor([0]), 1024)
    assert noise.isfinite().all() and -3 < noise.min() < -2.8 and 16 < noise.max() < 17


def test_noise_has_the_law_of_its_name(fast_device):
    rows = torch.arange(20, device=fast_device)
    uniforms = kernels.keyed_uniform(11, rows, rows * 3, 8192).cpu().double()
    noise = kernels.keyed_gumbel(11, rows, rows * 3, 8192).cpu().double()
    assert stats.kstest(uniforms.flatten().numpy(), "uniform").pvalue > 0.01
    assert stats.kstest(noise.flatten().numpy(), "gumbel_r").pvalue > 0.01
    # Rows, and the four lanes of a block, are as good as independent: 4.5 standard deviations for all pairs.
    assert torch.corrcoef(uniforms).fill_diagonal_(0).abs().max() < 4.5 / 8192**0.5
    lanes = uniforms.view(20, 8, 4, 256).transpose(1, 2).reshape(20, 4, -1).transpose(0, 1).reshape(4, -1)
    assert torch.corrcoef(lanes).fill_diagonal_(0).abs().max() < 4.5 / lanes.shape[1] ** 0.5


def test_residual_noise_is_another_stream_than_the_draft_can_see():
    seeds = torch.tensor([42])
    seen = reference.keyed_uniform(42, torch.tensor([0]), torch.tensor([0]), 4096)
    unseen = reference.residual_exponential(seeds, 4096).neg().exp()
    assert torch.corrcoef(torch.cat([seen, unseen]))[0, 1].abs() < 4.5 / 4096**0.5


@pytest.mark.parametrize("vocab_size", [1, 97, 1023, 4097, 32_000])
def test_kernel_makes_the_numbers_of_the_reference(triton_device, vocab_size):
    rows, positions = ROWS.to(triton_device), POSITIONS.to(triton_device)
    uniforms = kernels.keyed_uniform(2**50 + 1, rows, positions, vocab_size)
    assert uniforms.cpu().equal(reference.keyed_uniform(2**50 + 1, ROWS, POSITIONS, vocab_size))
    noise = kernels.keyed_gumbel(2**50 + 1, rows, positions, vocab_size).cpu()
    expected = reference.keyed_gumbel(2**50 + 1, ROWS, POSITIONS, vocab_size)
    torch.testing.assert_close(noise, expected, atol=1e-6, rtol=2e-7)
    assert noise.argmax(-1).equal(expected.argmax(-1))


def test_kernel_reads_strided_rows_and_positions(triton_device):
    rows = torch.arange(6, device=triton_device)[::2]
    positions = torch.arange(12, device=triton_device)[::4]
    expected = reference.keyed_uniform(4, rows.cpu(), positions.cpu(), 300)
    assert kernels.keyed_uniform(4, rows, positions, 300).cpu().equal(expected)
