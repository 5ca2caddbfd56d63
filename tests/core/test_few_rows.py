# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Products of a few rows, written the other way round: the same numbers, and only where they are meant to be."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch.nn import functional as F

from hf_saguaro import SaguaroConfig
from hf_saguaro.generation import few_rows as few_rows_module
from hf_saguaro.generation.few_rows import few_rows
from hf_saguaro.generation.slot_model import SlotModel


CPU = torch.device("cpu")


@pytest.fixture
def always(monkeypatch):
    """As on a processor where it pays; counts the products."""
    stock, shapes = few_rows_module._transposed, []

    def counting(x, weight, bias=None):
        shapes.append(tuple(x.shape))
        return stock(x, weight, bias)

    monkeypatch.setattr(few_rows_module, "_pays", lambda: True)
    monkeypatch.setattr(few_rows_module, "_transposed", counting)
    return shapes


@pytest.mark.parametrize("shape", [(2, 7), (1, 3, 7), (1, 4, 7), (5, 7), (6, 7), (7, 7), (2, 4, 7), (9, 1, 7), (64, 7)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_product_is_the_same(always, shape, has_bias):
    x, weight = torch.randn(shape, dtype=torch.float32), torch.randn(5, 7)
    bias = torch.randn(5) if has_bias else None
    expected = F.linear(x, weight, bias)
    with few_rows(x.numel() // 7, torch.float32, CPU):
        result = F.linear(x, weight, bias)
    torch.testing.assert_close(result, expected)
    assert result.is_contiguous() and always == [shape]


def test_other_rows_dtypes_and_threads_are_left_alone(always):
    weight = torch.randn(5, 7)
    with few_rows(4, torch.float32, CPU):
        F.linear(torch.randn(1, 7), weight)
        F.linear(torch.randn(65, 7), weight)
        F.linear(torch.randn(4, 7).double(), weight.double())
        other = threading.Thread(target=F.linear, args=(torch.randn(4, 7), weight))
        other.start()
        other.join()
    for rows, dtype in ((1, torch.float32), (65, torch.float32), (4, torch.bfloat16)):
        with few_rows(rows, dtype, CPU):
            F.linear(torch.randn(4, 7), weight)
    assert always == []


class OwnProduct(torch.Tensor):
    """A weight that knows linear layers and nothing else, as quantized ones do."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        assert func is F.linear
        return "its own"


def test_weights_with_products_of_their_own_and_autocast_are_left_alone(always):
    weight = torch.randn(5, 7).as_subclass(OwnProduct)
    with few_rows(4, torch.float32, CPU):
        assert F.linear(torch.randn(4, 7), weight) == "its own"
        assert F.linear(torch.randn(4, 7), torch.randn(7)).shape == (4,)
    with torch.autocast("cpu", torch.bfloat16), few_rows(4, torch.float32, CPU):
        assert F.linear(torch.randn(4, 7), torch.randn(5, 7), torch.randn(5)).dtype == torch.bfloat16
    assert always == []


@pytest.mark.parametrize("execution", ["sync", "async"])
def test_a_verify_uses_it_and_the_text_is_the_targets(always, target, drafts, prompt, execution):
    plain = target.generate(prompt, max_new_tokens=30, do_sample=False)
    assert always == []
    out = target.generate(prompt, max_new_tokens=30, do_sample=False, assistant_model=drafts["fair"],
                          speculation=SaguaroConfig(num_assistant_tokens=3, execution=execution))  # fmt: skip
    assert out.tolist() == plain.tolist()
    assert (1, 4, 32) in always


def test_what_is_compiled_keeps_its_own_kernels(always, target):
    tokens = torch.tensor([[5, 6, 7, 8]])
    for compiled, uses in ((copy.deepcopy(target), True), (copy.deepcopy(target), False)):
        if not uses:
            compiled.compile(backend="eager")
        always.clear()
        SlotModel(compiled, 1).forward(tokens, [0], keep=4)
        assert bool(always) == uses
