# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Rejection verification in Triton; see `reference.rejection_verification`."""

import math

import torch
import triton
import triton.language as tl

from . import reference
from .filters import kept_part, kth_largest, leave_largest, order_key, scores_of
from .tiles import (
    LAUNCH_OPTIONS,
    WIDEST,
    add_to_log_sum,
    count_accepted,
    finite_or_zero,
    lane_tokens,
    log_of_sum,
    pack,
    packed_token,
    share_listed_row,
    uniform_lanes,
)


_BLOCKS = 1024
_STREAM_RESIDUAL = tl.constexpr(reference.STREAM_RESIDUAL)


@triton.jit
def _share_log_sum(
    score_row, token_stride, vocab_size, temperature, tiles_each, TEMPERED: tl.constexpr, BLOCKS: tl.constexpr
):
    """The log-sum, as `exp(peak) * total`, of this program's tiles of a row."""
    peak, total = tl.full((), -float("inf"), tl.float32), tl.full((), 0.0, tl.float32)
    for tile in range(tiles_each):
        tokens = (tl.program_id(1) * tiles_each + tile) * (4 * BLOCKS) + tl.arange(0, 4 * BLOCKS)
        values = scores_of(score_row, token_stride, tokens, vocab_size, temperature, TEMPERED)
        peak, total = add_to_log_sum(peak, total, values)
    return peak, total


