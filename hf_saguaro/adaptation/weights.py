# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""The draft's weights: the user's own, kept aside, and the ones that serve."""

from __future__ import annotations

import hashlib

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..errors import SaguaroError


# name of the adapted module -> (A of shape [r, in], B of shape [out, r]), float32.
Adapter = dict[str, tuple[torch.Tensor, torch.Tensor]]


class DraftWeights:
    """The weights that adaptation may change, and a pristine copy of just those.

    What serves is always made from the pristine copy, W = W0 + scale * B @ A, and written into the parameters the draft
    has: merging and unmerging in place would drift in bfloat16, and new tensors would recompile whoever captured the old.

    Args:
        draft (`nn.Module`): the model that serves; it is not kept.
        names (`list[str]`): its modules to adapt.
        scale (`float`): of B @ A.

    Raises:
        SaguaroError: for weights that cannot be adapted in place: quantised, not loaded, spread over devices, shared
            between modules, or made under `torch.inference_mode()`.
    """

    def __init__(self, draft: nn.Module, names: list[str], scale: float):
        self.names, self.scale = names, scale
        modules = [draft.get_submodule(name) for name in names]
        self.serving = [module.weight for module in modules]
        self.transposed = [isinstance(module, Conv1D) for module in modules]
        _check(draft, names, self.serving)
        with torch.inference_mode(False), torch.no_grad():
            self.pristine = [weight.detach().clone() for weight in self.serving]
        self._fingerprint: str | None = None

    def merge(self, adapter: Adapter) -> list[torch.Tensor]:
        """The weights that serve `adapter`: W0 + scale * B @ A, summed in float32 and rounded once."""
        merged = []
        with torch.inference_mode(False), torch.no_grad():
            for name, pristine, transposed in zip(self.names, self.pristine, self.transposed):
                a, b = adapter[name]
                delta = self.scale * (b.float() @ a.float())
                delta = (delta.T if transposed else delta).to(pristine.device)
                merged.append((pristine.float() + delta).to(pristine.dtype))
        return merged

    def write(self, tensors: list[torch.Tensor]) -> None:
        """Makes `tensors` (from `merge`, or `pristine`) serve, in one copy into the storage the draft has."""
        devices = {weight.device for weight in self.serving if weight.is_cuda}
        # Draft passes may run on streams of their own: a publication is rare enough to wait for all of them.
        for device in devices:
            torch.cuda.synchronize(device)
        with torch.no_grad():
            torch._foreach_copy_([weight.detach() for weight in self.serving], tensors)
        for device in devices:
            torch.cuda.synchronize(device)

    def shared_with(self, target: nn.Module) -> list[str]:
        """Names of the adapted modules whose storage `target` uses too."""
        storages = {parameter.untyped_storage().data_ptr() for parameter in target.parameters()}
        return [
            name for name, weight in zip(self.names, self.serving) if weight.untyped_storage().data_ptr() in storages
        ]

    def fingerprint(self, draft: nn.Module) -> str:
        """A hash of the user's own draft, every parameter of it, whatever serves right now."""
        if self._fingerprint is None:
            own = {id(serving): pristine for serving, pristine in zip(self.serving, self.pristine)}
            digest = hashlib.blake2b(digest_size=16)
            for name, parameter in draft.named_parameters():
                tensor = own.get(id(parameter), parameter.detach()).contiguous().cpu()
                digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
                digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint


def _check(draft: nn.Module, names: list[str], weights: list[nn.Parameter]) -> None:
    quantised = [name for name, weight in zip(names, weights) if not weight.is_floating_point() or weight.itemsize < 2]
    if quantised or getattr(draft, "is_quantized", False):
        raise SaguaroError(
            f"{type(draft).__name__} is quantised, so learned changes cannot be merged into its weights; load the draft "
            "in float32, bfloat16 or float16 (the target may stay quantised)."
        )
    devices = {parameter.device for parameter in draft.parameters()}
    if len(devices) > 1 or any(device.type == "meta" for device in devices):
        raise SaguaroError(
            f"the draft's weights lie on {', '.join(sorted(map(str, devices)))}; online adaptation needs the whole draft "
            "on one device: load it without `device_map`, or with `device_map={'': device}`."
        )
    if any(parameter.is_inference() for parameter in draft.parameters()):
        raise SaguaroError(
            "the draft was loaded under `torch.inference_mode()`, so its weights can never be trained or changed; load "
            "it outside (generating under inference mode is fine)."
        )
    owners: dict[int, str] = {}
    for name, parameter in draft.named_parameters(remove_duplicate=False):
        pointer = parameter.untyped_storage().data_ptr()
        if pointer in owners and any(parameter is weight for weight in weights):
            raise SaguaroError(
                f"the draft's {name} and {owners[pointer]} share one weight, so adapting one would change the other; "
                "choose other `target_modules` or `layers`."
            )
        owners.setdefault(pointer, name)
