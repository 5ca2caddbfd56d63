# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Prompt files in Spec-Bench's format: one JSON object a line, `{"question_id", "category", "turns"}`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from ..errors import SaguaroError


# Spec-Bench's six columns, in its order. MT-bench's eight categories make one.
COLUMNS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


@dataclass
class Question:
    """One conversation: what the user says, turn by turn."""

    question_id: int | str
    category: str
    turns: list[str]

    @property
    def column(self) -> str:
        return "mt_bench" if self.category in _MT_BENCH else self.category


def read_prompts(path: str | Path | None = None, limit: int | None = None) -> list[Question]:
    """The questions of a file, or the package's own.

    Args:
        path (`str`, *optional*): a `.jsonl` file.
        limit (`int`, *optional*): how many questions to take, evenly over the columns.

    Raises:
        SaguaroError: for a file that cannot be read or a line that is no question; the text names the line.
    """
    source = resources.files(__package__) / "prompts.jsonl" if path is None else Path(path)
    try:
        lines = source.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SaguaroError(
            f"cannot read the prompts {path}: {error}. Give a .jsonl file in Spec-Bench's format."
        ) from None
    questions = [_question(line, number, source) for number, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise SaguaroError(f"{source} holds no prompt; give one JSON object a line with question_id, category, turns.")
    return questions if limit is None else _spread(questions, limit)


def _question(line: str, number: int, source) -> Question:
    try:
        values = json.loads(line)
        turns = values["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
            raise TypeError
    except (ValueError, KeyError, TypeError):
        raise SaguaroError(
            f"line {number} of {source} is no prompt; it needs a JSON object whose `turns` is a list of texts, as "
            '{"question_id": 1, "category": "qa", "turns": ["..."]}.'
        ) from None
    return Question(values.get("question_id", number), str(values.get("category", "other")), turns)


def _spread(questions: list[Question], limit: int) -> list[Question]:
    """The first `limit` questions when the columns take turns."""
    columns: dict[str, list[Question]] = {}
    for question in questions:
        columns.setdefault(question.column, []).append(question)
    longest = max(map(len, columns.values()))
    taken = [column[i] for i in range(longest) for column in columns.values() if i < len(column)]
    return taken[:limit]
