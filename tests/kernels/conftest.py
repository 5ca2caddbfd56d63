# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""The same kernel tests run in torch, under Triton's CPU interpreter, and on a GPU (`-m gpu`)."""

import importlib.util

import pytest
import torch


HAS_CUDA = torch.cuda.is_available()
HAS_TRITON = importlib.util.find_spec("triton") is not None


_TORCH = pytest.param(("torch", "cpu"), id="torch")
_INTERPRETER = pytest.param(("triton", "cpu"), id="interpreter")
_CUDA = pytest.param(("triton", "cuda"), id="cuda", marks=pytest.mark.gpu)


def _choose(monkeypatch, kernels, device):
    if device == "cuda" and not HAS_CUDA:
        pytest.skip("needs a CUDA device")
    if kernels == "triton" and not HAS_TRITON:
        pytest.skip("needs triton")
    if kernels == "triton" and device == "cpu" and HAS_CUDA:
        pytest.skip("Triton is not interpreted where there is a CUDA device")
    monkeypatch.setenv("HF_SAGUARO_KERNELS", kernels)
    return device


@pytest.fixture(params=[_TORCH, _INTERPRETER, _CUDA])
def any_device(request, monkeypatch):
    """The device of the tensors, with every implementation in turn behind `hf_saguaro.kernels`."""
    return _choose(monkeypatch, *request.param)


@pytest.fixture(params=[_INTERPRETER, _CUDA])
def triton_device(request, monkeypatch):
    """The device of the tensors, with Triton behind `hf_saguaro.kernels`, for comparison with `reference`."""
    return _choose(monkeypatch, *request.param)


@pytest.fixture(params=[_TORCH, _CUDA])
def fast_device(request, monkeypatch):
    """Likewise for tests that draw a hundred thousand times, which the interpreter is too slow for."""
    return _choose(monkeypatch, *request.param)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(20)
