# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""What the Triton kernels share: how a row is cut into tiles, the noise of a tile, and order-preserving integer keys.

A row of V scores is cut into tiles of `4 * BLOCKS` tokens: `BLOCKS` blocks of the Philox counter, which hold four
lanes of tokens each (the layout is in `reference.py`). One row is shared by several programs, so that a batch of one
fills a GPU; the last of them to arrive, by an atomic count, puts the parts together. So every kernel is one launch,
after a fill that clears its counts.

What changes from round to round (K, lengths, seeds, addresses of small tensors) does not specialise a kernel: a new
compilation in the middle of a text would take seconds.
"""

import functools

import torch
import triton
import triton.language as tl

from . import reference


LANE_TOKENS = tl.constexpr(reference.BLOCKS_PER_RUN)
TOKEN_MASK = tl.constexpr(0x7FFFFFFF)
# Products and sums round one by one, as in torch: contracted ones would move a choice now and then.
LAUNCH_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}


@functools.cache
def _programs_wanted(device):
    if device.type == "cuda":
        return 4 * torch.cuda.get_device_properties(device).multi_processor_count
    return 8  # the interpreter runs them one after another; a few, so that the hand-over is exercised


def share_row(device, rows, vocab_size, tile):
    """Programs for each of `rows` rows, and tiles for each program."""
    tiles = triton.cdiv(vocab_size, tile)
    programs = max(1, min(tiles, triton.cdiv(_programs_wanted(device), max(rows, 1))))
    tiles_each = triton.cdiv(tiles, programs)
    return triton.cdiv(tiles, tiles_each), tiles_each


def share_listed_row(device, rows, vocab_size, top_k, blocks):
    """As `share_row`, for programs that also list the `top_k` largest of their part: then each has one tile.

    Returns counter blocks of a tile (`blocks` without a top-k), programs, tiles for each, and places of a list.
    """
    if top_k == 0:
        return blocks, *share_row(device, rows, vocab_size, 4 * blocks), 1
    tile = list_tile(vocab_size)
    return tile // 4, triton.cdiv(vocab_size, tile), 1, triton.next_power_of_2(top_k)


def signed_words(seed):
    """The seed's two words as int32, the type that every value of a kernel argument then has."""
    return tuple(word - (1 << 32) if word >> 31 else word for word in reference.split_seed(seed))


@triton.jit
def lane_tokens(first_block, lane: tl.constexpr, BLOCKS: tl.constexpr):
    """Token ids [BLOCKS] of one lane of the tile that begins at counter block `first_block`."""
    block = first_block + tl.arange(0, BLOCKS)
    place = block & (LANE_TOKENS - 1)  # in the lane
    return ((block ^ place) << 2) | (lane * LANE_TOKENS) | place


@triton.jit
def uniform_lanes(first_block, position, row, stream: tl.constexpr, key_0, key_1, BLOCKS: tl.constexpr):
    """Uniforms of the four lanes of a tile, a tuple of four float32 [BLOCKS]."""
    words = tl.philox_impl(
        (first_block + tl.arange(0, BLOCKS)).to(tl.uint32),
        position.to(tl.uint32),
        row.to(tl.uint32),
        tl.full((), stream, tl.uint32),
        key_0.to(tl.uint32),
        key_1.to(tl.uint32),
    )
    return _uniform(words[0]), _uniform(words[1]), _uniform(words[2]), _uniform(words[3])


@triton.jit
def _uniform(word):
    return ((word >> 9).to(tl.float32) + 0.5) * (1.0 / (1 << 23))


@triton.jit
def pack(value, token):
    """A positive int64 that is larger for the larger float32 `value`, and among equal ones for the lower token id."""
    value = tl.where(value == 0.0, 0.0, value)  # -0.0 equals 0.0
    bits = value.to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & TOKEN_MASK)).to(tl.int64) + (1 << 31)
    return (ordered << 31) | (token ^ TOKEN_MASK).to(tl.int64)


@triton.jit
def packed_token(key):
    return (key & TOKEN_MASK) ^ TOKEN_MASK


