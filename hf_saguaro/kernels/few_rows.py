# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""The product of a few rows with a matrix on a CPU, from `few_rows.cpp`.

The machine's own C++ compiler builds it for the machine's own processor, once, in about a second; the library is kept
among the assets of the Hugging Face cache. Where there is no compiler, nothing is lost but speed.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from huggingface_hub import cached_assets_path

from ..errors import SaguaroError


_SOURCE = Path(__file__).with_suffix(".cpp")
_FLAGS = ("-O3", "-fno-tree-vectorize", "-march=native", "-fopenmp", "-fPIC")
_DTYPES = {torch.float32: "product_float32", torch.bfloat16: "product_bfloat16"}
_LONGEST_BUILD = 60.0  # seconds


def few_rows_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear` for few rows; sums are formed in float32, and a row's do not depend on the others.

    Args:
        x (`Tensor` of shape `[..., k]`), weight (`Tensor` of shape `[n, k]`, contiguous): on the CPU, both float32 or
            both bfloat16.
        bias (`Tensor` of shape `[n]`, *optional*): of the same dtype, contiguous.

    Returns:
        `Tensor` of shape `[..., n]` in the dtype of `x`. `obstacle()` must be `None`.

    Raises:
        SaguaroError: operands of other shapes, dtypes, devices or strides.
    """
    if not fits(x, weight, bias):
        shapes = ", ".join(f"{list(o.shape)} {o.dtype} on {o.device}" for o in (x, weight, bias) if o is not None)
        raise SaguaroError(
            f"A product of few rows needs one dtype on the CPU, contiguous, x [.., k], w [n, k]: {shapes}."
        )
    n, k = weight.shape
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], n)
    pointers = x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr()
    _library()[0][weight.dtype](*pointers, x.numel() // k, n, k, torch.get_num_threads())
    return y


def fits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether these are operands that a pointer to their first element describes."""
    return (
        weight.dim() == 2
        and x.shape[-1:] == weight.shape[1:]
        and x.numel() > 0
        and x.dtype == weight.dtype
        and x.device.type == weight.device.type == "cpu"
        and weight.is_contiguous()
        and (bias is None or (bias.dtype == x.dtype and bias.shape == weight.shape[:1] and bias.is_contiguous()))
    )


def obstacle(dtype: torch.dtype = torch.float32) -> str | None:
    """Why there is no such product here, or `None`."""
    if dtype not in _DTYPES:
        return f"it is not made for {str(dtype).removeprefix('torch.')}"
    return _library()[1]


@functools.cache
def _library() -> tuple[dict[torch.dtype, ctypes._CFuncPtr], str | None]:
    """The functions by dtype, or none of them and why."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        return {}, "there is no C++ compiler"
    try:
        library = ctypes.CDLL(str(_built(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        return {}, f"{compiler} could not build it ({said[0] if said else type(error).__name__})"
    functions = {dtype: getattr(library, name) for dtype, name in _DTYPES.items()}
    for function in functions.values():
        function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 3 + [ctypes.c_int]
        function.restype = None
    return functions, None


def _built(compiler: str) -> Path:
    """The shared library's file. Its name says what it was made from and for: a home may be shared by many machines."""
    made_from = f"{_SOURCE.read_text()}{compiler}{_FLAGS}{platform.machine()}{_processor()}"
    name = f"few_rows-{hashlib.sha256(made_from.encode()).hexdigest()[:16]}.so"
    file = cached_assets_path("hf_saguaro", namespace="kernels") / name
    if not file.exists():
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            part, whole = Path(folder, "few_rows.o"), Path(folder, name)
            _run(compiler, *_FLAGS, "-c", str(_SOURCE), "-o", str(part))
            # Not linked with an OpenMP of its own: it finds the one that torch has loaded, and shares its threads.
            _run(compiler, "-shared", str(part), "-o", str(whole))
            whole.replace(file)
    return file


def _processor() -> str:
    """What the processor can do, as Linux lists it."""
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text().splitlines() if listing.exists() else [platform.processor()]
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), lines[0])


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=_LONGEST_BUILD)
