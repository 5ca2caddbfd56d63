# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Rejection verification in Triton; see `reference.rejection_verification`."""

import torch
import triton
import triton.language as tl

from . import reference
from .tiles import (
    LAUNCH_OPTIONS,
    add_to_log_sum,
    count_accepted,
    finite_or_zero,
    lane_tokens,
    log_of_sum,
    pack,
    packed_token,
    share_row,
    uniform_lanes,
)


_BLOCKS = 1024
_STREAM_RESIDUAL = tl.constexpr(reference.STREAM_RESIDUAL)


@triton.jit
def _share_log_sum(row_start, token_stride, vocab_size, wanted, tiles_each, BLOCKS: tl.constexpr):
    """The log-sum, as `exp(peak) * total`, of the first `wanted` of this program's tiles of a row."""
    peak, total = tl.full((), -float("inf"), tl.float32), tl.full((), 0.0, tl.float32)
    for tile in range(wanted):
        tokens = (tl.program_id(1) * tiles_each + tile) * (4 * BLOCKS) + tl.arange(0, 4 * BLOCKS)
        address = row_start + tokens.to(tl.int64) * token_stride
        values = tl.load(address, mask=tokens < vocab_size, other=-float("inf")).to(tl.float32)
        peak, total = add_to_log_sum(peak, total, values)
    return peak, total


@triton.jit
def _row_log_sums(peaks, totals, depths, count, shares, DEPTHS: tl.constexpr, SHARES: tl.constexpr):
    """[DEPTHS] log-sums of the rows that begin at `peaks` and `totals`, each left in `shares` parts."""
    part = tl.arange(0, SHARES)[None, :]
    index = depths[:, None] * shares + part
    mask = (depths < count)[:, None] & (part < shares)
    peak = tl.load(peaks + index, mask=mask, other=-float("inf"), cache_modifier=".cg")
    total = tl.load(totals + index, mask=mask, other=0.0, cache_modifier=".cg")
    highest = finite_or_zero(tl.max(peak, 1))
    summed = tl.sum(total * tl.exp(peak - highest[:, None]), 1)
    return log_of_sum(highest, summed, 0.0)


