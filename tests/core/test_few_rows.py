# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Linear layers for few rows: the same numbers by another product, only where it is meant, and nothing left changed."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hf_saguaro import SaguaroConfig
from hf_saguaro.generation import few_rows as few_rows_module
from hf_saguaro.generation.few_rows import FewRows, fastest_product
from hf_saguaro.generation.slot_model import SlotModel
from hf_saguaro.kernels.few_rows import few_rows_product, obstacle


needs_compiler = pytest.mark.skipif(obstacle() is not None, reason=f"the compiled product: {obstacle()}")
PRODUCTS = [few_rows_module._transposed, pytest.param(few_rows_product, marks=needs_compiler)]


@pytest.fixture(params=PRODUCTS, ids=["transposed", "compiled"])
def always(request, monkeypatch):
    """As on a processor where that product is the fastest; notes the shapes that it is given."""
    shapes = []

    def noting(x, weight, bias):
        shapes.append(tuple(x.shape))
        return request.param(x, weight, bias)

    monkeypatch.setattr(few_rows_module, "fastest_product", lambda *args: noting)
    return shapes


def layer(bias=False, dtype=torch.float32):
    return nn.Linear(7, 5, bias=bias).to(dtype)


@torch.no_grad()
@pytest.mark.parametrize("shape", [(2, 7), (1, 3, 7), (1, 4, 7), (5, 7), (6, 7), (7, 7), (2, 4, 7), (9, 1, 7), (64, 7)])
@pytest.mark.parametrize("bias", [False, True])
def test_the_product_is_the_same(always, shape, bias):
    linear, x = layer(bias), torch.randn(shape, dtype=torch.float32)
    expected = linear(x)
    with FewRows(linear).replaced(x.numel() // 7):
        result = linear(x)
    torch.testing.assert_close(result, expected)
    assert result.is_contiguous() and always == [shape]


@torch.no_grad()
def test_other_rows_and_inputs_are_left_alone(always):
    linear = layer()
    few_rows = FewRows(linear)
    with few_rows.replaced(4):
        linear(torch.randn(65, 7))
        linear(torch.randn(0, 7))
        with torch.autocast("cpu", torch.bfloat16):
            assert linear(torch.randn(4, 7)).dtype == torch.bfloat16
        with torch.enable_grad():
            linear(torch.randn(4, 7)).sum().backward()
        trained = threading.Thread(target=lambda: linear(torch.randn(4, 7)).sum().backward())
        trained.start()
        trained.join()
        with pytest.raises(RuntimeError):
            linear(torch.randn(4, 7, dtype=torch.float64))
    with few_rows.replaced(65):
        linear(torch.randn(4, 7))
    assert always == [] and linear.weight.grad is not None


class OwnProduct(torch.Tensor):
    """A weight that knows linear layers and nothing else, as quantized ones do."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return "its own" if func is F.linear else super().__torch_function__(func, types, args, kwargs or {})


class OwnForward(nn.Linear):
    def forward(self, x):
        return "its own"


@torch.no_grad()
def test_layers_with_products_of_their_own_are_left_alone(always):
    wrapped, quantized, derived = layer(), layer(), OwnForward(7, 5)
    wrapped.forward = lambda x: "its own"
    quantized.weight = nn.Parameter(quantized.weight.as_subclass(OwnProduct), requires_grad=False)
    model = nn.ModuleList([wrapped, quantized, derived])
    with FewRows(model).replaced(4):
        assert [linear(torch.randn(4, 7)) for linear in model] == ["its own"] * 3
    assert always == [] and wrapped(None) == "its own"


@torch.no_grad()
def test_nothing_is_left_changed(always):
    linear = layer()
    before = dict(vars(linear))
    few_rows = FewRows(linear)
    with pytest.raises(RuntimeError), few_rows.replaced(4):
        linear(torch.randn(4, 8))
    with few_rows.replaced(4), few_rows.replaced(4):  # two threads, one model
        linear(torch.randn(4, 7))
    assert vars(linear).keys() == before.keys()


@pytest.mark.parametrize("execution", ["sync", "async"])
def test_a_verify_uses_it_and_the_text_is_the_targets(always, target, drafts, prompt, execution):
    plain = target.generate(prompt, max_new_tokens=30, do_sample=False)
    assert always == []
    out = target.generate(prompt, max_new_tokens=30, do_sample=False, assistant_model=drafts["fair"],
                          speculation=SaguaroConfig(num_assistant_tokens=3, execution=execution))  # fmt: skip
    assert out.tolist() == plain.tolist()
    assert (1, 4, 32) in always
    assert not any("forward" in vars(module) for module in target.modules())


@torch.no_grad()
def test_what_is_compiled_keeps_its_own_kernels(always, target):
    tokens = torch.tensor([[5, 6, 7, 8]])
    for compiled, uses in ((copy.deepcopy(target), True), (copy.deepcopy(target), False)):
        if not uses:
            compiled.compile(backend="eager")
        always.clear()
        SlotModel(compiled, 1).forward(tokens, [0], keep=4)
        assert bool(always) == uses


@needs_compiler
def test_a_trial_decides(monkeypatch):
    """The clock says which product is the fastest, and the usual one stays where others win little."""
    seconds = {}
    monkeypatch.setattr(few_rows_module, "_seconds", lambda product, *operands: seconds[product])
    others = few_rows_module._transposed, few_rows_product
    for compiled, transposed, chosen in ((1.0, 2.0, few_rows_product), (2.0, 1.0, others[0]), (2.95, 2.95, F.linear)):
        fastest_product.cache_clear()
        seconds.update({F.linear: 3.0, few_rows_product: compiled, others[0]: transposed})
        assert fastest_product(4, torch.float32) is chosen
    seconds.update({few_rows_product: 1.0, others[0]: 0.1})
    assert fastest_product(4, torch.bfloat16) is few_rows_product
    assert fastest_product(4, torch.bfloat16, compiled=False) is F.linear
    assert fastest_product(4, torch.float16) is F.linear
    fastest_product.cache_clear()
