# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Top-k with the mass beside it, in Triton; see `reference.top_k_with_residual`."""

import torch
import triton
import triton.language as tl

from . import reference
from .tiles import (
    LAUNCH_OPTIONS,
    WIDEST,
    collect_top,
    finite_or_zero,
    leave_top,
    list_tile,
    log_of_sum,
    packed_token,
    packed_value,
)


@triton.jit(do_not_specialize=["k"], do_not_specialize_on_alignment=["peaks", "totals"])
def top_k_kernel(
    scores,
    score_stride_row,
    score_stride_token,
    lists,  # [R, shares, WIDTH] int64: packed top scores of each part
    peaks,  # [R, shares] float32: the largest score of each part beside its list
    totals,  # [R, shares] float32: sum of exp(score - peak) beside the list
    arrived,  # [R] int32, zero
    log_probs,
    token_ids,
    log_residual,
    k,
    vocab_size,
    WIDTH: tl.constexpr,
    SHARES: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    shares = tl.num_programs(1)
    lists += row * shares * WIDTH
    peaks += row * shares
    totals += row * shares
    row_start = scores + row * score_stride_row
    leave_top(row_start, score_stride_token, vocab_size, k, lists, peaks, totals, WIDTH, TILE)
    tl.debug_barrier()  # the part is written before the arrival is counted

    if tl.atomic_add(arrived + row, 1) == shares - 1:
        best, rest_peak, sum_rest = collect_top(lists, peaks, totals, k, WIDTH, SHARES)
        rank = tl.arange(0, WIDTH)
        value = tl.where(rank < k, packed_value(best), -float("inf"))
        shift = finite_or_zero(tl.max(value, 0))
        rest_shift = finite_or_zero(rest_peak)
        sum_all = tl.sum(tl.exp(value - shift), 0) + sum_rest * tl.exp(rest_shift - shift)
        log_sum = log_of_sum(shift, sum_all, 0.0)
        tl.store(log_probs + row * k + rank, value - log_sum, mask=rank < k)
        tl.store(token_ids + row * k + rank, packed_token(best), mask=rank < k)
        tl.store(log_residual + row, log_of_sum(rest_shift, sum_rest, -float("inf")) - log_sum)


def top_k_with_residual(scores, k):
    """See `reference.top_k_with_residual`."""
    if k > WIDEST:
        return reference.top_k_with_residual(scores, k)
    rows, vocab_size = scores.shape
    device = scores.device
    log_probs = torch.empty((rows, k), device=device)
    token_ids = torch.empty((rows, k), dtype=torch.int64, device=device)
    log_residual = torch.empty((rows,), device=device)
    if rows == 0:
        return log_probs, token_ids, log_residual
    width = triton.next_power_of_2(k)
    tile = list_tile(vocab_size)
    shares = triton.cdiv(vocab_size, tile)
    parts = torch.empty((2, rows, shares), device=device)
    top_k_kernel[(rows, shares)](
        scores,
        *scores.stride(),
        torch.empty((rows, shares, width), dtype=torch.int64, device=device),
        parts[0],
        parts[1],
        torch.zeros((rows,), dtype=torch.int32, device=device),
        log_probs,
        token_ids,
        log_residual,
        k,
        vocab_size,
        WIDTH=width,
        SHARES=triton.next_power_of_2(shares),
        TILE=tile,
        **LAUNCH_OPTIONS,
    )
    return log_probs, token_ids, log_residual