@triton.jit
def packed_value(key):
    ordered = ((key >> 31) - (1 << 31)).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & TOKEN_MASK)).to(tl.float32, bitcast=True)


@triton.jit
def finite_or_zero(value):
    """`value`, and 0 for -inf: the shift of a sum of exponentials of which all may be zero."""
    return tl.where(value == -float("inf"), 0.0, value)


@triton.jit
def log_of_sum(shift, total, nothing):
    """`shift + log(total)`, and `nothing` where the total is 0."""
    return tl.where(total > 0, shift + tl.log(tl.where(total > 0, total, 1.0)), nothing)


@triton.jit
def add_to_log_sum(peak, total, values):
    """Adds exp(values) to a running sum held as `exp(peak) * total`; -inf adds nothing."""
    higher = tl.maximum(peak, tl.max(values, 0))
    shift = finite_or_zero(higher)
    return higher, total * tl.exp(peak - shift) + tl.sum(tl.exp(values - shift), 0)


@triton.jit
def count_accepted(passes, depths, length):
    """Leading depths that pass among the first `length`; some depth in `depths` is never less than `length`."""
    return tl.min(tl.where(passes & (depths < length), 1 << 30, depths), 0)


# --- the largest of a row ---------------------------------------------------------------------------------------------

WIDEST = 128  # longer lists no longer fit the registers of a program


def list_tile(vocab_size):
    """Tokens of the one tile of a program whose row is searched for its largest: at most 64 programs share a row."""
    return max(4096, triton.next_power_of_2(triton.cdiv(vocab_size, 64)))


@triton.jit
def take_top(keys, count, WIDTH: tl.constexpr):
    """The `count` largest of `keys`, falling, in a list of WIDTH with 0 as an empty place; and `keys` without them."""
    rank = tl.arange(0, WIDTH)
    best = tl.zeros((WIDTH,), tl.int64)
    for place in range(count):
        largest = tl.max(keys, 0)
        best = tl.where(rank == place, largest, best)
        keys = tl.where(keys == largest, 0, keys)
    return best, keys


@triton.jit
def leave_top(
    row_start, token_stride, vocab_size, count, lists, peaks, totals, WIDTH: tl.constexpr, TILE: tl.constexpr
):
    """Leaves the `count` largest of this program's tile of a row, and the sum of exponentials of all the others."""
    share = tl.program_id(1)
    tokens = share * TILE + tl.arange(0, TILE)
    inside = tokens < vocab_size
    values = tl.load(row_start + tokens.to(tl.int64) * token_stride, mask=inside, other=-float("inf")).to(tl.float32)
    best, others = take_top(tl.where(inside, pack(values, tokens), 0), count, WIDTH)
    peak, total = tl.full((), -float("inf"), tl.float32), tl.full((), 0.0, tl.float32)
    peak, total = add_to_log_sum(peak, total, tl.where(others > 0, values, -float("inf")))
    tl.store(lists + share * WIDTH + tl.arange(0, WIDTH), best)
    tl.store(peaks + share, peak)
    tl.store(totals + share, total)


@triton.jit
def collect_top(lists, peaks, totals, count, WIDTH: tl.constexpr, SHARES: tl.constexpr):
    """Puts together what the programs of a row left: the list, and the sum of the others as `exp(peak) * total`."""
    shares = tl.num_programs(1)
    item, part = tl.arange(0, SHARES * WIDTH), tl.arange(0, SHARES)
    keys = tl.load(lists + item, mask=item < shares * WIDTH, other=0, cache_modifier=".cg")
    peak = tl.load(peaks + part, mask=part < shares, other=-float("inf"), cache_modifier=".cg")
    total = tl.load(totals + part, mask=part < shares, other=0.0, cache_modifier=".cg")
    best, others = take_top(keys, count, WIDTH)
    others = tl.where(others > 0, packed_value(others), -float("inf"))
    highest = tl.maximum(tl.max(peak, 0), tl.max(others, 0))
    shift = finite_or_zero(highest)
    return best, highest, tl.sum(total * tl.exp(peak - shift), 0) + tl.sum(tl.exp(others - shift), 0)
