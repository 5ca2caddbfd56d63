# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Slot commit: accepted slots move in place, in all layers, ragged over the rows."""

import pytest
import torch

from hf_saguaro import kernels


def caches(device, generator, batch=2, heads=3, slots=9, width=4, layers=2, dtype=torch.float32):
    made = [torch.randn(batch, heads, slots, width, generator=generator).to(dtype) for _ in range(2 * layers)]
    return [cache.to(device) for cache in made]


def moved(cache, source, destination, lengths):
    """What a copy of `cache` looks like after the moves, one at a time and reading the old one only."""
    result = cache.clone()
    for b, length in enumerate(lengths):
        for i in range(length):
            result[b, :, destination[b][i]] = cache[b, :, source[b][i]]
    return result


def commit(device, tensors, source, destination, lengths):
    half = len(tensors) // 2
    arguments = [torch.tensor(numbers, dtype=torch.int64, device=device) for numbers in (source, destination, lengths)]
    assert kernels.commit_slots(tensors[:half], tensors[half:], *arguments) is None


@pytest.mark.parametrize(
    ("source", "destination", "lengths"),
    [
        ([[3, 7, 8], [5, 6, 2]], [[2, 3, 4], [0, 1, 4]], [3, 2]),  # ragged
        ([[3, 4, 5], [5, 4, 3]], [[2, 3, 4], [3, 5, 4]], [3, 3]),  # overlapping, in both directions
        ([[1, 2, 3], [1, 2, 3]], [[1, 2, 3], [7, 7, 7]], [3, 0]),  # already in place; a finished row
        ([[8], [0]], [[0], [8]], [1, 1]),  # the ends
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_move_as_if_all_were_read_first(any_device, generator, source, destination, lengths, dtype):
    tensors = caches(any_device, generator, dtype=dtype)
    expected = [moved(cache, source, destination, lengths) for cache in tensors]
    commit(any_device, tensors, source, destination, lengths)
    assert all(cache.equal(wanted) for cache, wanted in zip(tensors, expected))


def test_layers_may_differ_in_heads_slots_and_width(any_device, generator):
    tensors = caches(any_device, generator, layers=1, heads=1, slots=6, width=24) + caches(
        any_device, generator, layers=1, heads=4, slots=12, width=7
    )
    moves = ([[4, 5], [3, 4]], [[2, 3], [2, 3]], [2, 1])
    expected = [moved(cache, *moves) for cache in tensors]
    commit(any_device, tensors, *moves)
    assert all(cache.equal(wanted) for cache, wanted in zip(tensors, expected))


def test_caches_may_be_views_of_one_storage(any_device, generator):
    storage = torch.randn(2, 2, 10, 3, 4, generator=generator).to(any_device)  # [caches, B, S, H, D]
    tensors = [cache.transpose(1, 2) for cache in storage]
    moves = ([[9, 8], [7, 6]], [[0, 1], [6, 5]], [2, 2])
    expected = [moved(cache, *moves) for cache in tensors]
    commit(any_device, tensors, *moves)
    assert all(cache.equal(wanted) for cache, wanted in zip(tensors, expected))


def test_a_cache_that_has_grown_is_found_again(any_device, generator):
    tensors = caches(any_device, generator)
    moves = ([[5, 6], [7, 8]], [[0, 1], [0, 1]], [2, 2])
    for _ in range(3):
        expected = [moved(cache, *moves) for cache in tensors]
        commit(any_device, tensors, *moves)
        assert all(cache.equal(wanted) for cache, wanted in zip(tensors, expected))
        tensors = [torch.cat([cache, cache.flip(2)], dim=2) for cache in tensors]


def test_many_moves_of_wide_slots(any_device, generator):
    tensors = caches(any_device, generator, batch=1, heads=1, slots=80, width=300, layers=1)
    moves = ([list(range(40, 80))], [list(range(10, 50))], [40])
    expected = [moved(cache, *moves) for cache in tensors]
    commit(any_device, tensors, *moves)
    assert all(cache.equal(wanted) for cache, wanted in zip(tensors, expected))


def test_nothing_to_move(any_device, generator):
    tensors = caches(any_device, generator)
    before = [cache.clone() for cache in tensors]
    commit(any_device, tensors, [[], []], [[], []], [0, 0])
    commit(any_device, [], [[1], [1]], [[2], [2]], [1, 1])
    assert all(cache.equal(wanted) for cache, wanted in zip(tensors, before))
