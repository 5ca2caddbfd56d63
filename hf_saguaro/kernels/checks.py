# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""What the kernels accept. One function per kernel with its arguments; `SaguaroError` before anything is launched."""

import math
import numbers

import torch

from ..errors import SaguaroError


_SCORES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_INT64 = (torch.int64,)
_FLOAT32 = (torch.float32,)


def _tensor(name, value, shape, dtypes, device=None):
    """`shape` has an int where the size is settled and a letter where any is right."""
    if not isinstance(value, torch.Tensor):
        raise SaguaroError(f"`{name}` is {value!r}, but this kernel needs a tensor [{_text(shape)}]; pass one.")
    fits = value.dim() == len(shape) and all(
        isinstance(wanted, str) or size == wanted for size, wanted in zip(value.shape, shape)
    )
    if not fits:
        raise SaguaroError(
            f"`{name}` has shape {list(value.shape)}, which does not go with the others; pass [{_text(shape)}]."
        )
    if value.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise SaguaroError(f"`{name}` is {str(value.dtype).removeprefix('torch.')}; convert it to {wanted}.")
    if device is not None and value.device != device:
        raise SaguaroError(f"`{name}` is on {value.device}, but the scores are on {device}; move it there.")


def _text(shape):
    return ", ".join(str(size) for size in shape)


def _scores(name, scores, shape):
    _tensor(name, scores, shape, _SCORES)
    if scores.shape[-1] == 0 or (scores.dim() == 3 and scores.shape[1] == 0):
        raise SaguaroError(
            f"`{name}` has shape {list(scores.shape)}: nothing can be chosen from it; pass [{_text(shape)}]."
        )


def _count(name, value, lowest, highest, why):
    if not isinstance(value, numbers.Integral) or not lowest <= value <= highest:
        raise SaguaroError(f"`{name}` is {value!r}, but {why}; pass an int from {lowest} to {highest}.")


def _seed(seed):
    if not isinstance(seed, numbers.Integral):
        raise SaguaroError(f"`seed` is {seed!r}, but the noise is keyed by 64 bits; pass an int.")


def keyed_noise(seed, rows, positions, vocab_size):
    _seed(seed)
    _tensor("rows", rows, ("R",), _INT64)
    _tensor("positions", positions, rows.shape, _INT64, rows.device)
    _count("vocab_size", vocab_size, 1, 2**31 - 1, "it counts the tokens")


def _chain(scores, proposals, lengths):
    batch, count = scores.shape[:2]
    _tensor("proposals", proposals, (batch, count - 1), _INT64, scores.device)
    _tensor("lengths", lengths, (batch,), _INT64, scores.device)


def _filters(temperature, top_k, top_p, min_p):
    if not (isinstance(temperature, numbers.Real) and 0 < temperature < math.inf):
        raise SaguaroError(
            f"`temperature` is {temperature!r}, but scores are divided by it; pass a number above 0. Greedy "
            "decoding is coupled verification with neither `seed` nor `noise`."
        )
    _count("top_k", top_k, 0, 2**31 - 1, "it counts the tokens that stay")
    for name, value in (("top_p", top_p), ("min_p", min_p)):
        if not (isinstance(value, numbers.Real) and 0 <= value <= 1):
            raise SaguaroError(f"`{name}` is {value!r}, but it is a share of probability; pass a number from 0 to 1.")


def coupled_verification(
    scores, proposals, lengths, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=None, rows=None,
    positions=None, noise=None,
):  # fmt: skip
    _scores("scores", scores, ("B", "K+1", "V"))
    _chain(scores, proposals, lengths)
    _filters(temperature, top_k, top_p, min_p)
    if seed is not None:
        if noise is not None:
            raise SaguaroError("both `seed` and `noise` were given, which are two ways to say the same; pass one.")
        _seed(seed)
        _tensor("rows", rows, scores.shape[:1], _INT64, scores.device)
        _tensor("positions", positions, scores.shape[:1], _INT64, scores.device)
    elif noise is not None:
        _tensor("noise", noise, scores.shape, _FLOAT32, scores.device)


def rejection_verification(
    target_scores, draft_scores, proposals, lengths, *, point_mass, uniforms, residual_seeds, temperature=1.0, top_k=0,
    top_p=1.0, min_p=0.0,
):  # fmt: skip
    _scores("target_scores", target_scores, ("B", "K+1", "V"))
    _chain(target_scores, proposals, lengths)
    _filters(temperature, top_k, top_p, min_p)
    batch, count, vocab_size = target_scores.shape
    device = target_scores.device
    if draft_scores is not None:
        _tensor("draft_scores", draft_scores, (batch, count - 1, vocab_size), _SCORES, device)
    _tensor("point_mass", point_mass, (batch,), (torch.bool,), device)
    _tensor("uniforms", uniforms, proposals.shape, _FLOAT32, device)
    _tensor("residual_seeds", residual_seeds, (batch,), _INT64, device)


def select_forks(scores, sent, lengths, fan_out):
    _scores("scores", scores, ("B", "K+1", "V"))
    batch, count, _ = scores.shape
    _tensor("sent", sent, (batch, count - 1), _INT64, scores.device)
    _tensor("lengths", lengths, (batch,), _INT64, scores.device)
    if len(fan_out) != count or any(not isinstance(width, numbers.Integral) or width < 0 for width in fan_out):
        raise SaguaroError(
            f"`fan_out` is {fan_out!r}, but the scores have {count} depths; pass a list of {count} ints of 0 or more."
        )


def biased_draw(scores, fan_out, bias, noise):
    _scores("scores", scores, ("R", "V"))
    _count("fan_out", fan_out, 0, 2**31 - 1, "it counts the biased tokens")
    if not (isinstance(bias, numbers.Real) and 0 < bias <= 1):
        raise SaguaroError(
            f"`bias` is {bias!r}, but it multiplies probabilities that must stay above 0; pass a number in (0, 1]."
        )
    _tensor("noise", noise, scores.shape, _FLOAT32, scores.device)


def top_k_with_residual(scores, k):
    _scores("scores", scores, ("R", "V"))
    _count("k", k, 1, scores.shape[1], f"a row has {scores.shape[1]} entries")


def commit_slots(keys, values, source, destination, lengths):
    _tensor("source", source, ("B", "n"), _INT64)
    _tensor("destination", destination, source.shape, _INT64, source.device)
    _tensor("lengths", lengths, source.shape[:1], _INT64, source.device)
    if len(keys) != len(values):
        raise SaguaroError(f"{len(keys)} `keys` came with {len(values)} `values`; pass one of each for every layer.")
    for name, caches in (("keys", keys), ("values", values)):
        for layer, cache in enumerate(caches):
            _tensor(f"{name}[{layer}]", cache, (source.shape[0], "H", "S", "D"), (keys[0].dtype,), source.device)
            if cache.stride(3) != 1:
                raise SaguaroError(
                    f"`{name}[{layer}]` has strides {cache.stride()}, but a slot must be contiguous in its last "
                    "dimension; pass a cache whose last stride is 1."
                )
