# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""From what a user types to a target, a draft and a tokenizer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..errors import SaguaroError
from ..generation.validation import check_models
from . import pair


REPLICA = "replica:"
MODEL_HELP = (
    "a Hub id, a local folder, or replica:SIZE (target) and replica:drop=LAYERS (draft) for the benchmark pair that is "
    f"made from the package {pair.PACKAGE}; sizes are {', '.join(pair.REPLICA_SIZES)}"
)


@dataclass
class LoadedPair:
    """Two models that fit each other."""

    target: PreTrainedModel
    draft: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    target_name: str
    draft_name: str

    def encode(self, conversation: list[dict[str, str]]) -> torch.Tensor:
        """The input ids of a conversation, `[1, L]`, through the chat template where the tokenizer has one."""
        if self.tokenizer.chat_template:
            text = self.tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
            encoded = self.tokenizer(text, return_tensors="pt", add_special_tokens=False)
        else:
            encoded = self.tokenizer("\n\n".join(turn["content"] for turn in conversation), return_tensors="pt")
        return encoded["input_ids"].to(self.target.device)


def load_pair(target: str, draft: str, *, dtype: str = "auto", device: str = "auto") -> LoadedPair:
    """Loads both models onto one device and checks that they fit each other.

    Args:
        target, draft (`str`): see `MODEL_HELP`.
        dtype (`str`): `"auto"` takes what was saved, and for a replica what is fastest here.
        device (`str`): `"auto"` takes a GPU where there is one.

    Raises:
        SaguaroError: when a model cannot be loaded, or the two do not fit.
    """
    place = _device(device)
    shipped = pair.load_smollm2() if REPLICA in (target[: len(REPLICA)], draft[: len(REPLICA)]) else None
    kind = _dtype(dtype, shipped, place)
    models = [_load(name, who, shipped, kind, place) for name, who in ((target, "target"), (draft, "draft"))]
    tokenizer = shipped[1] if target.startswith(REPLICA) else _tokenizer(target)
    check_models(*models, (None, None))
    return LoadedPair(*models, tokenizer, target, draft)


def load_model(name: str, who: str, *, dtype: str = "auto", device: str = "cpu") -> PreTrainedModel:
    """One model alone; arguments and errors as for [`load_pair`], and `who` is what an error calls it."""
    shipped = pair.load_smollm2() if name.startswith(REPLICA) else None
    place = _device(device)
    return _load(name, who, shipped, _dtype(dtype, shipped, place), place)


def _dtype(name: str, shipped, device: torch.device) -> torch.dtype | None:
    """`None` takes what was saved."""
    if name != "auto":
        return getattr(torch, name)
    return fastest_dtype(device) if shipped else None


def fastest_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the hardware computes in it, float32 where it would only be converted: processors without such
    instructions are several times slower in bfloat16. Found out by a short trial, 32 rows through one matrix."""
    if device.type != "cpu":
        return torch.bfloat16
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        matrix, rows = torch.ones(2048, 2048, dtype=dtype), torch.ones(32, 2048, dtype=dtype)
        seconds[dtype] = min(_seconds(lambda m=matrix, r=rows: nn.functional.linear(r, m)) for _ in range(5))
    return min(seconds, key=seconds.get)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SaguaroError(f"--device {name} is no device; use cpu, cuda or cuda:N.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SaguaroError(f"--device {name}: this machine has no CUDA device. Use cpu.")
    return device


def _load(name: str, who: str, shipped, dtype: torch.dtype | None, device: torch.device) -> PreTrainedModel:
    if name.startswith(REPLICA):
        return _replica(name.removeprefix(REPLICA), who, shipped[0], dtype, device)
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype or "auto")
    except (OSError, ValueError) as error:
        raise SaguaroError(f"cannot load the {who} {name}: {_first_line(error)} Name {MODEL_HELP}.") from None
    return model.to(device).eval()


def _replica(what: str, who: str, small: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    if what in pair.REPLICA_SIZES:
        return pair.widen(small, *pair.REPLICA_SIZES[what], dtype=dtype, device=device)
    if what.startswith("drop="):
        layers = what.removeprefix("drop=").split(",")
        if all(layer.isdigit() for layer in layers):
            return pair.drop_layers(small, [int(layer) for layer in layers], dtype=dtype).to(device)
    raise SaguaroError(f"the {who} {REPLICA}{what} is none of the benchmark pair; name {MODEL_HELP}.")


def _tokenizer(name: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise SaguaroError(f"cannot load the tokenizer of {name}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".") + "."
