# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Saguaro sampling in Triton; see `reference.biased_draw`."""

import math

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
    pack,
    packed_token,
    packed_value,
)


@triton.jit(do_not_specialize=["fan_out"], do_not_specialize_on_alignment=["peaks", "totals"])
def biased_draw_kernel(
    scores,
    score_stride_row,
    score_stride_token,
    noise,
    noise_stride_row,
    noise_stride_token,
    lists,  # [R, shares, WIDTH] int64: packed top scores of each part
    peaks,  # [R, shares] float32: the largest score of each part beside its list
    totals,  # [R, shares] float32: sum of exp(score - peak) beside the list
    arrived,  # [R] int32, zero
    tokens_out,
    log_q,
    log_q_token,
    fan_out,
    log_bias,
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
    leave_top(row_start, score_stride_token, vocab_size, fan_out, lists, peaks, totals, WIDTH, TILE)
    tl.debug_barrier()  # the part is written before the arrival is counted

    if tl.atomic_add(arrived + row, 1) == shares - 1:
        best, rest_peak, sum_rest = collect_top(lists, peaks, totals, fan_out, WIDTH, SHARES)
        rank = tl.arange(0, WIDTH)
        last = tl.sum(tl.where(rank == fan_out - 1, best, 0), 0)  # whatever is not below it is biased
        value = tl.where(rank < fan_out, packed_value(best) + log_bias, -float("inf"))
        rest_shift = finite_or_zero(rest_peak)
        shift = finite_or_zero(tl.maximum(rest_peak, tl.max(value, 0)))
        sum_all = tl.sum(tl.exp(value - shift), 0) + sum_rest * tl.exp(rest_shift - shift)
        log_sum = log_of_sum(shift, sum_all, 0.0)

        top = tl.full((TILE,), -float("inf"), tl.float32)
        top_token = tl.zeros((TILE,), tl.int32)
        noise_start = noise + row * noise_stride_row
        for tile in range(shares):
            tokens = tile * TILE + tl.arange(0, TILE)
            inside = tokens < vocab_size
            offsets = tokens.to(tl.int64)
            values = tl.load(row_start + offsets * score_stride_token, mask=inside, other=-float("inf"))
            values = values.to(tl.float32)
            values = values + tl.where(pack(values, tokens) >= last, log_bias, 0.0) - log_sum
            tl.store(log_q + row * vocab_size + offsets, values, mask=inside)
            values += tl.load(noise_start + offsets * noise_stride_token, mask=inside, other=0.0)
            better = values > top
            top = tl.where(better, values, top)
            top_token = tl.where(better, tokens, top_token)
        token = packed_token(tl.max(pack(top, top_token), 0))
        value = tl.load(row_start + token * score_stride_token).to(tl.float32)
        bias = tl.where(pack(value, token.to(tl.int32)) >= last, log_bias, 0.0)
        tl.store(tokens_out + row, token)
        tl.store(log_q_token + row, value + bias - log_sum)


def biased_draw(scores, fan_out, bias, noise):
    """See `reference.biased_draw`."""
    rows, vocab_size = scores.shape
    if fan_out == 0:
        fan_out, bias = 1, 1.0
    fan_out = min(fan_out, vocab_size)
    if fan_out > WIDEST:
        return reference.biased_draw(scores, fan_out, bias, noise)
    device = scores.device
    tokens = torch.empty((rows,), dtype=torch.int64, device=device)
    log_q = torch.empty((rows, vocab_size), device=device)
    log_q_token = torch.empty((rows,), device=device)
    if rows == 0:
        return tokens, log_q, log_q_token
    width = triton.next_power_of_2(fan_out)
    tile = list_tile(vocab_size)
    shares = triton.cdiv(vocab_size, tile)
    parts = torch.empty((2, rows, shares), device=device)
    biased_draw_kernel[(rows, shares)](
        scores,
        *scores.stride(),
        noise,
        *noise.stride(),
        torch.empty((rows, shares, width), dtype=torch.int64, device=device),
        parts[0],
        parts[1],
        torch.zeros((rows,), dtype=torch.int32, device=device),
        tokens,
        log_q,
        log_q_token,
        fan_out,
        math.log(bias),
        vocab_size,
        WIDTH=width,
        SHARES=triton.next_power_of_2(shares),
        TILE=tile,
        **LAUNCH_OPTIONS,
    )
    return tokens, log_q, log_q_token
