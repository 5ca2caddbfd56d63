# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Keyed noise in Triton; see `reference.keyed_uniform` for the definition."""

import torch
import triton
import triton.language as tl

from . import reference
from .tiles import LAUNCH_OPTIONS, lane_tokens, signed_words, uniform_lanes


_BLOCKS = 1024
_STREAM = tl.constexpr(reference.STREAM_COUPLED)


@triton.jit(do_not_specialize=["key_0", "key_1"], do_not_specialize_on_alignment=["rows", "positions"])
def keyed_noise_kernel(output, rows, positions, vocab_size, key_0, key_1, GUMBEL: tl.constexpr, BLOCKS: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    first_block = tl.program_id(1) * BLOCKS
    uniforms = uniform_lanes(
        first_block, tl.load(positions + index), tl.load(rows + index), _STREAM, key_0, key_1, BLOCKS
    )
    for lane in tl.static_range(4):
        tokens = lane_tokens(first_block, lane, BLOCKS)
        noise = uniforms[lane]
        if GUMBEL:
            noise = -tl.log(-tl.log(noise))
        tl.store(output + index * vocab_size + tokens, noise, mask=tokens < vocab_size)


def _noise(seed, rows, positions, vocab_size, gumbel):
    output = torch.empty((rows.shape[0], vocab_size), dtype=torch.float32, device=rows.device)
    if output.numel() == 0:
        return output
    grid = (rows.shape[0], triton.cdiv(vocab_size, 4 * _BLOCKS))
    keyed_noise_kernel[grid](
        output,
        rows.contiguous(),
        positions.contiguous(),
        vocab_size,
        *signed_words(seed),
        GUMBEL=gumbel,
        BLOCKS=_BLOCKS,
        **LAUNCH_OPTIONS,
    )
    return output


def keyed_uniform(seed, rows, positions, vocab_size):
    """See `reference.keyed_uniform`."""
    return _noise(seed, rows, positions, vocab_size, gumbel=False)


def keyed_gumbel(seed, rows, positions, vocab_size):
    """See `reference.keyed_gumbel`."""
    return _noise(seed, rows, positions, vocab_size, gumbel=True)
