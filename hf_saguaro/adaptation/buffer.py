# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""The feedback that is kept: bounded in rows and bytes, however long the stream."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Iterator

from .feedback import FeedbackSequence


# One finished sequence in 8 is held out, drawn anew in each block of 8 so that no rhythm of the traffic can line up.
HELD_OUT_BLOCK = 8
HELD_OUT_SEQUENCES = 48

_SHELVES = ("fresh", "reservoir", "held_out")
_COUNTERS = ("sequences", "rows_seen", "rows_outside_vocabulary", "dropped")


class _Shelf:
    """A bounded list of sequences that knows its size."""

    def __init__(self, max_rows: int, max_bytes: int):
        self.max_rows, self.max_bytes = max_rows, max_bytes
        self.items: deque[FeedbackSequence] = deque()
        self.rows = self.nbytes = 0

    def append(self, sequence: FeedbackSequence) -> None:
        self.items.append(sequence)
        self.rows += sequence.rows
        self.nbytes += sequence.nbytes

    def remove(self, index: int) -> FeedbackSequence:
        sequence = self.items[index]
        del self.items[index]
        self.rows -= sequence.rows
        self.nbytes -= sequence.nbytes
        return sequence

    @property
    def overflows(self) -> bool:
        return self.rows > self.max_rows or self.nbytes > self.max_bytes

    def clear(self) -> None:
        self.items.clear()
        self.rows = self.nbytes = 0


class FeedbackBuffer:
    """Fresh sequences, a reservoir of old ones and a held-out ring. Any thread may call it; nothing waits for long.

    Args:
        max_rows (`int`): feedback rows kept in all: half fresh, three eighths in the reservoir, one eighth held out.
        row_bytes (`int`): bytes of one row; `max_rows * row_bytes` bounds the memory, contexts included.
        seed (`int`)
    """

    def __init__(self, max_rows: int, row_bytes: int, seed: int):
        self.fresh, self.reservoir, self.held_out = (
            _Shelf(max(1, max_rows * eighths // 8), max_rows * row_bytes * eighths // 8) for eighths in (4, 3, 1)
        )
        self._lock = threading.RLock()  # the garbage collector may close an adapter in the middle
        self._random = random.Random(seed)
        self._left_in_block: list[bool] = []
        self._in_reservoir_ever = 0
        self.sequences = self.rows_seen = self.rows_outside_vocabulary = self.dropped = 0

    # The generation thread

    def draw_held_out(self) -> bool:
        """Whether the next sequence is for validation only."""
        with self._lock:
            if not self._left_in_block:
                self._left_in_block = [True] + [False] * (HELD_OUT_BLOCK - 1)
                self._random.shuffle(self._left_in_block)
            return self._left_in_block.pop()

    def add(self, sequence: FeedbackSequence) -> None:
        """Takes a finished piece. What no longer fits the fresh queue moves to the reservoir, oldest first."""
        with self._lock:
            sequence.number = self.sequences
            self.sequences += 1
            self.rows_seen += sequence.rows
            self.rows_outside_vocabulary += sequence.outside_vocabulary
            if sequence.held_out:
                self.held_out.append(sequence)
                while len(self.held_out.items) > HELD_OUT_SEQUENCES or self.held_out.overflows:
                    self.held_out.remove(0)
                    self.dropped += 1
                return
            self.fresh.append(sequence)
            while self.fresh.overflows:
                self._store(self.fresh.remove(0))

    # The trainer

    def take_fresh(self, count: int) -> list[FeedbackSequence]:
        """Up to `count` fresh sequences, oldest first. `keep` them once they have been trained on."""
        with self._lock:
            return [self.fresh.remove(0) for _ in range(min(count, len(self.fresh.items)))]

    def replayed(self, count: int) -> list[FeedbackSequence]:
        """Up to `count` different sequences of the reservoir, at random."""
        with self._lock:
            return self._random.sample(list(self.reservoir.items), min(count, len(self.reservoir.items)))

    def keep(self, sequences: list[FeedbackSequence]) -> None:
        """Offers trained sequences to the reservoir."""
        with self._lock:
            for sequence in sequences:
                self._store(sequence)

    def newest_fresh(self, count: int) -> list[FeedbackSequence]:
        """The last `count` sequences that were not trained on yet, oldest first. They stay where they are."""
        with self._lock:
            return list(self.fresh.items)[-count:]

    def validation(self) -> list[FeedbackSequence]:
        """The held-out ring, oldest first."""
        with self._lock:
            return list(self.held_out.items)

    def clear(self) -> None:
        with self._lock:
            for shelf in self._shelves():
                shelf.clear()

    def contents(self) -> dict[str, list[FeedbackSequence]]:
        """All that is kept, by shelf."""
        with self._lock:
            return {name: list(getattr(self, name).items) for name in _SHELVES}

    def load_contents(self, contents: dict[str, list[FeedbackSequence]]) -> None:
        with self._lock:
            for name in _SHELVES:
                for sequence in contents[name]:
                    getattr(self, name).append(sequence)

    @property
    def rows(self) -> int:
        return sum(shelf.rows for shelf in self._shelves())

    @property
    def nbytes(self) -> int:
        return sum(shelf.nbytes for shelf in self._shelves())

    def state(self) -> dict:
        """JSON-safe state of the draws and counters; no feedback."""
        with self._lock:
            version, internal, gauss = self._random.getstate()
            return {
                "random": [version, list(internal), gauss],
                "left_in_block": list(self._left_in_block),
                "in_reservoir_ever": self._in_reservoir_ever,
                **{name: getattr(self, name) for name in _COUNTERS},
            }

    def load_state(self, state: dict) -> None:
        with self._lock:
            version, internal, gauss = state["random"]
            self._random.setstate((version, tuple(internal), gauss))
            self._left_in_block = list(state["left_in_block"])
            self._in_reservoir_ever = state["in_reservoir_ever"]
            for name in _COUNTERS:
                setattr(self, name, state[name])

    def _shelves(self) -> Iterator[_Shelf]:
        return (getattr(self, name) for name in _SHELVES)

    def _store(self, sequence: FeedbackSequence) -> None:
        """Reservoir sampling: whatever the length of the stream, each sequence is as likely to be kept as any other."""
        self._in_reservoir_ever += 1
        size = len(self.reservoir.items)
        self.reservoir.append(sequence)
        if not self.reservoir.overflows:
            return
        place = self._random.randrange(self._in_reservoir_ever)
        self.reservoir.remove(place if place < size else size)
        self.dropped += 1
        while self.reservoir.overflows:  # lengths differ: one that leaves may not make room for one that comes
            self.reservoir.remove(self._random.randrange(len(self.reservoir.items)))
            self.dropped += 1
