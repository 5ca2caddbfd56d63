# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Whether a target really reads slots, masks and positions as the loop hands them over.

Transformers has hundreds of decoders, and some count positions themselves or build their own mask: over a slot cache
those would write other text without an error. So before a model decodes for the first time it reads a few tokens both
ways, once with a rejected token in between, and the scores have to agree.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch
from torch import nn

from .. import compat
from ..errors import SaguaroError
from .slot_model import SlotModel


_READ, _NEW = (5, 3), 3  # tokens that two rows have read before, and that both read then
# Largest difference of scores, as a share of their spread. Rounding stays far below; a wrong position is far above.
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}
_LOW_PRECISION_TOLERANCE = 0.2
_checked: weakref.WeakSet = weakref.WeakSet()


def vouch_for(model: nn.Module) -> None:
    """Spares a model the check: one that replays recorded scores knows no other tokens."""
    _checked.add(model)


@torch.no_grad()
def check_reads_slots(model: nn.Module) -> None:
    """Reads a few tokens with and without slots; remembered for each model.

    Raises:
        SaguaroError: if the scores differ.
    """
    if model in _checked:
        return
    try:
        with _without_dropout(model):
            difference = _difference(model)
    except Exception as error:
        # Whatever a forward does not understand about slots, it is this model's and not the caller's fault.
        raise SaguaroError(
            f"the target, {type(model).__name__}, cannot read tokens from slots ({type(error).__name__}: {error}). Generate "
            "without `speculation`."
        ) from error
    if not difference < _TOLERANCE.get(model.dtype, _LOW_PRECISION_TOLERANCE):
        raise SaguaroError(
            f"the target, {type(model).__name__}, reads tokens differently when a mask and positions say where they stand "
            f"(scores part by {difference:.2g} of their spread), so its text would not be its own. Generate without "
            "`speculation`, or use a model with rotary positions."
        )
    _checked.add(model)


@contextlib.contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """With dropout on, no two readings agree."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _difference(model: nn.Module) -> float:
    """How far the scores of two rows of different lengths part from those of plain forwards, as a share of their spread."""
    device = compat.execution_device(model)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    ids = (torch.arange(2 * (_READ[0] + _NEW), device=device).view(2, -1) * 7919 + 11) % vocab_size
    texts = [ids[row : row + 1, : read + _NEW] for row, read in enumerate(_READ)]
    slots = SlotModel(model, 2)
    expected = torch.cat([slots.plain_logits(text)[:, -_NEW:].float() for text in texts])
    for row, read in enumerate(_READ):
        slots.forward(texts[row][:, :read], [0], keep=1, rows=[row])
    new = torch.cat([text[:, -_NEW:] for text in texts])
    slots.forward((new[:, :2] + 1) % vocab_size, list(_READ), keep=1)  # two tokens that get rejected
    seen = slots.forward(new, list(_READ), keep=_NEW).float()
    return float((seen - expected).abs().max() / expected.std().clamp_min(1e-6))
