# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Accelerators for machines that have none: tensors that say `cuda:N`, compute on the CPU, and behave as if far away.

What a card punishes and a CPU forgives shows here: operands on two devices are an error, and everything that makes the
host wait for a device, or one device for another, is counted. Speed, streams, kernels and backward passes remain a matter for a real card.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
import threading
from collections import Counter
from pathlib import Path
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


aten = torch.ops.aten
CPU = torch.device("cpu")

# What cannot be answered without the values on the device.
_NEEDS_VALUES = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.masked_select.default,
    aten.nonzero.default,
    aten.repeat_interleave.Tensor,
}
# Operators that carry values from one device to another, and the place of the values among their arguments.
_CARRIES = {aten._to_copy.default: 0, aten.copy_.default: 1}
# Operators whose indices may lie on the host.
_INDEXES = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


class FarTensor(torch.Tensor):
    """A tensor on a stand-in device. Its values lie in `near`, on the CPU."""

    @staticmethod
    def __new__(cls, near: torch.Tensor, device: torch.device):
        far = torch.Tensor._make_wrapper_subclass(
            cls, near.shape, near.stride(), near.storage_offset(), dtype=near.dtype, device=device
        )
        far.near = near
        return far

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})

    def __deepcopy__(self, memo):
        return memo.setdefault(id(self), FarTensor(copy.deepcopy(self.near, memo), self.device))

    # What torch does in C++ for tensors of its own only.

    def tolist(self):
        return self.cpu().tolist()

    def untyped_storage(self):
        return self.near.untyped_storage()


class Waits:
    """What happened inside, by thread.

    Attributes:
        by_host: how often the host waited for a stand-in device.
        between_devices: how often values went from one device to another, by thread, source and destination. They come
            when the source has done all that it was given.
    """

    def __init__(self):
        self.by_host: Counter[str] = Counter()
        self.between_devices: Counter[tuple[str, str, str]] = Counter()

    def note(self, func, args, kwargs, device: torch.device | None) -> None:
        thread = threading.current_thread().name.rsplit("_", 1)[0]
        if func in _CARRIES and args[_CARRIES[func]].numel():
            source = args[_CARRIES[func]].device
            if source != device:
                self.between_devices[thread, str(source), str(device)] += 1
            waits = CPU in (source, device) and source != device and not _asks_for_no_wait(func, args, kwargs)
        elif func in _INDEXES:
            waits = any(index is not None and (index.dtype == torch.bool or index.device == CPU) for index in args[1])
        else:
            waits = func in _NEEDS_VALUES
        self.by_host[thread] += waits


_waits: Waits | None = None


def _run(func, args, kwargs):
    """Runs an operator on the CPU, as one on the device that its operands, or its arguments, name."""
    if func is aten._fused_sdp_choice.default:
        return 0  # attention as its plain operators
    operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    far = [operand for operand in operands if isinstance(operand, FarTensor)]
    device = _device_of(func, args, kwargs, operands)
    if _waits is not None and (far or operands and device is not None and device.type == "cuda"):
        _waits.note(func, args, kwargs, device)
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": CPU}
    args, kwargs = tree_map_only(FarTensor, lambda tensor: tensor.near, (args, kwargs))
    written = {id(tensor.near): tensor for tensor in far}

    def placed(result: torch.Tensor) -> torch.Tensor:
        if id(result) in written:
            return written[id(result)]
        return FarTensor(result, device) if device is not None and device.type == "cuda" else result

    return tree_map_only(torch.Tensor, placed, func(*args, **kwargs))


def _device_of(func, args, kwargs, operands: list[torch.Tensor]) -> torch.device | None:
    if kwargs.get("device") is not None:
        device = torch.device(kwargs["device"])
        return torch.device("cuda:0") if device == torch.device("cuda") else device
    if not operands or func in _CARRIES:
        return args[0].device if operands else None
    if func in _INDEXES:
        operands = [args[0], *(index for index in args[1] if isinstance(index, FarTensor)), *args[2:3]]
    # torch lets a number that lies on the host meet a tensor on any device.
    devices = {operand.device for operand in operands if operand.dim() or isinstance(operand, FarTensor)}
    if len(devices) > 1:
        raise RuntimeError(f"{func} got tensors on {' and '.join(sorted(map(str, devices)))}")
    return devices.pop() if devices else CPU


def _asks_for_no_wait(func, args, kwargs) -> bool:
    return bool(kwargs.get("non_blocking", func is aten.copy_.default and args[2:] and args[2]))


class _StandIns(TorchDispatchMode):
    """Makes new tensors on stand-in devices, on the thread that enters it."""

    _mode_key = torch._C._TorchDispatchModeKey.FAKE  # under this key torch asks no driver for its devices

    def __enter__(self):
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *error):
        torch._C._set_only_lift_cpu_tensors(False)
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


@contextlib.contextmanager
def stand_in_devices():
    """Within it `"cuda:0"`, `"cuda:1"`, .. can be had, on this thread and on those that it starts.

    Yields:
        [`Waits`] of what runs inside.
    """
    global _waits
    _register_guard()
    run = threading.Thread.run

    def run_with_stand_ins(thread):
        with _StandIns():
            run(thread)

    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # a near parameter cannot hold far data
    _waits = Waits()
    try:
        with (
            _StandIns(),
            mock.patch.object(threading.Thread, "run", run_with_stand_ins),
            mock.patch.object(torch.cuda, "synchronize"),
            mock.patch.object(torch.cuda, "current_stream"),
            mock.patch.object(torch.cuda, "stream"),
            mock.patch.dict(os.environ, {"HF_SAGUARO_KERNELS": "torch"}),
        ):
            yield _waits
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(overwrites)
        _waits = None


def on(device: str, model: nn.Module) -> nn.Module:
    """A copy of a model, on a stand-in device or on the CPU."""
    model = copy.deepcopy(model)
    if device == "cpu":
        return model
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                far = FarTensor(weight.detach(), torch.device(device))
                module._parameters[name] = nn.Parameter(far, weight.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = FarTensor(buffer, torch.device(device))
    return model


# torch switches the current device around many calls, also where an operator never reaches one.
_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {};
static const c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, new Guard());
"""


def compiler() -> str | None:
    """What builds the guard: a C++ compiler."""
    return shutil.which(os.environ.get("CXX") or "c++")


@functools.cache
def _register_guard() -> None:
    home = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/guard.so"
        flags = ["-std=c++20", "-shared", "-fPIC", f"-I{home}/include", f"-L{home}/lib", "-lc10", "-o", library]
        subprocess.run([compiler(), "-x", "c++", "-", *flags], input=_GUARD, text=True, check=True)
        ctypes.CDLL(library)
