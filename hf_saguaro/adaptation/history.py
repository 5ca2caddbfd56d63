# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""What happened to the draft, and why."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from typing import Any

from transformers.utils import logging


logger = logging.get_logger("transformers.hf_saguaro.adaptation")

MAX_EVENTS = 1000


class History:
    """The last events, JSON-safe. Any thread may add one."""

    def __init__(self):
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._lock = threading.RLock()  # the garbage collector may close an adapter in the middle
        self._warned: set[str] = set()

    def add(self, event: str, reason: str, **figures: Any) -> None:
        """Records `{"event", "reason", "time" (seconds since the epoch), **figures}`."""
        entry = {
            "event": event,
            "reason": reason,
            "time": time.time(),
            **{key: _plain(value) for key, value in figures.items()},
        }
        with self._lock:
            self._events.append(entry)

    def warn(self, event: str, reason: str, **figures: Any) -> None:
        """Records a fault, and tells the user through the log once per kind."""
        self.add(event, reason, **figures)
        if event not in self._warned:
            self._warned.add(event)
            logger.warning(f"Online adaptation: {event}: {reason}. Generation goes on; see `adapter.history()`.")

    def warn_once(self, event: str, reason: str) -> None:
        """The same for what would repeat with every call."""
        if event not in self._warned:
            self.warn(event, reason)

    def extend(self, events: list[dict[str, Any]]) -> None:
        """Takes over the events of an earlier life."""
        with self._lock:
            self._events.extend(events)

    def events(self) -> list[dict[str, Any]]:
        with self._lock:
            return [dict(event) for event in self._events]


def _plain(value: Any) -> Any:
    """JSON has no infinities: they become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
