# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""A backup that costs nothing: copy what followed the same n-gram before (prompt lookup decoding, Saxena 2023)."""

from __future__ import annotations


MAX_NGRAM = 3


class NGramIndex:
    """Where each n-gram of a growing text was seen last. Adding a token and looking up are constant time."""

    def __init__(self, tokens: list[int]):
        self._tokens: list[int] = []
        # What followed: the end of the text itself has no continuation yet, so an n-gram is entered one token late.
        self._ends: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            end = len(self._tokens)
            for n in range(1, min(MAX_NGRAM, end) + 1):
                self._ends[tuple(self._tokens[end - n : end])] = end
            self._tokens.append(token)

    def continuation(self, length: int) -> list[int]:
        """Up to `length` tokens that followed the longest n-gram which ends the text; empty if it is new."""
        end = len(self._tokens)
        for n in range(min(MAX_NGRAM, end), 0, -1):
            seen = self._ends.get(tuple(self._tokens[end - n : end]))
            if seen is not None:
                return self._tokens[seen : seen + length]
        return []
