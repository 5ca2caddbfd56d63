# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Every kernel beside its reference at the sizes that models have: vocabularies as they are, and the largest rounds."""

import pytest
import torch

from hf_saguaro import kernels
from hf_saguaro.kernels import reference


VOCABULARIES = (32_000, 49_152, 50_257, 128_256, 151_936, 262_144)
LARGEST_ROUNDS = {"B = 64": (64, 1, 61, torch.float16), "K = 16": (3, 16, 61, torch.bfloat16)}
TOLERANCE = dict(atol=1e-5, rtol=1e-5)  # of log-probabilities in float32, whatever the dtype of the scores


def coupled(random, batch, depth, vocab_size, device):
    rows = torch.arange(batch, device=device)
    arguments = (random(batch, depth + 1, vocab_size), *chain(batch, depth, vocab_size, device))
    return arguments, {"seed": 3, "rows": rows, "positions": rows * 7, "temperature": 0.9}


def rejection(random, batch, depth, vocab_size, device):
    target = random(batch, depth + 1, vocab_size)
    draft = target[:, :depth] + random(batch, depth, vocab_size) / 2
    lengths = chain(batch, depth, vocab_size, device)[1]
    options = {
        "point_mass": torch.arange(batch, device=device) % 4 == 1,
        "uniforms": torch.rand(batch, depth, generator=torch.Generator().manual_seed(1)).to(device),
        "residual_seeds": torch.arange(batch, device=device),
    }
    return (target, draft, draft.argmax(-1), lengths), options


def forks(random, batch, depth, vocab_size, device):
    return (random(batch, depth + 1, vocab_size), *chain(batch, depth, vocab_size, device), [2] * (depth + 1)), {}


def cache_bias(random, batch, depth, vocab_size, device):
    return (random(batch, vocab_size), 3, 0.5, random(batch, vocab_size).float()), {}


def top_k(random, batch, depth, vocab_size, device):
    return (random(batch, vocab_size), 5), {}


def chain(batch, depth, vocab_size, device):
    """Proposals and lengths; every third row is finished."""
    proposals = torch.arange(batch * depth, device=device).view(batch, depth) % vocab_size
    rows = torch.arange(batch, device=device)
    return proposals, torch.where(rows % 3 == 2, 0, depth)


KERNELS = {
    "coupled_verification": coupled,
    "rejection_verification": rejection,
    "select_forks": forks,
    "biased_draw": cache_bias,
    "top_k_with_residual": top_k,
}


def compare(name, device, batch, depth, vocab_size, dtype, last_is_best=False):
    generator = torch.Generator().manual_seed(vocab_size)

    def random(*shape):
        return (torch.randn(*shape, generator=generator) * 3).to(device, dtype)

    arguments, options = KERNELS[name](random, batch, depth, vocab_size, device)
    if last_is_best:
        arguments[0].flatten(0, -2)[0, -1] = 40
        if "uniforms" in options:  # low enough to accept the proposal, were it not for that token's mass
            options["uniforms"] /= 100
    expected = getattr(reference, name)(*arguments, **options)
    results = getattr(kernels, name)(*arguments, **options)
    for result, wanted in zip(results, expected) if isinstance(expected, tuple) else [(results, expected)]:
        if wanted.is_floating_point():
            torch.testing.assert_close(result, wanted, **TOLERANCE)
        else:
            assert result.equal(wanted)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_vocabularies_of_models(triton_device, name, vocab_size):
    dtype = (torch.bfloat16, torch.float16, torch.float32)[VOCABULARIES.index(vocab_size) % 3]
    compare(
        name, triton_device, 1, 1, vocab_size, dtype, last_is_best=True
    )  # so that no tile can be left out at the end


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("largest", LARGEST_ROUNDS)
def test_the_largest_rounds(triton_device, name, largest):
    compare(name, triton_device, *LARGEST_ROUNDS[largest])
