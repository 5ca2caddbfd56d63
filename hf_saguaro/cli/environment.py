# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Where a run took place and with which weights: what every result carries and `hf-saguaro env` prints."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel


PACKAGES = ("hf-saguaro", "torch", "transformers", "tokenizers", "accelerate", "peft", "datasets", "triton")


def environment(device: torch.device | None = None) -> dict[str, Any]:
    """Versions, device, threads and commit.

    Args:
        device (`torch.device`, *optional*): where the models are; the best there is by default.
    """
    device = device or default_device()
    return {
        **{package: _version(package) for package in PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "cores": available_cores(),
        "commit": _commit(),
    }


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def available_cores() -> int:
    """Cores that this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe_model(model: PreTrainedModel, name: str) -> dict[str, Any]:
    """What identifies the weights that were measured: `sha256` is over every parameter, in order, with its name."""
    digest = hashlib.sha256()
    for parameter_name, parameter in model.named_parameters():
        digest.update(f"{parameter_name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        digest.update(parameter.detach().contiguous().flatten().view(torch.uint8).cpu().numpy())
    return {
        "name": name,
        "class": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": model.config.num_hidden_layers,
        "dtype": str(model.dtype).removeprefix("torch."),
        "sha256": digest.hexdigest(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()}, {torch.backends.cpu.get_cpu_capability()}"
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the checkout that this package is imported from, with a mark when it has been changed."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        git = ["git", "-C", str(root)]
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit}{'+changes' if changed.strip() else ''}"
