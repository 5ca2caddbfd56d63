# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Coupled verification in Triton; see `reference.coupled_verification`.

Top-k, top-p and min-p need no pass of their own, and where they cut a row (`filters.py`) need not be known. The winner
among all tokens is the winner among the kept ones if it is one of these, which the count and the mass above it settle; if
not, the next to be asked is the winner among the tokens above it. One of these is kept with a chance of at least top-p,
so a few questions do.
"""

import math

import torch
import triton
import triton.language as tl

from . import reference
from .filters import kth_largest, leave_largest, scores_of, stands_above
from .tiles import (
    LAUNCH_OPTIONS,
    WIDEST,
    count_accepted,
    finite_or_zero,
    lane_tokens,
    pack,
    packed_token,
    packed_value,
    share_listed_row,
    signed_words,
    uniform_lanes,
)


_BLOCKS = 1024
_STREAM = tl.constexpr(reference.STREAM_COUPLED)
_GREEDY, _KEYED, _GIVEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _noised_best(
    score_row,
    score_stride_token,
    noise_row,
    noise_stride_token,
    vocab_size,
    temperature,
    position,
    row,
    key_0,
    key_1,
    first_tile,
    tiles,
    lowest,
    above_value,
    above_token,
    NOISE: tl.constexpr,
    TEMPERED: tl.constexpr,
    FILTERED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The packed largest noised score, and the largest score without noise, of some tiles of a row.

    Where `FILTERED`, only tokens of at least `lowest` count that stand above `above_token`, which has `above_value`.
    """
    # Element i of these goes through rising token ids, so a strict comparison keeps the lowest of equal ones.
    top = tl.full((BLOCKS,), -float("inf"), tl.float32)
    top_token = tl.zeros((BLOCKS,), tl.int32)
    peak = tl.full((BLOCKS,), -float("inf"), tl.float32)
    for tile in range(first_tile, first_tile + tiles):
        first_block = tile * BLOCKS
        if NOISE == _KEYED:
            uniforms = uniform_lanes(first_block, position, row, _STREAM, key_0, key_1, BLOCKS)
        for lane in tl.static_range(4):
            tokens = lane_tokens(first_block, lane, BLOCKS)
            value = scores_of(score_row, score_stride_token, tokens, vocab_size, temperature, TEMPERED)
            if FILTERED:
                higher = stands_above(value, tokens, above_value, above_token)
                value = tl.where(higher & (value >= lowest), value, -float("inf"))
            peak = tl.maximum(peak, value)
            if NOISE == _KEYED:
                value += -tl.log(-tl.log(uniforms[lane]))
            if NOISE == _GIVEN:
                address = noise_row + tokens.to(tl.int64) * noise_stride_token
                value += tl.load(address, mask=tokens < vocab_size, other=0.0)
            better = value > top
            top = tl.where(better, value, top)
            top_token = tl.where(better, tokens, top_token)
    return tl.max(pack(top, top_token), 0), tl.max(peak, 0)


@triton.jit
def _masses(score_row, token_stride, vocab_size, temperature, kth, peak, above_value, above_token, TILE: tl.constexpr):
    """Sums of `exp(score - peak)` over a row's scores of at least `kth`: of those above a token, and of all."""
    above, all_of_them = tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32)
    for tile in range(tl.cdiv(vocab_size, TILE)):
        tokens = tile * TILE + tl.arange(0, TILE)
        value = scores_of(score_row, token_stride, tokens, vocab_size, temperature, True)
        weight = tl.where(value >= kth, tl.exp(value - peak), 0.0)
        all_of_them += weight
        above += tl.where(stands_above(value, tokens, above_value, above_token), weight, 0.0)
    return tl.sum(above, 0), tl.sum(all_of_them, 0)


