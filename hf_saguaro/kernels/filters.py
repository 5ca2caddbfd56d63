# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Temperature, top-k, top-p and min-p inside a kernel: what `reference.warp` leaves of a row, found without a sort.

Each filter keeps the upper end of a row in the order of a stable rising sort: by score, and among equal ones by token id.
So what all of them leave is everything from one token on, the *cut*. For top-k and min-p it is a matter of the score; for
top-p it is the lowest token that has less than `top_p` of the mass above it, and a few passes over the row close in on it.
"""

import triton
import triton.language as tl

from .tiles import finite_or_zero, pack, packed_value, take_top


_PIVOTS = tl.constexpr(16)
_PIVOT_TILE = tl.constexpr(1024)  # tokens that are held against all pivots at once


@triton.jit
def scores_of(score_row, token_stride, tokens, vocab_size, temperature, TEMPERED: tl.constexpr):
    """The scores of some tokens of a row, float32, after the temperature; -inf past the row's end."""
    address = score_row + tokens.to(tl.int64) * token_stride
    value = tl.load(address, mask=tokens < vocab_size, other=-float("inf")).to(tl.float32)
    if TEMPERED:
        value = tl.div_rn(value, temperature)
    return value


@triton.jit
def stands_above(value, token, other_value, other_token):
    """In the order that a filter goes by."""
    return (value > other_value) | ((value == other_value) & (token > other_token))


@triton.jit
def order_key(value, token):
    """A positive int64 that is the larger the higher a token stands in that order."""
    return (pack(value, token) & -(1 << 31)) | token.to(tl.int64)


@triton.jit
def leave_largest(
    score_row, token_stride, vocab_size, temperature, count, list_start, WIDTH: tl.constexpr, TILE: tl.constexpr
):
    """Leaves the packed `count` largest scores of this program's one tile of a row."""
    tokens = tl.program_id(1) * TILE + tl.arange(0, TILE)
    values = scores_of(score_row, token_stride, tokens, vocab_size, temperature, True)
    largest, others = take_top(tl.where(tokens < vocab_size, pack(values, tokens), 0), count, WIDTH)
    tl.store(list_start + tl.arange(0, WIDTH), largest)


@triton.jit
def kth_largest(lists, count, WIDTH: tl.constexpr, SHARES: tl.constexpr):
    """The last of the `count` largest scores of a row, of which every program left its own."""
    item = tl.arange(0, SHARES * WIDTH)
    keys = tl.load(lists + item, mask=item < tl.num_programs(1) * WIDTH, other=0, cache_modifier=".cg")
    largest, others = take_top(keys, count, WIDTH)
    return packed_value(tl.sum(tl.where(tl.arange(0, WIDTH) == count - 1, largest, 0), 0))


@triton.jit
def kept_part(
    score_row, token_stride, vocab_size, temperature, peak, kth, log_min_p, top_p, TOP_P: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The order key of the cut of a row, and the sum of `exp(score - peak)` from there on.

    `peak` is the largest score, `kth` the smallest that top-k leaves. The sum of a row of -inf alone is 0.
    """
    first_token = tl.zeros((), tl.int32)
    cut = order_key(tl.maximum(kth, peak + log_min_p), first_token)
    if TOP_P:
        of_top_p = _cut_of_top_p(
            score_row, token_stride, vocab_size, temperature, peak, order_key(kth, first_token), top_p
        )
        cut = tl.maximum(cut, of_top_p)
    shift = finite_or_zero(peak)
    sums = tl.zeros((TILE,), tl.float32)
    for tile in range(tl.cdiv(vocab_size, TILE)):
        tokens = tile * TILE + tl.arange(0, TILE)
        value = scores_of(score_row, token_stride, tokens, vocab_size, temperature, True)
        sums += tl.where(order_key(value, tokens) >= cut, tl.exp(value - shift), 0.0)
    return cut, tl.sum(sums, 0)


@triton.jit
def _cut_of_top_p(score_row, token_stride, vocab_size, temperature, peak, lowest, top_p):
    """The order key of the lowest token with less than `top_p` of the mass above it; mass counts from key `lowest` on.

    Held between two keys: with what stands above `low` the share is reached, with what stands above `high` it is not.
    """
    shift = finite_or_zero(peak)
    low, high = lowest - 1, order_key(peak, tl.full((), (1 << 31) - 1, tl.int32))
    share = tl.full((), -1.0, tl.float32)
    place = tl.arange(0, _PIVOTS)
    while high - low > 1:
        step = (high - low) // _PIVOTS + 1
        # The last one asks about `high` itself: it is a token's key from the second pass on.
        pivots = tl.where(place == _PIVOTS - 1, high - 1, tl.minimum(low + place * step, high - 1))
        masses, highest = tl.zeros((_PIVOTS,), tl.float32), low
        for tile in range(tl.cdiv(vocab_size, _PIVOT_TILE)):
            tokens = tile * _PIVOT_TILE + tl.arange(0, _PIVOT_TILE)
            value = scores_of(score_row, token_stride, tokens, vocab_size, temperature, True)
            keys = tl.where(tokens < vocab_size, order_key(value, tokens), 0)
            weights = tl.exp(value - shift)
            masses += tl.sum(tl.where(keys[:, None] > pivots[None, :], weights[:, None], 0.0), 0)
            highest = tl.maximum(highest, tl.max(tl.where(keys <= high, keys, 0), 0))
        if share < 0:
            share = top_p * tl.max(masses, 0)
        reached = masses >= share
        low = tl.maximum(low, tl.max(tl.where(reached, pivots, low), 0))
        high = tl.minimum(tl.minimum(high, highest), tl.min(tl.where(reached, high, pivots), 0))
    return high
