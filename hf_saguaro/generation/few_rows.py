# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Matrix products of a few rows on a CPU: what a verify of K + 1 tokens is made of.

In float32 the usual kernel reads a matrix once for one row, but takes about three times as long for four. The same
product written the other way round, `(W x^T)^T`, takes hardly longer than one row, so a verify costs what a step costs;
for the dozens of rows of a tree or a batch it is still the faster one. It is made for 4 rows or a multiple of 8: three
take longer than four, so rows of zeros fill them up. Only the order of the operands changes; sums are rounded as any
other kernel may round them.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


_MOST_ROWS = 64


class _Transposed(TorchFunctionMode):
    """Writes every linear layer of few rows the other way round. Holds for the thread that enters it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear and not kwargs and len(args) >= 2 and _has_few_rows(*args[:2]):
            return _transposed(*args)
        return func(*args, **(kwargs or {}))


def few_rows(rows: int, dtype: torch.dtype, device: torch.device) -> contextlib.AbstractContextManager:
    """Inside, products of `rows` rows are fast. Nothing changes where that would not pay: one row, many rows, another
    dtype, a GPU, or a CPU whose kernels have no such weakness."""
    is_meant = dtype == torch.float32 and device.type == "cpu" and not torch.is_autocast_enabled("cpu")
    if is_meant and 1 < rows <= _MOST_ROWS and _pays():
        return _Transposed()
    return contextlib.nullcontext()


def _has_few_rows(x: torch.Tensor, weight: torch.Tensor) -> bool:
    if type(x) is not torch.Tensor or type(weight) not in (torch.Tensor, nn.Parameter) or weight.dim() != 2:
        return False  # quantized weights, for one, know products of their own
    rows = x.numel() // x.shape[-1]
    return 1 < rows <= _MOST_ROWS and x.dtype == weight.dtype == torch.float32 and weight.device.type == "cpu"


def _transposed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    flat = x.reshape(-1, x.shape[-1])
    rows = flat.shape[0]
    y = torch.mm(weight, F.pad(flat, (0, 0, 0, _filled_up(rows) - rows)).T).T[:rows].contiguous()
    return (y if bias is None else y + bias).view(*x.shape[:-1], -1)


def _filled_up(rows: int) -> int:
    """The number of rows that takes least time among those of at least `rows`."""
    if rows in (5, 6):
        return rows
    return 4 if rows <= 4 else -(-rows // 8) * 8


@functools.cache
def _pays() -> bool:
    """Found out once by a trial: four rows through a matrix that no cache next to a core holds."""
    plain = {"dtype": torch.float32, "device": "cpu"}
    weight, x = torch.ones(4096, 1024, **plain), torch.ones(4, 1024, **plain)
    return 1.25 * _seconds(lambda: _transposed(x, weight)) < _seconds(lambda: F.linear(x, weight))


def _seconds(work: Callable[[], torch.Tensor]) -> float:
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best
