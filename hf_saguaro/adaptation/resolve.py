# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""From what a user writes in `SaguaroConfig.adaptation` to what `generate` feeds."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from ..errors import SaguaroError
from .adapter import OnlineAdapter
from .config import AdaptationConfig
from .recorder import FeedbackRecorder


# Adapters that were made from a config; they live as long as their draft.
_MADE: weakref.WeakKeyDictionary[nn.Module, OnlineAdapter] = weakref.WeakKeyDictionary()


def resolve(adaptation: Any, draft: nn.Module) -> OnlineAdapter | FeedbackRecorder:
    """The adapter that `SaguaroConfig.adaptation` means for a draft.

    Args:
        adaptation (`OnlineAdapter`, `FeedbackRecorder`, `AdaptationConfig`, `dict` or `True`): an adapter or recorder is
            used as it is; for a config (`True`: the defaults) an adapter is made at the first call and kept as long as
            the draft lives.
        draft (`PreTrainedModel`)

    Raises:
        SaguaroError: where the adapter is closed or another draft's, or the draft already adapts in another way.
    """
    draft = getattr(draft, "_orig_mod", draft)
    if isinstance(adaptation, FeedbackRecorder):
        return adaptation
    if isinstance(adaptation, OnlineAdapter):
        if adaptation.draft is not draft:
            raise SaguaroError(
                "`adaptation` is an OnlineAdapter of another draft than `assistant_model`; make one with "
                "OnlineAdapter(assistant_model)."
            )
        adaptation.check_open()
        return adaptation
    if isinstance(adaptation, dict):
        adaptation = AdaptationConfig.from_dict(adaptation)
    if adaptation is not True and not isinstance(adaptation, AdaptationConfig):
        raise SaguaroError(f"`adaptation` is {adaptation!r}; use an OnlineAdapter, an AdaptationConfig, True or None.")
    kept = _MADE.get(draft)
    if kept is not None and kept.is_open and adaptation in (True, kept.config):
        return kept
    _MADE[draft] = OnlineAdapter(draft, None if adaptation is True else adaptation)
    return _MADE[draft]