@triton.jit
def _best_of_kept(
    key,
    score_row,
    score_stride_token,
    noise_row,
    noise_stride_token,
    vocab_size,
    temperature,
    position,
    row,
    key_0,
    key_1,
    kth,
    lowest,
    top_p,
    shift,
    NOISE: tl.constexpr,
    TOP_P: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """From the packed winner among all tokens, `key`, to that among the kept ones.

    Top-k keeps scores of at least `kth`, with min-p only those of at least `lowest` count; top-p goes by the masses.
    """
    asking = key >= 0
    while asking:
        token = packed_token(key).to(tl.int32)
        value = scores_of(score_row, score_stride_token, token, vocab_size, temperature, True)
        asking = (value >= lowest) == 0
        if TOP_P:
            above, kept = _masses(
                score_row, score_stride_token, vocab_size, temperature, kth, shift, value, token, 4 * BLOCKS
            )
            asking = asking | (above >= top_p * kept)
        if asking:
            higher, top = _noised_best(
                score_row, score_stride_token, noise_row, noise_stride_token, vocab_size, temperature, position, row,
                key_0, key_1, 0, tl.cdiv(vocab_size, 4 * BLOCKS), lowest, value, token, NOISE, True, True, BLOCKS,
            )  # fmt: skip
            asking = top > -float("inf")  # else nothing stands above it: the first of a row is always kept
            key = tl.where(asking, higher, key)
    return key


@triton.jit(
    do_not_specialize=["count", "tiles_each", "key_0", "key_1", "top_k"],
    do_not_specialize_on_alignment=["proposals", "lengths", "rows", "positions", "best", "highest", "arrived", "lines_done"],
)  # fmt: skip
def coupled_kernel(
    scores,
    score_stride_row,
    score_stride_depth,
    score_stride_token,
    noise,
    noise_stride_row,
    noise_stride_depth,
    noise_stride_token,
    proposals,
    lengths,
    rows,
    positions,
    best,  # [B, K+1] int64, zero: the largest packed noised score of each depth so far
    highest,  # [B, K+1] int64, zero: the largest packed score of each depth so far, where filtered
    lists,  # [B, K+1, shares, WIDTH] int64: packed top scores of each part, where there is a top-k
    arrived,  # [B, K+1] int32, zero: programs of a depth that are done
    lines_done,  # [B] int32, zero: depths of a row that are done
    accepted,
    next_token,
    choices,
    count,  # K+1
    vocab_size,
    tiles_each,
    temperature,
    top_k,
    top_p,
    log_min_p,
    key_0,
    key_1,
    NOISE: tl.constexpr,
    TEMPERED: tl.constexpr,
    FILTERED: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    DEPTHS: tl.constexpr,  # K+1 up to a power of two
    WIDTH: tl.constexpr,  # top_k up to a power of two
    SHARES: tl.constexpr,  # programs of a depth up to a power of two
    BLOCKS: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    row, depth = line // count, line % count
    share, shares = tl.program_id(1), tl.num_programs(1)
    score_row = scores + row * score_stride_row + depth * score_stride_depth
    noise_row = noise + row * noise_stride_row + depth * noise_stride_depth
    position, noise_of = depth, row
    if NOISE == _KEYED:
        position, noise_of = tl.load(positions + row) + depth, tl.load(rows + row)

    everything = -float("inf")
    key, peak = _noised_best(
        score_row, score_stride_token, noise_row, noise_stride_token, vocab_size, temperature, position, noise_of,
        key_0, key_1, share * tiles_each, tiles_each, everything, everything, -1, NOISE, TEMPERED, False, BLOCKS,
    )  # fmt: skip
    tl.atomic_max(best + line, key)
    if FILTERED:
        tl.atomic_max(highest + line, pack(peak, tl.zeros((), tl.int32)))
    if TOP_K:
        list_start = lists + (line * shares + share) * WIDTH
        leave_largest(score_row, score_stride_token, vocab_size, temperature, top_k, list_start, WIDTH, 4 * BLOCKS)
        tl.debug_barrier()  # the part is written before the arrival is counted

    if tl.atomic_add(arrived + line, 1) == shares - 1:
        if FILTERED:
            peak = packed_value(tl.load(highest + line, cache_modifier=".cg"))
            kth = tl.full((), -float("inf"), tl.float32)
            if TOP_K:
                kth = kth_largest(lists + line * shares * WIDTH, top_k, WIDTH, SHARES)
            key = _best_of_kept(
                tl.load(best + line, cache_modifier=".cg"), score_row, score_stride_token, noise_row, noise_stride_token,
                vocab_size, temperature, position, noise_of, key_0, key_1, kth, tl.maximum(kth, peak + log_min_p), top_p,
                finite_or_zero(peak), NOISE, TOP_P, BLOCKS,
            )  # fmt: skip
            tl.store(best + line, key)
            tl.debug_barrier()

        if tl.atomic_add(lines_done + row, 1) == count - 1:
            depths = tl.arange(0, DEPTHS)
            keys = tl.load(best + row * count + depths, mask=depths < count, other=0, cache_modifier=".cg")
            chosen = packed_token(keys)
            proposed = tl.load(proposals + row * (count - 1) + depths, mask=depths < count - 1, other=-1)
            length = tl.load(lengths + row).to(tl.int32)
            accept = count_accepted(chosen == proposed, depths, length)
            tl.store(choices + row * count + depths, chosen, mask=depths < count)
            tl.store(accepted + row, accept.to(tl.int64))
            tl.store(next_token + row, tl.sum(tl.where(depths == accept, chosen, 0), 0))


def coupled_verification(
    scores, proposals, lengths, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=None, rows=None,
    positions=None, noise=None,
):  # fmt: skip
    """See `reference.coupled_verification`."""
    batch, count, vocab_size = scores.shape
    top_k = min(top_k, vocab_size)
    if top_k > WIDEST:
        return reference.coupled_verification(
            scores, proposals, lengths, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
            rows=rows, positions=positions, noise=noise,
        )  # fmt: skip
    device = scores.device
    accepted = torch.empty((batch,), dtype=torch.int64, device=device)
    next_token = torch.empty_like(accepted)
    choices = torch.empty((batch, count), dtype=torch.int64, device=device)
    if batch == 0:
        return accepted, next_token, choices
    filtered = top_k > 0 or top_p < 1 or min_p > 0
    lines = batch * count
    # One fill clears all: two int64 keys and an int32 count a line, and an int32 count a row.
    scratch = torch.zeros((2 * lines + (lines + batch + 1) // 2,), dtype=torch.int64, device=device)
    counts = scratch[2 * lines :].view(torch.int32)
    if seed is not None:
        mode, given = _KEYED, scores
        rows, positions = rows.contiguous(), positions.contiguous()
    else:
        mode, given = (_GREEDY, scores) if noise is None else (_GIVEN, noise)
        rows = positions = lengths
    blocks, shares, tiles_each, width = share_listed_row(device, lines, vocab_size, top_k, _BLOCKS)
    lists = torch.empty((lines * shares * width,), dtype=torch.int64, device=device) if top_k else scratch
    coupled_kernel[(lines, shares)](
        scores,
        *scores.stride(),
        given,
        *given.stride(),
        proposals.contiguous(),
        lengths.contiguous(),
        rows,
        positions,
        scratch[:lines],
        scratch[lines : 2 * lines],
        lists,
        counts[:lines],
        counts[lines:],
        accepted,
        next_token,
        choices,
        count,
        vocab_size,
        tiles_each,
        float(temperature),
        top_k,
        float(top_p),
        math.log(min_p) if min_p > 0 else -math.inf,
        *signed_words(seed or 0),
        NOISE=mode.value,
        TEMPERED=filtered or mode is not _GREEDY,
        FILTERED=filtered,
        TOP_K=top_k > 0,
        TOP_P=top_p < 1,
        DEPTHS=triton.next_power_of_2(count),
        WIDTH=width,
        SHARES=triton.next_power_of_2(shares),
        BLOCKS=blocks,
        **LAUNCH_OPTIONS,
    )
    return accepted, next_token, choices
