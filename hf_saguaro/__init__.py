# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Speculative speculative decoding for `model.generate`.

Importing registers the strategy:

    out = model.generate(**inputs, assistant_model=draft, speculation="saguaro")
"""

from .config import SaguaroConfig
from .errors import SaguaroError
from .generation.candidate_generator import SaguaroCandidateGenerator
from .generation.strategy import SaguaroGenerateOutput, last_stats
from .registration import custom_generate, disable, enable, is_enabled
from .stats import SaguaroStats


__version__ = "0.1.0"

_ADAPTATION = ("AdaptationConfig", "OnlineAdapter", "make_draft")

__all__ = [
    "SaguaroCandidateGenerator",
    "SaguaroConfig",
    "SaguaroError",
    "SaguaroGenerateOutput",
    "SaguaroStats",
    "custom_generate",
    "disable",
    "enable",
    "is_enabled",
    "last_stats",
    *_ADAPTATION,
]


def __getattr__(name: str):
    # peft is an extra: it is imported by the first one who adapts.
    if name in _ADAPTATION:
        from . import adaptation

        return getattr(adaptation, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


enable()