@triton.jit(
    do_not_specialize=["depth_count", "tiles_each"],
    do_not_specialize_on_alignment=["proposals", "lengths", "point_mass", "uniforms", "seeds", "peaks", "totals"],
)
def rejection_kernel(
    target,
    target_stride_row,
    target_stride_depth,
    target_stride_token,
    draft,
    draft_stride_row,
    draft_stride_depth,
    draft_stride_token,
    proposals,
    lengths,
    point_mass,
    uniforms,
    seeds,
    peaks,  # [B, 2K+1, shares] float32: largest score of each part of each row, target rows first
    totals,  # likewise: sum of exp(score - peak)
    arrived,  # [B] int32, zero
    accepted,
    next_token,
    depth_count,  # K
    vocab_size,
    tiles_each,
    tiles,
    HAS_DRAFT: tl.constexpr,
    DEPTHS: tl.constexpr,  # K+1 up to a power of two
    SHARES: tl.constexpr,  # programs of a row up to a power of two
    BLOCKS: tl.constexpr,
):
    if HAS_DRAFT:
        lines = 2 * depth_count + 1
    else:
        lines = depth_count + 1
    row = (tl.program_id(0) // lines).to(tl.int64)
    line = tl.program_id(0) % lines
    share, shares = tl.program_id(1), tl.num_programs(1)
    length = tl.load(lengths + row).to(tl.int32)
    if HAS_DRAFT:
        knows_q = tl.load(point_mass + row) == 0
    else:
        knows_q = length < 0
    target_row = target + row * target_stride_row
    draft_row = draft + row * draft_stride_row
    peaks += row * lines * shares
    totals += row * lines * shares

    # The log-sum of one line of scores: a target row that can be reached, or a draft row that will be compared.
    if line <= depth_count:
        wanted = tl.where(line <= length, tiles_each, 0)
        start = target_row + line.to(tl.int64) * target_stride_depth
        peak, total = _share_log_sum(start, target_stride_token, vocab_size, wanted, tiles_each, BLOCKS)
    else:
        depth = (line - depth_count - 1).to(tl.int64)
        wanted = tl.where((depth < length) & knows_q, tiles_each, 0)
        start_q = draft_row + depth * draft_stride_depth
        peak, total = _share_log_sum(start_q, draft_stride_token, vocab_size, wanted, tiles_each, BLOCKS)
    tl.store(peaks + line * shares + share, peak)
    tl.store(totals + line * shares + share, total)
    tl.debug_barrier()  # the parts are written before the arrival is counted

    if tl.atomic_add(arrived + row, 1) == lines * shares - 1:
        depths = tl.arange(0, DEPTHS)
        log_sum_p = _row_log_sums(peaks, totals, depths, depth_count + 1, shares, DEPTHS, SHARES)
        after_target = (depth_count + 1) * shares
        draft_lines = lines - depth_count - 1
        log_sum_q = _row_log_sums(
            peaks + after_target, totals + after_target, depths, draft_lines, shares, DEPTHS, SHARES
        )
        proposed = depths < length
        token = tl.load(proposals + row * depth_count + depths, mask=proposed, other=0)
        depths_wide = depths.to(tl.int64)
        address_p = target_row + depths_wide * target_stride_depth + token * target_stride_token
        address_q = draft_row + depths_wide * draft_stride_depth + token * draft_stride_token
        score_p = tl.load(address_p, mask=proposed, other=0.0).to(tl.float32)
        score_q = tl.load(address_q, mask=depths < tl.where(knows_q, length, 0), other=0.0).to(tl.float32)
        probability = tl.exp(score_p - log_sum_p)
        draft_probability = tl.where(knows_q, tl.exp(score_q - log_sum_q), 1.0)
        uniform = tl.load(uniforms + row * depth_count + depths, mask=proposed, other=0.0)
        accept = count_accepted(uniform * draft_probability < probability, depths, length)
        tl.store(accepted + row, accept.to(tl.int64))

        # The draw at depth `accept`: weights w and exponential noise e, the token is argmax w / e.
        here = depths == accept
        shift_p = tl.sum(tl.where(here, log_sum_p, 0.0), 0)
        shift_q = tl.sum(tl.where(here, log_sum_q, 0.0), 0)
        refused = tl.sum(tl.where(here, token, 0), 0)
        is_rejected = accept < length
        has_q = is_rejected & knows_q
        draft_size = tl.where(has_q, vocab_size, 0)
        seed = tl.load(seeds + row)
        zero = seed * 0
        top = tl.zeros((BLOCKS,), tl.float32)
        top_token = tl.zeros((BLOCKS,), tl.int32)
        top_p = tl.zeros((BLOCKS,), tl.float32)
        top_p_token = tl.zeros((BLOCKS,), tl.int32)
        target_row += accept.to(tl.int64) * target_stride_depth
        draft_row += accept.to(tl.int64) * draft_stride_depth
        for tile in range(tiles):
            first_block = tile * BLOCKS
            noise = uniform_lanes(first_block, zero, zero, _STREAM_RESIDUAL, seed, seed >> 32, BLOCKS)
            for lane in tl.static_range(4):
                tokens = lane_tokens(first_block, lane, BLOCKS)
                offsets = tokens.to(tl.int64)
                address = target_row + offsets * target_stride_token
                value = tl.load(address, mask=tokens < vocab_size, other=-float("inf"))
                p = tl.exp(value.to(tl.float32) - shift_p)
                value = tl.load(draft_row + offsets * draft_stride_token, mask=tokens < draft_size, other=-float("inf"))
                q = tl.where(
                    has_q, tl.exp(value.to(tl.float32) - shift_q), tl.where(is_rejected & (tokens == refused), 1.0, 0.0)
                )
                exponential = -tl.log(noise[lane])
                drawn_p = tl.div_rn(p, exponential)
                drawn = tl.div_rn(tl.maximum(p - q, 0.0), exponential)
                better = drawn > top
                top = tl.where(better, drawn, top)
                top_token = tl.where(better, tokens, top_token)
                better = drawn_p > top_p
                top_p = tl.where(better, drawn_p, top_p)
                top_p_token = tl.where(better, tokens, top_p_token)
        from_residual = tl.max(pack(top, top_token), 0)
        from_p = tl.max(pack(top_p, top_p_token), 0)
        tl.store(next_token + row, packed_token(tl.where(tl.max(top, 0) > 0, from_residual, from_p)))


def rejection_verification(target_scores, draft_scores, proposals, lengths, *, point_mass, uniforms, residual_seeds):
    """See `reference.rejection_verification`."""
    batch, count, vocab_size = target_scores.shape
    device = target_scores.device
    accepted = torch.empty((batch,), dtype=torch.int64, device=device)
    next_token = torch.empty_like(accepted)
    if batch == 0:
        return accepted, next_token
    draft = target_scores if draft_scores is None else draft_scores
    lines = count if draft_scores is None else 2 * count - 1
    shares, tiles_each = share_row(device, batch * lines, vocab_size, 4 * _BLOCKS)
    parts = torch.empty((2, batch, lines, shares), device=device)
    rejection_kernel[(batch * lines, shares)](
        target_scores,
        *target_scores.stride(),
        draft,
        *draft.stride(),
        proposals.contiguous(),
        lengths.contiguous(),
        point_mass.contiguous().view(torch.uint8),
        uniforms.contiguous(),
        residual_seeds.contiguous(),
        parts[0],
        parts[1],
        torch.zeros((batch,), dtype=torch.int32, device=device),
        accepted,
        next_token,
        count - 1,
        vocab_size,
        tiles_each,
        triton.cdiv(vocab_size, 4 * _BLOCKS),
        HAS_DRAFT=draft_scores is not None,
        DEPTHS=triton.next_power_of_2(count),
        SHARES=triton.next_power_of_2(shares),
        BLOCKS=_BLOCKS,
        **LAUNCH_OPTIONS,
    )
    return accepted, next_token
