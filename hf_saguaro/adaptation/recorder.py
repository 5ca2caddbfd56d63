# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Feedback as a dataset: what servers write, and what the offline trainer reads."""

from __future__ import annotations

import os
import threading
import uuid
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import SaguaroError
from .buffer import FeedbackBuffer
from .feedback import FeedbackSequence, FeedbackSession
from .losses import TeacherRows


SHARD_PATTERN = "feedback-*.parquet"


class FeedbackRecorder:
    """Takes the place of an `OnlineAdapter` and writes what it is told: nothing is learned, nothing changes.

        with FeedbackRecorder("records") as recorder:
            model.generate(**inputs, assistant_model=draft, speculation=SaguaroConfig(adaptation=recorder))

    The folder gets parquet shards that `datasets` loads; many servers may write to one folder. The records hold token ids
    of prompts and answers. They tell what the target thought, whatever drafted, so any draft with this vocabulary can be
    trained on them. Rejected branches are not recorded.

    Args:
        directory (`str` or `PathLike`): created if missing.
        top_k_logits (`int`, *optional*, defaults to 64): target log-probabilities kept a row.
        vocab_size (`int`, *optional*): the draft's, where it knows fewer tokens than the target.
        shard_rows (`int`, *optional*, defaults to 16384): feedback rows a shard.
        seed (`int`, *optional*, defaults to 0): of the choice of held-out sequences, one in eight.
    """

    version = 0

    def __init__(self, directory: str | os.PathLike, *, top_k_logits: int = 64, vocab_size: int | None = None,
                 shard_rows: int = 16384, seed: int = 0):  # fmt: skip
        _require_datasets()
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.top_k_logits, self.vocab_size, self.shard_rows = top_k_logits, vocab_size, shard_rows
        self._draws = FeedbackBuffer(1, 1, seed)
        self._pending: list[FeedbackSequence] = []
        self._lock = threading.Lock()

    def attach(self, target: nn.Module) -> None:
        """Called with the target before the first round; it changes nothing."""

    def begin(self, prompts: list[torch.Tensor], temperature: float | None = 0.0) -> FeedbackSession:
        """See [`OnlineAdapter.begin`]."""
        held_out = [self._draws.draw_held_out() for _ in prompts]
        temperature = 1.0 if temperature is None else temperature
        vocab_size = self.vocab_size or torch.iinfo(torch.int32).max
        return FeedbackSession(prompts, temperature, self.top_k_logits, vocab_size, held_out, self._take, lambda: 0)

    def before_round(self) -> None:
        """Nothing ever changes."""

    def flush(self) -> None:
        """Writes what is pending as one more shard."""
        with self._lock:
            pending, self._pending = self._pending, []
        if not pending:
            return
        try:
            _write_shard(self.directory, pending)
        except BaseException:
            with self._lock:
                self._pending[:0] = pending  # for the next try, `close` at the latest
            raise

    def close(self) -> None:
        """Writes the rest."""
        self.flush()

    def __enter__(self) -> FeedbackRecorder:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def _take(self, sequence: FeedbackSequence) -> None:
        with self._lock:
            self._pending.append(sequence)
            is_full = sum(pending.rows for pending in self._pending) >= self.shard_rows
        if is_full:
            self.flush()


def load_records(directory: str | os.PathLike):
    """The records of a folder.

    Returns:
        `datasets.Dataset`: one row a sequence; see `sequence_of`.

    Raises:
        SaguaroError: where there are none.
    """
    datasets = _require_datasets()
    shards = sorted(map(str, Path(directory).glob(SHARD_PATTERN)))
    if not shards:
        raise SaguaroError(
            f"{directory} holds no {SHARD_PATTERN}; write records with FeedbackRecorder or `hf-saguaro record`."
        )
    return datasets.load_dataset("parquet", data_files=shards, split="train")


def sequence_of(record: dict[str, Any]) -> FeedbackSequence:
    """A row of the dataset as the trainer reads it."""
    teacher = TeacherRows(
        torch.tensor(record["log_probs"], dtype=torch.float32),
        torch.tensor(record["token_ids"], dtype=torch.int32),
        torch.tensor(record["log_residual"], dtype=torch.float32),
    )
    return FeedbackSequence(
        tokens=torch.tensor(record["tokens"], dtype=torch.int32),
        start=record["start"],
        first=record["first"],
        teacher=teacher,
        temperature=record["temperature"],
        held_out=record["held_out"],
    )


def _write_shard(directory: Path, sequences: list[FeedbackSequence]) -> None:
    datasets = _require_datasets()
    import pyarrow
    from pyarrow import parquet

    def lists(parts: list[torch.Tensor]) -> Any:
        """One list a part, without a Python object a number: `generate` waits for this."""
        offsets = [0]
        for part in parts:
            offsets.append(offsets[-1] + len(part))
        whole = torch.cat(parts)
        values = pyarrow.array(whole.reshape(-1).numpy())
        if whole.ndim == 2:
            width = whole.shape[1]
            values = pyarrow.ListArray.from_arrays([row * width for row in range(len(whole) + 1)], values)
        return pyarrow.ListArray.from_arrays(offsets, values)

    columns = {
        "tokens": lists([sequence.tokens for sequence in sequences]),
        "start": [sequence.start for sequence in sequences],
        "first": [sequence.first for sequence in sequences],
        **{name: lists([getattr(sequence.teacher, name) for sequence in sequences]) for name in TeacherRows._fields},
        "temperature": [sequence.temperature for sequence in sequences],
        "held_out": [sequence.held_out for sequence in sequences],
    }
    floats = datasets.Sequence(datasets.Value("float32"))
    features = datasets.Features(
        {
            "tokens": datasets.Sequence(datasets.Value("int32")),
            "start": datasets.Value("int32"),
            "first": datasets.Value("int32"),
            "log_probs": datasets.Sequence(floats),
            "token_ids": datasets.Sequence(datasets.Sequence(datasets.Value("int32"))),
            "log_residual": floats,
            "temperature": datasets.Value("float64"),
            "held_out": datasets.Value("bool"),
        }
    )
    name = f"feedback-{uuid.uuid4().hex}.parquet"
    aside = directory / f".{name}"
    parquet.write_table(pyarrow.table(columns, schema=features.arrow_schema), aside)
    os.replace(aside, directory / name)  # a reader never sees half a shard


def _require_datasets():
    try:
        import datasets
    except ImportError as error:
        raise SaguaroError(
            "records need the `datasets` package, which is not installed: pip install hf_saguaro[adapt]"
        ) from error
    return datasets
