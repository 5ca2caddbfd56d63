# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Online adaptation: the draft learns from what its target accepts. Needs `pip install hf_saguaro[adapt]`."""

from .adapter import OnlineAdapter
from .config import AdaptationConfig
from .draft import make_draft
from .offline import train_on_records
from .recorder import FeedbackRecorder, load_records
from .resolve import resolve
from .watcher import AdapterWatcher


__all__ = [
    "AdaptationConfig",
    "AdapterWatcher",
    "FeedbackRecorder",
    "OnlineAdapter",
    "load_records",
    "make_draft",
    "resolve",
    "train_on_records",
]
