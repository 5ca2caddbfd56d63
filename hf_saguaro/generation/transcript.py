# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""The text as it is emitted: one token at a time and row by row, each checked against every stopping rule at once.

So a row ends at exactly the token at which plain `generate` ends it, although a round accepts several.
"""

from __future__ import annotations

import sys

import torch
from transformers import MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxTimeCriteria, StopStringCriteria


_FIRST_ROOM = 1024  # columns allocated at once; longer texts double them


class Transcript:
    """Sequences, stops, streamer and recorded scores of one `generate` call.

    Args:
        input_ids (`Tensor` of shape `[B, L]`): prompts as given, padding included.
        stopping_criteria (`StoppingCriteriaList`): as `generate` prepared them.
        pad_token_id (`int`): fills rows that ended early.
        streamer (`BaseStreamer`, *optional*): gets every step of the batch once, in order.
        keep_scores, keep_logits (`bool`): record one entry per emitted token.
    """

    def __init__(self, input_ids: torch.Tensor, stopping_criteria: StoppingCriteriaList, pad_token_id: int, streamer=None,
                 keep_scores: bool = False, keep_logits: bool = False):  # fmt: skip
        self.batch_size, self.prompt_length = input_ids.shape
        self._row_criteria, self._step_criteria = StoppingCriteriaList(), StoppingCriteriaList()
        self._eos: set[int] = set()
        self._max_length, ends_rows = sys.maxsize, False
        for criteria in stopping_criteria:
            if type(criteria) is EosTokenCriteria:
                self._eos.update(criteria.eos_token_id.flatten().tolist())
            elif type(criteria) is MaxLengthCriteria:
                self._max_length = min(criteria.max_length, self._max_length)
            elif type(criteria) in (StopStringCriteria, MaxTimeCriteria):
                self._row_criteria.append(criteria)
            else:
                self._step_criteria.append(criteria)
            ends_rows |= hasattr(criteria, "eos_token_id")
        # Plain `generate` pads rows that have stopped only if there is an EOS rule; without one it keeps extending every
        # row until the last has stopped.
        self._pads = ends_rows
        self._pad = pad_token_id
        self._ids = self._with_room(input_ids, min(self._max_length - self.prompt_length, _FIRST_ROOM))
        self.generated: list[list[int]] = [[] for _ in range(self.batch_size)]
        self._stopped_at: list[int | None] = [None] * self.batch_size
        self._judged = 0
        self._shown_scores: list[torch.Tensor] = []
        self._streamer, self._streamed = streamer, 0
        self._scores = [[] for _ in range(self.batch_size)] if keep_scores else None
        self._logits = [[] for _ in range(self.batch_size)] if keep_logits else None

    def _with_room(self, ids: torch.Tensor, room: int) -> torch.Tensor:
        return torch.cat([ids, ids.new_full((self.batch_size, max(room, 1)), self._pad)], dim=1)

    def prefix(self, row: int) -> torch.Tensor:
        """The ids of a row so far: `[1, L]`, a view."""
        return self._ids[row : row + 1, : self.prompt_length + len(self.generated[row])]

    def prefixes(self, rows: list[int]) -> torch.Tensor:
        """The ids of several rows, `[R, L]`, as far as the longest of them goes; others are filled up with padding."""
        return self._ids[rows, : self.prompt_length + max(len(self.generated[row]) for row in rows)]

    @property
    def prompts(self) -> torch.Tensor:
        return self._ids[:, : self.prompt_length]

    def remaining(self, row: int) -> int:
        """Tokens that the row may still get."""
        return self._max_length - self.prompt_length - len(self.generated[row])

    @property
    def running(self) -> list[int]:
        """Rows that still want tokens."""
        return [row for row in range(self.batch_size) if not self.is_over(row)]

    def append(
        self, row: int, token: int, scores: torch.Tensor | None = None, logits: torch.Tensor | None = None
    ) -> bool:
        """Emits one token. `scores` and `logits` (`[V]`) are recorded if asked for. Returns whether the row is over."""
        length = self.prompt_length + len(self.generated[row])
        if length == self._ids.shape[1]:
            self._ids = self._with_room(self._ids, length)
        self._ids[row, length].fill_(token)
        self.generated[row].append(token)
        if self._scores is not None:
            self._scores[row].append(scores.clone())
        if self._logits is not None:
            self._logits[row].append(logits.clone())
        if self._stopped_at[row] is None and self._stops(row, token):
            self._stopped_at[row] = len(self.generated[row])
        if self._step_criteria:
            self._judge_steps()
        return self.is_over(row)

    def is_over(self, row: int) -> bool:
        """Whether the row wants no more tokens."""
        if self.remaining(row) <= 0:
            return True
        if self._pads:
            return self._stopped_at[row] is not None
        return None not in self._stopped_at and len(self.generated[row]) >= max(self._stopped_at)

    def _stops(self, row: int, token: int) -> bool:
        over = token in self._eos or self.remaining(row) == 0
        if self._row_criteria:
            over |= bool(torch.as_tensor(self._row_criteria(self.prefix(row), None)).any())
        return over

    def _judge_steps(self) -> None:
        """Asks the user's criteria about every step that all rows have reached, the whole batch at once.

        They may compare rows, so they see what plain `generate` shows them. A row that is ahead of the others is cut
        back if it turns out to have ended.
        """
        while self._judged < self._reached():
            self._judged = step = self._judged + 1
            ids = self._ids[:, : self.prompt_length + step].contiguous()
            if self._scores is not None:
                self._shown_scores.append(self._column(self._scores, step - 1))
            recorded = None if self._scores is None else tuple(self._shown_scores)
            verdict = torch.as_tensor(self._step_criteria(ids, recorded)).expand(self.batch_size).tolist()
            for row, stops in enumerate(verdict):
                if stops and len(self.generated[row]) >= step <= (self._stopped_at[row] or step):
                    self._stopped_at[row] = step
                    if self._pads:
                        self._cut(row, step)

    def _reached(self) -> int:
        """Steps that plain `generate` has taken once it has what is here: those of the row that is furthest behind."""
        behind = [len(self.generated[row]) for row in range(self.batch_size) if not self.is_over(row)]
        return min(behind, default=self.new_length)

    def _cut(self, row: int, length: int) -> None:
        for kept in (self.generated, self._scores, self._logits):
            if kept is not None:
                del kept[row][length:]
        self._ids[row, self.prompt_length + length :] = self._pad

    def stream(self) -> None:
        """Hands the streamer every step that all rows have reached."""
        if self._streamer is None:
            return
        last = max(map(len, self.generated)) if self.running else self.new_length
        while self._streamed < last:
            step = []
            for row, tokens in enumerate(self.generated):
                if len(tokens) > self._streamed:
                    step.append(tokens[self._streamed])
                elif self.is_over(row):
                    step.append(self._pad)
                else:
                    return
            self._streamer.put(torch.tensor(step))
            self._streamed += 1

    def end(self) -> None:
        if self._streamer is not None:
            self._streamer.end()

    @property
    def new_length(self) -> int:
        """Columns that generation added."""
        longest = max(map(len, self.generated))
        return longest if self._pads else min(longest, max(stop or longest for stop in self._stopped_at))

    @property
    def new_tokens(self) -> int:
        longest = self.new_length
        return sum(min(len(tokens), longest) for tokens in self.generated)

    def sequences(self) -> torch.Tensor:
        """`[B, L + new_length]`, int64."""
        return self._ids[:, : self.prompt_length + self.new_length].clone()

    def scores(self) -> tuple[torch.Tensor, ...] | None:
        """One `[B, V]` for each new column; rows that had ended hold zeros."""
        return self._columns(self._scores)

    def logits(self) -> tuple[torch.Tensor, ...] | None:
        return self._columns(self._logits)

    def _columns(self, entries: list[list[torch.Tensor]] | None) -> tuple[torch.Tensor, ...] | None:
        if entries is None:
            return None
        return tuple(self._column(entries, step) for step in range(self.new_length))

    @staticmethod
    def _column(entries: list[list[torch.Tensor]], step: int) -> torch.Tensor:
        blank = torch.zeros_like(entries[0][0])
        return torch.stack([row[step] if step < len(row) else blank for row in entries])
