# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Linear layers for few rows on a CPU: what a verify of K + 1 tokens and a draft pass are made of.

The usual kernels read a matrix once for one row, but take about three times as long for four. Two ways out: a kernel of
our own (`kernels/few_rows.cpp`), for which even eight rows are hardly dearer than one; and where there is no compiler to
build it, the same product in float32 written the other way round, `(W x^T)^T`. Each is taken where a trial on this very
processor finds it to be the fastest. Only the order of sums changes; they are rounded as any other kernel may round them.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import time
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional as F

from .. import kernels
from ..kernels.few_rows import few_rows_product, fits, obstacle


Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]

_MOST_ROWS = 64
# Rows that a trial is held with, each for those up to the next; and by how much a product must be faster to be taken.
_TRIED_ROWS = (1, 4, 24)
_ADVANTAGE = 1.1


class FewRows:
    """The linear layers of `model` that can do better for few rows; none where the usual kernels are the best.

    Trials are held here, in advance, while nothing else runs that they would disturb or be disturbed by. Layers that
    something else has taken hold of (offloading, quantization) are left alone.
    """

    def __init__(self, model: nn.Module):
        compiled = kernels.wants_compiled()
        self._forwards = []
        for layer in model.modules():
            if type(layer) is nn.Linear and "forward" not in vars(layer) and layer.weight.device.type == "cpu":
                products = [fastest_product(rows, layer.weight.dtype, compiled) for rows in _TRIED_ROWS]
                if any(product is not F.linear for product in products):
                    self._forwards.append((vars(layer), functools.partial(_forward, layer, products)))

    @contextlib.contextmanager
    def replaced(self, rows: int) -> Iterator[None]:
        """Inside, these layers compute products of few rows as fast as they can. `rows` are those of the pass."""
        forwards = self._forwards if rows <= _MOST_ROWS else []
        for attributes, forward in forwards:
            attributes["forward"] = forward
        try:
            yield
        finally:
            for attributes, _ in forwards:
                attributes.pop("forward", None)  # a pass of the same model on another thread may have been here


def _forward(layer: nn.Linear, products: list[Product], x: torch.Tensor) -> torch.Tensor:
    product = F.linear
    if _is_meant(x, layer.weight) and fits(x, layer.weight, layer.bias):
        rows = x.numel() // x.shape[-1]
        product = products[bisect.bisect(_TRIED_ROWS, rows) - 1] if rows <= _MOST_ROWS else F.linear
    return product(x, layer.weight, layer.bias)


def _is_meant(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether another product may be taken: not for autograd, autocast or weights with products of their own."""
    return (
        type(x) is torch.Tensor
        and type(weight) in (torch.Tensor, nn.Parameter)
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
    )


@functools.cache
def fastest_product(rows: int, dtype: torch.dtype, compiled: bool = True) -> Product:
    """Found out once by a trial, on a matrix that no cache next to a core holds; `compiled` allows our own kernel."""
    candidates = [few_rows_product] if compiled and obstacle(dtype) is None else []
    if dtype == torch.float32 and rows > 1:
        candidates.append(_transposed)
    if not candidates:
        return F.linear
    weight, x = (torch.ones(n, 2048, dtype=dtype, device="cpu") for n in (4096, rows))
    seconds = {product: _seconds(product, x, weight) for product in (F.linear, *candidates)}
    best = min(candidates, key=seconds.__getitem__)
    return best if _ADVANTAGE * seconds[best] < seconds[F.linear] else F.linear


def _transposed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    flat = x.reshape(-1, x.shape[-1])
    rows = flat.shape[0]
    y = torch.mm(weight, F.pad(flat, (0, 0, 0, _filled_up(rows) - rows)).T).T[:rows].contiguous()
    return (y if bias is None else y + bias).view(*x.shape[:-1], -1)


def _filled_up(rows: int) -> int:
    """The number of rows that takes least time among those of at least `rows`: 4 and multiples of 8 go well."""
    if rows in (5, 6):
        return rows
    return 4 if rows <= 4 else -(-rows // 8) * 8


def _seconds(product: Product, x: torch.Tensor, weight: torch.Tensor) -> float:
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        product(x, weight, None)
        best = min(best, time.perf_counter() - began)
    return best