@triton.jit(
    do_not_specialize=["depth_count", "tiles_each", "top_k"],
    do_not_specialize_on_alignment=[
        "proposals", "lengths", "point_mass", "uniforms", "seeds", "peaks", "totals", "log_sums", "cuts", "arrived", "lines_done",
    ],
)  # fmt: skip
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
    peaks,  # [B, 2K+1, shares] float32: largest score of each part of each line, a row's target lines first
    totals,  # likewise: sum of exp(score - peak)
    lists,  # [B, 2K+1, shares, WIDTH] int64: packed top scores of each part, where there is a top-k
    log_sums,  # [B, 2K+1] float32: of each line
    cuts,  # [B, 2K+1] int64: order key of the lowest token that the filters leave of each target line
    arrived,  # [B, 2K+1] int32, zero: programs of a line that are done
    lines_done,  # [B] int32, zero: lines of a row that are done
    accepted,
    next_token,
    depth_count,  # K
    vocab_size,
    tiles_each,
    tiles,
    temperature,
    top_k,
    top_p,
    log_min_p,
    HAS_DRAFT: tl.constexpr,
    TEMPERED: tl.constexpr,
    FILTERED: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    DEPTHS: tl.constexpr,  # K+1 up to a power of two
    WIDTH: tl.constexpr,  # top_k up to a power of two
    SHARES: tl.constexpr,  # programs of a line up to a power of two
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
    line_index = row * lines + line
    parts = line_index * shares

    # The log-sum of one line of scores: a target row that can be reached, or a draft row that will be compared.
    is_reached = line <= tl.minimum(length, depth_count)
    start = target_row + line.to(tl.int64) * target_stride_depth
    depth = line - depth_count - 1
    is_compared = (depth >= 0) & (depth < length) & knows_q
    peak, total = tl.full((), -float("inf"), tl.float32), tl.full((), 0.0, tl.float32)
    if is_reached:
        peak, total = _share_log_sum(start, target_stride_token, vocab_size, temperature, tiles_each, TEMPERED, BLOCKS)
        if TOP_K:
            list_start = lists + (parts + share) * WIDTH
            leave_largest(start, target_stride_token, vocab_size, temperature, top_k, list_start, WIDTH, 4 * BLOCKS)
    if is_compared:
        start_q = draft_row + depth.to(tl.int64) * draft_stride_depth
        peak, total = _share_log_sum(start_q, draft_stride_token, vocab_size, 1.0, tiles_each, False, BLOCKS)
    tl.store(peaks + parts + share, peak)
    tl.store(totals + parts + share, total)
    tl.debug_barrier()  # the parts are written before the arrival is counted

    if tl.atomic_add(arrived + line_index, 1) == shares - 1:
        part = tl.arange(0, SHARES)
        part_peak = tl.load(peaks + parts + part, mask=part < shares, other=-float("inf"), cache_modifier=".cg")
        part_total = tl.load(totals + parts + part, mask=part < shares, other=0.0, cache_modifier=".cg")
        peak = tl.max(part_peak, 0)
        shift = finite_or_zero(peak)
        total = tl.sum(part_total * tl.exp(part_peak - shift), 0)
        if FILTERED:  # noqa: SIM102  (settled by the compiler, the other by the data)
            if is_reached:
                kth = tl.full((), -float("inf"), tl.float32)
                if TOP_K:
                    kth = kth_largest(lists + parts * WIDTH, top_k, WIDTH, SHARES)
                cut, total = kept_part(
                    start, target_stride_token, vocab_size, temperature, peak, kth, log_min_p, top_p, TOP_P, 4 * BLOCKS
                )
                tl.store(cuts + line_index, cut)
        tl.store(log_sums + line_index, log_of_sum(shift, total, 0.0))
        tl.debug_barrier()

        if tl.atomic_add(lines_done + row, 1) == lines - 1:
            depths = tl.arange(0, DEPTHS)
            proposed = depths < length
            compared = depths < tl.where(knows_q, length, 0)
            of_row = row * lines + depths
            log_sum_p = tl.load(log_sums + of_row, mask=depths <= depth_count, other=0.0, cache_modifier=".cg")
            log_sum_q = tl.load(log_sums + of_row + depth_count + 1, mask=compared, other=0.0, cache_modifier=".cg")
            token = tl.load(proposals + row * depth_count + depths, mask=proposed, other=0)
            depths_wide = depths.to(tl.int64)
            address_p = target_row + depths_wide * target_stride_depth + token * target_stride_token
            address_q = draft_row + depths_wide * draft_stride_depth + token * draft_stride_token
            score_p = tl.load(address_p, mask=proposed, other=0.0).to(tl.float32)
            score_q = tl.load(address_q, mask=compared, other=0.0).to(tl.float32)
            if TEMPERED:
                score_p = tl.div_rn(score_p, temperature)
            probability = tl.exp(score_p - log_sum_p)
            if FILTERED:
                cut_of = tl.load(
                    cuts + of_row, mask=depths <= tl.minimum(length, depth_count), other=0, cache_modifier=".cg"
                )
                probability = tl.where(order_key(score_p, token.to(tl.int32)) >= cut_of, probability, 0.0)
            draft_probability = tl.where(knows_q, tl.exp(score_q - log_sum_q), 1.0)
            uniform = tl.load(uniforms + row * depth_count + depths, mask=proposed, other=0.0)
            accept = count_accepted(uniform * draft_probability < probability, depths, length)
            tl.store(accepted + row, accept.to(tl.int64))

            # The draw at depth `accept`: weights w and exponential noise e, the token is argmax w / e.
            here = depths == accept
            shift_p = tl.sum(tl.where(here, log_sum_p, 0.0), 0)
            shift_q = tl.sum(tl.where(here, log_sum_q, 0.0), 0)
            refused = tl.sum(tl.where(here, token, 0), 0)
            if FILTERED:
                cut = tl.sum(tl.where(here, cut_of, 0), 0)
            is_rejected = accept < length
            has_q = is_rejected & knows_q
            draft_size = tl.where(has_q, vocab_size, 0)
            seed = tl.load(seeds + row)
            zero = seed * 0
            top = tl.zeros((BLOCKS,), tl.float32)
            top_token = tl.zeros((BLOCKS,), tl.int32)
            top_of_p = tl.zeros((BLOCKS,), tl.float32)
            top_of_p_token = tl.zeros((BLOCKS,), tl.int32)
            target_row += accept.to(tl.int64) * target_stride_depth
            draft_row += accept.to(tl.int64) * draft_stride_depth
            for tile in range(tiles):
                first_block = tile * BLOCKS
                noise = uniform_lanes(first_block, zero, zero, _STREAM_RESIDUAL, seed, seed >> 32, BLOCKS)
                for lane in tl.static_range(4):
                    tokens = lane_tokens(first_block, lane, BLOCKS)
                    value = scores_of(target_row, target_stride_token, tokens, vocab_size, temperature, TEMPERED)
                    p = tl.exp(value - shift_p)
                    if FILTERED:
                        p = tl.where(order_key(value, tokens) >= cut, p, 0.0)
                    value = scores_of(draft_row, draft_stride_token, tokens, draft_size, 1.0, False)
                    q = tl.where(has_q, tl.exp(value - shift_q), tl.where(is_rejected & (tokens == refused), 1.0, 0.0))
                    exponential = -tl.log(noise[lane])
                    drawn_p = tl.div_rn(p, exponential)
                    drawn = tl.div_rn(tl.maximum(p - q, 0.0), exponential)
                    better = drawn > top
                    top = tl.where(better, drawn, top)
                    top_token = tl.where(better, tokens, top_token)
                    better = drawn_p > top_of_p
                    top_of_p = tl.where(better, drawn_p, top_of_p)
                    top_of_p_token = tl.where(better, tokens, top_of_p_token)
            from_residual = tl.max(pack(top, top_token), 0)
            from_p = tl.max(pack(top_of_p, top_of_p_token), 0)
            tl.store(next_token + row, packed_token(tl.where(tl.max(top, 0) > 0, from_residual, from_p)))


