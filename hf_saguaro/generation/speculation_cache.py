# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""The speculation cache: outcome of a round -> prepared continuation (arXiv 2603.03251, Definition 4).

It lives for one round. Keys are (row, accept length, next token), so a row that was not in the round, or a text that
has moved on, cannot hit.
"""

from __future__ import annotations

from dataclasses import dataclass

from .drafter import Tree


@dataclass(frozen=True)
class Outcome:
    """What the target settled in a round, for the rows that go on.

    Attributes:
        rows (`list[int]`): rows that still want tokens.
        tokens (`dict[int, list[int]]`): what the round added to each row's text, k accepted tokens and t*.
        room (`int`): the most tokens that any of them may still get.
    """

    rows: list[int]
    tokens: dict[int, list[int]]
    room: int


class SpeculationCache:
    """The branches of one tree, found by outcome. The forks are read from the device, which ends its work on the tree."""

    def __init__(self, tree: Tree | None):
        self.tree = tree
        self._branches: dict[tuple[int, int, int], int] = {}
        if tree is not None:
            for row, forks in zip(tree.rows, tree.forks.tolist()):
                for branch, key in enumerate(zip(tree.depths, forks)):
                    self._branches.setdefault((row, *key), branch)

    def lookup(self, outcome: Outcome) -> dict[int, int]:
        """row -> branch, for the rows whose outcome was prepared."""
        keys = {row: (row, len(outcome.tokens[row]) - 1, outcome.tokens[row][-1]) for row in outcome.rows}
        return {row: self._branches[key] for row, key in keys.items() if key in self._branches}
