# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Fork selection in Triton; see `reference.select_forks`."""

import functools
import itertools

import torch
import triton
import triton.language as tl

from . import reference
from .tiles import LAUNCH_OPTIONS, WIDEST, list_tile, pack, packed_token, take_top


@triton.jit(
    do_not_specialize=["count", "forks"],
    do_not_specialize_on_alignment=["sent", "lengths", "widths", "starts"],
)
def fork_kernel(
    scores,
    score_stride_row,
    score_stride_depth,
    score_stride_token,
    sent,
    lengths,
    widths,  # [K+1] int32: the fan-out
    starts,  # [K+1] int32: where a depth's forks begin
    lists,  # [B * (K+1), shares, WIDTH] int64: packed top scores of each part
    arrived,  # [B * (K+1)] int32, zero
    tokens_out,
    count,  # K+1
    forks,  # sum of the fan-out
    vocab_size,
    WIDTH: tl.constexpr,
    SHARES: tl.constexpr,
    TILE: tl.constexpr,
):
    index = tl.program_id(0)
    row = (index // count).to(tl.int64)
    depth = (index % count).to(tl.int64)
    share, shares = tl.program_id(1), tl.num_programs(1)
    length = tl.load(lengths + row).to(tl.int32)
    width = tl.load(widths + depth)
    excluded = tl.load(sent + row * (count - 1) + depth, mask=depth < length, other=-1)

    tokens = share * TILE + tl.arange(0, TILE)
    address = scores + row * score_stride_row + depth * score_stride_depth + tokens.to(tl.int64) * score_stride_token
    reached = tl.where((depth <= length) & (width > 0), vocab_size, 0)
    values = tl.load(address, mask=tokens < reached, other=-float("inf")).to(tl.float32)
    keys = tl.where((values > -float("inf")) & (tokens != excluded), pack(values, tokens), 0)
    best, others = take_top(keys, width, WIDTH)
    rank = tl.arange(0, WIDTH)
    lists += index.to(tl.int64) * shares * WIDTH
    tl.store(lists + share * WIDTH + rank, best)
    tl.debug_barrier()  # the part is written before the arrival is counted

    if tl.atomic_add(arrived + index, 1) == shares - 1:
        item = tl.arange(0, SHARES * WIDTH)
        candidates = tl.load(lists + item, mask=item < shares * WIDTH, other=0, cache_modifier=".cg")
        chosen, left = take_top(candidates, width, WIDTH)
        fork = tl.where(chosen > 0, packed_token(chosen), -1)
        tl.store(tokens_out + row * forks + tl.load(starts + depth) + rank, fork, mask=rank < width)


@functools.lru_cache(maxsize=64)
def _layout(fan_out, device):
    """The fan-out and its starts on the device; kept, so that a round copies nothing there."""
    starts = (0, *itertools.accumulate(fan_out))[:-1]
    return torch.tensor([fan_out, starts], dtype=torch.int32).to(device)


def select_forks(scores, sent, lengths, fan_out):
    """See `reference.select_forks`."""
    batch, count, vocab_size = scores.shape
    forks, widest = sum(fan_out), max(fan_out)
    if widest > WIDEST:
        return reference.select_forks(scores, sent, lengths, fan_out)
    device = scores.device
    tokens = torch.empty((batch, forks), dtype=torch.int64, device=device)
    if tokens.numel() == 0:
        return tokens
    width = triton.next_power_of_2(widest)
    tile = list_tile(vocab_size)
    shares = triton.cdiv(vocab_size, tile)
    widths, starts = _layout(tuple(fan_out), device)
    fork_kernel[(batch * count, shares)](
        scores,
        *scores.stride(),
        sent.contiguous(),
        lengths.contiguous(),
        widths,
        starts,
        torch.empty((batch * count, shares, width), dtype=torch.int64, device=device),
        torch.zeros((batch * count,), dtype=torch.int32, device=device),
        tokens,
        count,
        forks,
        vocab_size,
        WIDTH=width,
        SHARES=triton.next_power_of_2(shares),
        TILE=tile,
        **LAUNCH_OPTIONS,
    )
    return tokens