def rejection_verification(
    target_scores, draft_scores, proposals, lengths, *, point_mass, uniforms, residual_seeds, temperature=1.0, top_k=0,
    top_p=1.0, min_p=0.0,
):  # fmt: skip
    """See `reference.rejection_verification`."""
    batch, count, vocab_size = target_scores.shape
    top_k = min(top_k, vocab_size)
    if top_k > WIDEST:
        return reference.rejection_verification(
            target_scores, draft_scores, proposals, lengths, point_mass=point_mass, uniforms=uniforms,
            residual_seeds=residual_seeds, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        )  # fmt: skip
    device = target_scores.device
    accepted = torch.empty((batch,), dtype=torch.int64, device=device)
    next_token = torch.empty_like(accepted)
    if batch == 0:
        return accepted, next_token
    draft = target_scores if draft_scores is None else draft_scores
    lines = batch * (count if draft_scores is None else 2 * count - 1)
    filtered = top_k > 0 or top_p < 1 or min_p > 0
    blocks, shares, tiles_each, width = share_listed_row(device, lines, vocab_size, top_k, _BLOCKS)
    sums = torch.empty((lines * (2 * shares + 1),), device=device)
    keys = torch.empty((lines * (shares * width + 1) if filtered else 1,), dtype=torch.int64, device=device)
    counts = torch.zeros((lines + batch,), dtype=torch.int32, device=device)
    rejection_kernel[(lines, shares)](
        target_scores,
        *target_scores.stride(),
        draft,
        *draft.stride(),
        proposals.contiguous(),
        lengths.contiguous(),
        point_mass.contiguous().view(torch.uint8),
        uniforms.contiguous(),
        residual_seeds.contiguous(),
        sums,
        sums[lines * shares :],
        keys[lines:],
        sums[2 * lines * shares :],
        keys,
        counts,
        counts[lines:],
        accepted,
        next_token,
        count - 1,
        vocab_size,
        tiles_each,
        triton.cdiv(vocab_size, 4 * blocks),
        float(temperature),
        top_k,
        float(top_p),
        math.log(min_p) if min_p > 0 else -math.inf,
        HAS_DRAFT=draft_scores is not None,
        TEMPERED=filtered or temperature != 1,
        FILTERED=filtered,
        TOP_K=top_k > 0,
        TOP_P=top_p < 1,
        DEPTHS=triton.next_power_of_2(count),
        WIDTH=width,
        SHARES=triton.next_power_of_2(shares),
        BLOCKS=blocks,
        **LAUNCH_OPTIONS,
    )
    return accepted, next_token
