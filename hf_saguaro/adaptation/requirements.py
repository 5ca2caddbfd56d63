# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""What adaptation asks for before it begins."""

from __future__ import annotations

from torch import nn

from ..errors import SaguaroError


def require_peft() -> None:
    """Raises a [`SaguaroError`] that names the extra where `peft` is missing."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise SaguaroError(
            "online adaptation needs the `peft` package, which is not installed: pip install hf_saguaro[adapt]"
        ) from error


def check_draft(draft: nn.Module) -> None:
    """Raises a [`SaguaroError`] for a draft that cannot be adapted."""
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    if isinstance(draft, PeftModel) or any(isinstance(module, BaseTunerLayer) for module in draft.modules()):
        raise SaguaroError(
            "the draft already carries a PEFT adapter; merge it first, `draft = draft.merge_and_unload()`, and adapt the "
            "merged model."
        )
    if getattr(draft.config, "is_encoder_decoder", False):
        raise SaguaroError(
            f"{type(draft).__name__} is an encoder-decoder model; only decoder-only drafts can be adapted."
        )
