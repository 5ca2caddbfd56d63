# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""The product that the machine's compiler builds: against torch in float64, and what happens where it cannot be built."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from hf_saguaro import kernels
from hf_saguaro.errors import SaguaroError
from hf_saguaro.generation.few_rows import fastest_product
from hf_saguaro.kernels import few_rows
from hf_saguaro.kernels.few_rows import few_rows_product, obstacle
from tests.conftest import tiny_llama


needs_compiler = pytest.mark.skipif(obstacle() is not None, reason=f"the compiled product: {obstacle()}")
DTYPES = [torch.float32, torch.bfloat16]
# Of the result, which is of the size of sqrt(k) times the operands: float32 sums, and one rounding to the dtype.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8}


def operands(rows, n, k, dtype):
    generator = torch.Generator().manual_seed(rows + 100 * n + k)
    return (torch.randn(*shape, generator=generator).to(dtype) for shape in ((rows, k), (n, k), (n,)))


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, k", [(1, 1), (2, 7), (3, 8), (4, 31), (5, 64), (64, 65), (97, 576)])
def test_equals_torch(dtype, n, k):
    for rows in (*range(1, 18), 33, 64):
        x, weight, bias = operands(rows, n, k, dtype)
        exact = F.linear(x.double(), weight.double())
        torch.testing.assert_close(
            few_rows_product(x, weight).double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * k**0.5
        )
        shifted = few_rows_product(x, weight, bias)
        torch.testing.assert_close(
            shifted.double(), exact + bias.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * k**0.5
        )
        assert shifted.dtype == dtype and shifted.shape == (rows, n)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_row_depends_on_the_others_or_on_the_threads(dtype):
    x, weight, bias = operands(64, 97, 130, dtype)
    whole = few_rows_product(x, weight, bias)
    for rows in range(1, 64):
        assert torch.equal(few_rows_product(x[:rows], weight, bias), whole[:rows])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(few_rows_product(x, weight, bias), whole)
    finally:
        torch.set_num_threads(before)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_strides_and_what_is_not_finite(dtype):
    x, weight, _ = operands(12, 9, 40, dtype)
    result = few_rows_product(x, weight)
    strided = x.repeat_interleave(2, 1)[:, ::2]
    assert not strided.is_contiguous() and torch.equal(few_rows_product(strided, weight), result)
    assert torch.equal(few_rows_product(x.view(2, 3, 2, 40), weight), result.view(2, 3, 2, 9))
    x[1, 3], x[2, 5], weight[4, 7] = float("nan"), float("inf"), float("-inf")
    torch.testing.assert_close(
        few_rows_product(x, weight), F.linear(x, weight), equal_nan=True, rtol=TOLERANCE[dtype], atol=0.1
    )


@needs_compiler
def test_bfloat16_is_rounded_to_the_nearest_even():
    halves = torch.tensor([[1.0, 2**-8], [1.0, 3 * 2**-8], [-1.0, -(2**-8)], [3e38, 3e38]]).bfloat16()
    one = torch.ones(1, 2).bfloat16()
    assert few_rows_product(one, halves).tolist() == [halves.double().sum(1).to(torch.bfloat16).tolist()]


@needs_compiler
def test_operands_that_do_not_fit_are_refused():
    x, weight, bias = operands(4, 5, 7, torch.float32)
    for bad in (
        (x[:, :6], weight),
        (x[:0], weight),
        (x, weight[0]),
        (x, weight.bfloat16()),
        (x, weight.T.contiguous().T),
        (x, weight, bias[:4]),
        (x, weight, bias.double()),
        (x.to("meta"), weight.to("meta")),
    ):
        with pytest.raises(SaguaroError, match="one dtype on the CPU"):
            few_rows_product(*bad)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """As in a new process on a machine where nothing has been built yet; what is built lies in the folder given."""
    monkeypatch.setattr(few_rows, "cached_assets_path", lambda *args, **kwargs: tmp_path)
    monkeypatch.delenv("HF_SAGUARO_KERNELS", raising=False)

    def forget():
        few_rows._library.cache_clear()
        fastest_product.cache_clear()

    forget()
    yield tmp_path, forget
    forget()


def openmp_libraries():
    maps = Path("/proc/self/maps")
    return {line.split()[-1] for line in maps.read_text().splitlines() if "omp" in line} if maps.exists() else set()


@needs_compiler
def test_it_is_built_once_and_shares_torchs_threads(fresh):
    folder, forget = fresh
    before = openmp_libraries()
    assert kernels.describe_few_rows() == "compiled for this processor"
    assert openmp_libraries() == before
    (built,) = folder.iterdir()
    made = built.stat().st_mtime_ns
    forget()
    x, weight, bias = operands(4, 9, 40, torch.float32)
    torch.testing.assert_close(few_rows_product(x, weight, bias), F.linear(x, weight, bias))
    assert list(folder.iterdir()) == [built] and built.stat().st_mtime_ns == made


@pytest.mark.parametrize(
    "variable, value, says",
    [
        ("CXX", "no-such-compiler", "torch (there is no C++ compiler)"),
        ("CXX", "false", "could not build it"),
        ("HF_SAGUARO_KERNELS", "torch", "torch (HF_SAGUARO_KERNELS=torch)"),
    ],
)
def test_without_it_nothing_is_lost(fresh, monkeypatch, variable, value, says):
    monkeypatch.setenv(variable, value)
    assert says in kernels.describe_few_rows()
    target, prompt = tiny_llama(0), torch.arange(5, 15)[None]
    plain = target.generate(prompt, max_new_tokens=20, do_sample=False)
    assert target.generate(
        prompt, max_new_tokens=20, do_sample=False, assistant_model=tiny_llama(1), speculation="saguaro"
    ).equal(plain)
    assert not list(fresh[0].iterdir())


@needs_compiler
def test_a_home_that_cannot_be_written_costs_speed_only(fresh, monkeypatch):
    monkeypatch.setattr(few_rows, "cached_assets_path", lambda *args, **kwargs: fresh[0] / "missing")
    assert "could not build it" in obstacle()


def test_what_it_is_made_for():
    assert "float16" in obstacle(torch.float16) and "float64" in obstacle(torch.float64)
    assert kernels.describe_few_rows().startswith(("compiled", "torch"))
    assert few_rows._SOURCE.exists()
