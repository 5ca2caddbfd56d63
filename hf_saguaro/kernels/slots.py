# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Moving cache slots in Triton, all layers in one launch; see `reference.commit_slots`."""

import functools

import torch
import triton
import triton.language as tl

from . import reference
from .tiles import LAUNCH_OPTIONS


_ELEMENTS = 8192  # of the tile that a program holds between its reads and its writes
_MOST_MOVES = 1024  # of a row; more are left to torch


@triton.jit(
    do_not_specialize=["moves"],
    do_not_specialize_on_alignment=["source", "destination", "lengths"],
)
def commit_kernel(
    table,  # [caches, 7] int64: address, heads, slots, width, strides of batch, head and slot (width: 1)
    element,  # a tensor of the caches' dtype; only its type is used
    source,
    destination,
    lengths,
    moves,
    MOVES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    entry = table + tl.program_id(0).to(tl.int64) * 7
    row = tl.program_id(1).to(tl.int64)
    cache = tl.load(entry).to(element.dtype)
    heads, slots, width = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    stride_row, stride_head, stride_slot = tl.load(entry + 4), tl.load(entry + 5), tl.load(entry + 6)

    move = tl.arange(0, MOVES)
    counts = move < tl.load(lengths + row)
    read = tl.load(source + row * moves + move, mask=counts, other=-1)
    write = tl.load(destination + row * moves + move, mask=counts, other=-1)
    # Numbers outside the cache would reach foreign memory: such a move is left out.
    valid = counts & (read >= 0) & (read < slots) & (write >= 0) & (write < slots) & (read != write)
    column = tl.arange(0, WIDTH).to(tl.int64)
    columns = tl.cdiv(width, WIDTH)
    for piece in range(tl.program_id(2), heads * columns, tl.num_programs(2)):
        column_here = (piece % columns) * WIDTH + column
        start = cache + row * stride_row + (piece // columns) * stride_head + column_here[None, :]
        mask = valid[:, None] & (column_here < width)[None, :]
        moved = tl.load(start + read[:, None] * stride_slot, mask=mask)
        tl.debug_barrier()  # everything is read before anything is written
        tl.store(start + write[:, None] * stride_slot, moved, mask=mask)
        tl.debug_barrier()


@functools.lru_cache(maxsize=16)
def _table(entries, device):
    """The caches' addresses and shapes on their device; kept, so that a round copies nothing there."""
    return torch.tensor(entries, dtype=torch.int64).to(device)


def commit_slots(keys, values, source, destination, lengths):
    """See `reference.commit_slots`."""
    caches = [*keys, *values]
    moves = source.shape[1]
    if not caches or source.numel() == 0:
        return
    if moves > _MOST_MOVES:
        return reference.commit_slots(keys, values, source, destination, lengths)
    padded = max(2, triton.next_power_of_2(moves))
    widest = max(c.shape[3] for c in caches)
    width = min(triton.next_power_of_2(widest), _ELEMENTS // padded)
    pieces = max(c.shape[1] for c in caches) * triton.cdiv(widest, width)
    commit_kernel[(len(caches), source.shape[0], pieces)](
        _table(tuple((c.data_ptr(), *c.shape[1:], *c.stride()[:3]) for c in caches), caches[0].device),
        caches[0],
        source.contiguous(),
        destination.contiguous(),
        lengths.contiguous(),
        moves,
        MOVES=padded,
        WIDTH=width,
        **LAUNCH_OPTIONS,
    )
