# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Verification kernels: the functions of `reference.py`, in Triton or in plain torch; and the products of few rows.

The environment variable `HF_SAGUARO_KERNELS` says which:

* `auto` (the default): Triton for tensors on a GPU where it is installed, torch everywhere else;
* `triton`: Triton, or an error where it cannot run. For CPU tensors it runs under Triton's interpreter only
  (`TRITON_INTERPRET=1`, set before Triton is imported), which is for tests;
* `torch`: torch everywhere. Only this leaves out the product that a C++ compiler builds for the CPU (`few_rows.py`), too.

Triton and torch give the same numbers. Bad arguments raise `SaguaroError` before anything is launched.
"""

import contextlib
import functools
import importlib
import os

import torch

from ..errors import SaguaroError
from . import checks, few_rows, reference


__all__ = [
    "biased_draw",
    "commit_slots",
    "coupled_verification",
    "describe",
    "describe_few_rows",
    "keyed_gumbel",
    "keyed_uniform",
    "rejection_verification",
    "select_forks",
    "top_k_with_residual",
    "uses_triton",
    "wants_compiled",
]

_VARIABLE = "HF_SAGUARO_KERNELS"
_OLDEST_TRITON = (3, 3)
_TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _wish():
    wish = os.environ.get(_VARIABLE, "auto").strip().lower()
    if wish not in ("auto", "triton", "torch"):
        raise SaguaroError(f"{_VARIABLE}={wish} names no kernels; set it to auto, triton or torch.")
    return wish


@functools.cache
def _triton():
    """`(version, None)`, or `(None, why)` where Triton cannot be used. Triton is imported here and not before."""
    try:
        version = importlib.import_module("triton").__version__
    except ImportError as error:
        return None, f"triton cannot be imported ({error})"
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST_TRITON:
        return None, f"triton {version} is older than {'.'.join(map(str, _OLDEST_TRITON))}"
    return version, None


def _interpreted():
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def _interprets():
    """Whether Triton really interprets: it reads its variable while it is imported, and Transformers imports it."""
    language = importlib.import_module("triton.language")
    return type(language.max).__name__ == "InterpretedFunction"


def _obstacle(device, dtype=None):
    """Why Triton cannot serve such tensors, or `None`. The cheap questions come first: most calls stop there."""
    if device.type != "cuda" and not _interpreted():
        return f"the tensors are on {device}, where Triton runs under TRITON_INTERPRET=1 only"
    if device.type == "cuda" and _interpreted():
        return "TRITON_INTERPRET=1 is set, and the interpreter does not reach a GPU's memory"
    if dtype is not None and dtype not in _TRITON_DTYPES:
        return f"the scores are {str(dtype).removeprefix('torch.')}, and the Triton kernels compute in float32"
    obstacle = _triton()[1]
    if obstacle is None and _interpreted() and not _interprets():
        return "TRITON_INTERPRET=1 was set after Triton had been imported; set it before Python starts"
    return obstacle


def uses_triton(tensor):
    """Whether a kernel that is given this tensor runs in Triton."""
    device, dtype = tensor.device, tensor.dtype if tensor.is_floating_point() else None
    wish = _wish()
    if wish == "torch" or (wish == "auto" and device.type != "cuda"):
        return False
    obstacle = _obstacle(device, dtype)
    if obstacle is not None and wish == "triton":
        raise SaguaroError(f"{_VARIABLE}=triton, but {obstacle}; set it to auto or torch.")
    return obstacle is None


def wants_compiled():
    """Whether products of few rows may be computed by what a C++ compiler has built."""
    return _wish() != "torch"


def _dispatched(function, module, check, decisive, place=0):
    """The public function of a reference function: check, choose, call. The argument `decisive` has the device."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        check(*args, **kwargs)
        tensor = args[place] if len(args) > place else kwargs[decisive]
        if not uses_triton(tensor):
            return function(*args, **kwargs)
        kernel = getattr(importlib.import_module(f".{module}", __package__), function.__name__)
        with torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext():
            return kernel(*args, **kwargs)

    return call


keyed_uniform = _dispatched(reference.keyed_uniform, "noise", checks.keyed_noise, "rows", 1)
keyed_gumbel = _dispatched(reference.keyed_gumbel, "noise", checks.keyed_noise, "rows", 1)
coupled_verification = _dispatched(reference.coupled_verification, "coupled", checks.coupled_verification, "scores")
rejection_verification = _dispatched(
    reference.rejection_verification, "rejection", checks.rejection_verification, "target_scores"
)
select_forks = _dispatched(reference.select_forks, "forks", checks.select_forks, "scores")
biased_draw = _dispatched(reference.biased_draw, "cache_bias", checks.biased_draw, "scores")
top_k_with_residual = _dispatched(reference.top_k_with_residual, "top_k", checks.top_k_with_residual, "scores")
commit_slots = _dispatched(reference.commit_slots, "slots", checks.commit_slots, "source", 2)


def describe():
    """One line on which kernels run, and why; for `hf-saguaro env`."""
    try:
        wish = _wish()
    except SaguaroError as error:
        return f"none: {error}"
    setting = f"{_VARIABLE}={wish}"
    if wish == "torch":
        return f"torch ({setting})"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    obstacle = _obstacle(device)
    if wish == "triton":
        if obstacle is not None:
            return f"none: {setting}, but {obstacle}; set it to auto or torch"
        return f"triton {_triton()[0]} on {device} ({setting})"
    if device.type != "cuda":
        return f"torch ({setting}, no CUDA device)"
    if obstacle is not None:
        return f"torch ({setting}, but {obstacle})"
    return f"triton {_triton()[0]} on CUDA, torch elsewhere ({setting})"


def describe_few_rows():
    """One line on what may compute products of few rows on the CPU, and why; for `hf-saguaro env`."""
    try:
        obstacle = few_rows.obstacle() if wants_compiled() else f"{_VARIABLE}=torch"
    except SaguaroError as error:
        return f"none: {error}"
    return "compiled for this processor" if obstacle is None else f"torch ({obstacle})"
