# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Training on records, on one process or many: `accelerate launch` a script that calls [`train_on_records`]."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import SaguaroError
from . import persistence
from .buffer import HELD_OUT_SEQUENCES
from .config import AdaptationConfig
from .gate import Candidate, ShadowGate, Verdict, numeric_gate
from .layers import modules_to_adapt
from .learner import Learner
from .recorder import load_records, sequence_of
from .requirements import check_draft, require_peft
from .student import Student
from .weights import DraftWeights


def train_on_records(draft: nn.Module, records: str | os.PathLike, output_directory: str | os.PathLike,
                     config: AdaptationConfig | None = None, *, epochs: int = 1, batch_size: int = 8,
                     accelerator: Any = None, progress: Any = iter) -> dict[str, Any]:  # fmt: skip
    """Trains an adapter on recorded feedback with the loss, the optimizer and the gates of the online trainer.

    Every process of an `accelerate` launch takes its share of each batch; gradients are averaged. The main process puts
    the result through the gates on the held-out records and writes it only if it beats the bare draft.

    Args:
        draft (`PreTrainedModel`): is moved to the process's device and left otherwise as it is.
        records (`str` or `PathLike`): folder that `FeedbackRecorder` wrote.
        output_directory (`str` or `PathLike`): gets the adapter, its card and the figures.
        config (`AdaptationConfig`, *optional*): its cadence and buffer fields have no meaning here.
        epochs (`int`, *optional*, defaults to 1)
        batch_size (`int`, *optional*, defaults to 8): sequences a step and process.
        accelerator (`accelerate.Accelerator`, *optional*): one is made if missing.
        progress (`Callable`, *optional*): wraps the list of batches, e.g. `tqdm`.

    Returns:
        `dict`: `published` (`bool`), `reason`, `steps`, `loss`, and the figures of the gate; the same on every process.

    Raises:
        SaguaroError: for a draft that cannot be adapted, or records that do not fit it.
    """
    require_peft()
    check_draft(draft)
    config = AdaptationConfig() if config is None else config
    if config.discard_weight:
        raise SaguaroError("`discard_weight` needs rejected branches, which are not recorded; set it to 0.")
    if accelerator is None:
        from accelerate import Accelerator

        accelerator = Accelerator()
    with accelerator.main_process_first():
        dataset = load_records(records)
    draft.to(accelerator.device)
    weights = DraftWeights(draft, modules_to_adapt(draft, config), config.scale)
    student = Student(draft, weights, config)
    learner = Learner(student, config)
    vocab_size = draft.get_input_embeddings().weight.shape[0]

    held_out = [index for index, flag in enumerate(dataset["held_out"]) if flag]
    learnt = [index for index, flag in enumerate(dataset["held_out"]) if not flag]
    batches = list(_batches(learnt, epochs, batch_size * accelerator.num_processes, config.seed))
    for number, batch in enumerate(progress(batches)):
        learner.rate_factor = 1 - number / len(batches)  # unlike a stream, a run has an end to settle at
        own = batch[accelerator.process_index :: accelerator.num_processes]
        sequences = [_checked(sequence_of(dataset[index]), vocab_size) for index in own]
        learner.step(sequences, reduce=lambda tensors: _average(tensors, accelerator))

    outcome = [{}]
    if accelerator.is_main_process:
        validation = [_checked(sequence_of(dataset[index]), vocab_size) for index in held_out[-HELD_OUT_SEQUENCES:]]
        base = weights.fingerprint(draft)
        candidate = Candidate(student.snapshot(), 0, base, learner.steps, origin=str(records))
        verdict = numeric_gate(candidate, weights, base, serving=0)
        if verdict.passed:
            shadow = ShadowGate(student).examine(candidate.adapter, 0, None, validation)
            verdict = Verdict(shadow.passed, shadow.reason, verdict.figures | shadow.figures)
        outcome = [{"published": verdict.passed, "reason": verdict.reason, "steps": learner.steps,
                    "loss": learner.last_loss, **verdict.figures}]  # fmt: skip
        if verdict.passed:
            _write(Path(output_directory), candidate, student, outcome[0], dataset.num_rows)
    if accelerator.num_processes > 1:
        from accelerate.utils import broadcast_object_list

        broadcast_object_list(outcome)
    return outcome[0]


def _batches(indices: list[int], epochs: int, size: int, seed: int) -> Iterator[list[int]]:
    """Whole batches in a new order each epoch; the last one is filled up from the front, so that no process goes without."""
    draw = random.Random(seed)
    for _ in range(epochs):
        order = draw.sample(indices, len(indices))
        for first in range(0, len(order), size):
            batch = order[first : first + size]
            while len(batch) < size:
                batch += order[: size - len(batch)]
            yield batch


def _average(tensors: list[torch.Tensor], accelerator: Any) -> None:
    """One reduction for all of them, in place."""
    if accelerator.num_processes == 1:
        return
    flat = accelerator.reduce(torch.cat([tensor.reshape(-1) for tensor in tensors]), reduction="mean")
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(part.view_as(tensor))


def _checked(sequence, vocab_size: int):
    largest = max(int(sequence.tokens.max()), int(sequence.teacher.token_ids.max()))
    if largest >= vocab_size:
        raise SaguaroError(
            f"the records name token {largest}, but the draft knows {vocab_size}; record with `vocab_size={vocab_size}`, or "
            "use a draft with the target's vocabulary."
        )
    return sequence


def _write(directory: Path, candidate: Candidate, student: Student, outcome: dict[str, Any], sequences: int) -> None:
    from ..hub.model_card import adapter_card

    event = {"event": "published", "version": 1, "origin": candidate.origin, **outcome}
    metrics = {"version": 1, "published": 1, "refused": 0, "rolled_back": 0, "steps": candidate.step, "rows": sequences}
    persistence.write_files(
        directory,
        lambda aside: (
            persistence.write_adapter(aside, candidate.adapter, student.peft_config, candidate.base),
            (aside / persistence.HISTORY_FILE).write_text(json.dumps(event) + "\n"),
            (aside / "README.md").write_text(
                adapter_card(str(directory), student.peft_config.base_model_name_or_path, [event], metrics)
            ),
        ),
        last=persistence.ADAPTER_FILE,
    )
