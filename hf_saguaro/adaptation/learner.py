# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Optimizer steps on feedback. Knows no threads, no versions: the online trainer and the offline one both drive it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .config import AdaptationConfig
from .feedback import FeedbackSequence
from .losses import row_losses
from .student import Student, TrainingItem, branch_items, passes, text_item
from .weights import Adapter


WARMUP_STEPS = 10
MAX_GRAD_NORM = 1.0
# Decoupled weight decay on LoRA pulls towards the bare draft.
WEIGHT_DECAY = 0.01
CLEAN_PUBLICATIONS_TO_RECOVER = 5
# A stream that taught nothing for long must not leave a learner that can learn nothing from the next one.
SMALLEST_RATE_FACTOR = 0.125


class Interrupted(Exception):
    """The trainer was told to stop between two passes; the step leaves no trace."""


class Learner:
    """AdamW on a student's LoRA matrices.

    The loss of a step is the mean over its text rows, plus `discard_weight` times the mean over the rows of one rejected
    branch a sequence (drawn by the step number, so that a resumed run draws the same).
    """

    def __init__(self, student: Student, config: AdaptationConfig):
        self.student, self.config = student, config
        self.steps = self.discarded_steps = self.trained_tokens = 0
        self.rate_factor = 1.0
        self.last_loss: float | None = None
        self._clean_publications = 0
        self._new_optimizer()

    def step(self, sequences: list[FeedbackSequence], check: Callable[[], None] = lambda: None,
             reduce: Callable[[list[torch.Tensor]], None] = lambda tensors: None) -> float | None:  # fmt: skip
        """One optimizer step.

        Args:
            sequences (`list[FeedbackSequence]`): what to learn from.
            check (`Callable`): called between passes; may raise [`Interrupted`].
            reduce (`Callable`): averages the gradients and the loss with those of other processes, in place, so that
                all of them keep or discard the step together.

        Returns:
            The loss, or `None` where the step was discarded: nothing to learn from, or something not finite. A discarded
            step leaves weights, moments and step count as they were (a zero gradient would move AdamW).
        """
        items = self._items(sequences)
        text_rows = sum(item.rows for item in items if not item.discarded)
        branch_rows = sum(item.rows for item in items if item.discarded)
        loss = math.nan
        try:
            if text_rows:
                loss = 0.0
                for batch in passes(items):
                    check()
                    loss += self._accumulate(batch, text_rows, branch_rows)
            gradients = [parameter.grad for parameter in self.student.parameters if parameter.grad is not None]
            mean_loss = torch.tensor(loss, device=self.student.device)
            reduce([*gradients, mean_loss])
            loss = float(mean_loss)
            norm = torch.nn.utils.clip_grad_norm_(self.student.parameters, MAX_GRAD_NORM)
            if not gradients or not math.isfinite(loss) or not math.isfinite(float(norm)):
                self.discarded_steps += 1
                return None
            rate = self.config.learning_rate * self.rate_factor * min(1.0, (self.steps + 1) / WARMUP_STEPS)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        finally:
            self._optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        self.trained_tokens += sum(len(item.tokens) for item in items)
        self.last_loss = loss
        return loss

    def start_over_from(self, adapter: Adapter | None, *, slower: bool) -> None:
        """Drops what was learned since `adapter`: weights back to it, moments forgotten, the rate halved if `slower`."""
        self.student.load(adapter)
        self._new_optimizer()
        if slower:
            self.rate_factor = max(self.rate_factor * 0.5, SMALLEST_RATE_FACTOR)
            self._clean_publications = 0

    def published_cleanly(self) -> None:
        """Counts a publication that held; five in a row give the full rate back."""
        self._clean_publications += 1
        if self._clean_publications >= CLEAN_PUBLICATIONS_TO_RECOVER:
            self.rate_factor = 1.0

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Tensors (master weights, moments) and JSON-safe values of a running optimisation."""
        tensors = {}
        for index, parameter in enumerate(self.student.parameters):
            tensors[f"{index}.master"] = parameter.detach().cpu().clone()
            for key, value in self._optimizer.state[parameter].items():
                tensors[f"{index}.{key}"] = value.detach().cpu().clone()
        values = {
            "steps": self.steps,
            "discarded_steps": self.discarded_steps,
            "trained_tokens": self.trained_tokens,
            "rate_factor": self.rate_factor,
            "clean_publications": self._clean_publications,
            "last_loss": self.last_loss,
        }
        return tensors, values

    def load_state(self, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
        """Goes on where `state` was taken, bit for bit."""
        self._new_optimizer()
        with torch.no_grad():
            for index, parameter in enumerate(self.student.parameters):
                parameter.copy_(tensors[f"{index}.master"])
                prefix = f"{index}."
                moments = {key[len(prefix) :]: value for key, value in tensors.items() if key.startswith(prefix)}
                del moments["master"]
                if moments:
                    # The step count stays on the CPU, as AdamW itself keeps it.
                    self._optimizer.state[parameter] = {
                        key: value.clone() if key == "step" else value.to(parameter.device, copy=True)
                        for key, value in moments.items()
                    }
        self.steps, self.discarded_steps, self.trained_tokens = (
            values[key] for key in ("steps", "discarded_steps", "trained_tokens")
        )
        self.rate_factor, self._clean_publications = values["rate_factor"], values["clean_publications"]
        self.last_loss = values["last_loss"]

    def _new_optimizer(self) -> None:
        self._optimizer = torch.optim.AdamW(
            self.student.parameters, lr=self.config.learning_rate, weight_decay=WEIGHT_DECAY
        )

    def _items(self, sequences: list[FeedbackSequence]) -> list[TrainingItem]:
        items = [text_item(sequence) for sequence in sequences]
        if self.config.discard_weight:
            for sequence in sequences:
                branches = branch_items(sequence)
                items += branches[self.steps % len(branches) :][:1] if branches else []
        return items

    def _accumulate(self, batch: list[TrainingItem], text_rows: int, branch_rows: int) -> float:
        losses = row_losses(self.student.logits(batch), self.student.teacher(batch), self.config.loss)
        weights = torch.cat(
            [
                torch.full((item.rows,), self.config.discard_weight / branch_rows if item.discarded else 1 / text_rows)
                for item in batch
            ]
        )
        loss = (losses * weights.to(losses.device)).sum()
        loss.backward()
        return float(loss.detach())
