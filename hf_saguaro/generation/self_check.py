# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Whether a target really reads slots, masks and positions as the loop hands them over.

Transformers has hundreds of decoders, and some count positions themselves or build their own mask: over a slot cache
those would write other text without an error. So before a model decodes for the first time it reads a few tokens both
ways, once with a rejected token in between, and the scores have to agree.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn

from .. import compat
from ..errors import SaguaroError
from .slot_model import SlotModel


_TOKENS, _READ = 8, 5
# Largest difference of scores, as a share of their spread. Rounding stays far below; a wrong position is far above.
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}
_LOW_PRECISION_TOLERANCE = 0.2
_checked: weakref.WeakSet = weakref.WeakSet()


@torch.no_grad()
def check_reads_slots(model: nn.Module) -> None:
    """Reads a few tokens with and without slots; remembered for each model.

    Raises:
        SaguaroError: if the scores differ.
    """
    if model in _checked or model.training:  # with dropout on, no two readings agree
        return
    device = compat.execution_device(model)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    ids = (torch.arange(_TOKENS, device=device) * 7919 + 11)[None] % vocab_size
    expected = model(input_ids=ids, use_cache=False).logits[:, _READ:].float()
    slots = SlotModel(model, 1)
    slots.forward(ids[:, :_READ], [0], keep=1)
    slots.forward((ids[:, _READ : _READ + 2] + 1) % vocab_size, [_READ], keep=1)  # two tokens that get rejected
    seen = slots.forward(ids[:, _READ:], [_READ], keep=_TOKENS - _READ).float()
    difference = (seen - expected).abs().max() / expected.std().clamp_min(1e-6)
    if not difference < _TOLERANCE.get(model.dtype, _LOW_PRECISION_TOLERANCE):
        raise SaguaroError(
            f"the target, {type(model).__name__}, reads tokens differently when a mask and positions say where they stand "
            f"(scores part by {float(difference):.2g} of their spread), so its text would not be its own. Generate without "
            "`speculation`, or use a model with rotary positions."
        )
    _checked.add(model)
