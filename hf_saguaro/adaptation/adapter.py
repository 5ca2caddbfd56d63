# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""`OnlineAdapter`: the draft learns while it serves (Aurora, arXiv 2602.06932)."""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from .. import compat
from ..errors import SaguaroError
from . import persistence
from .buffer import FeedbackBuffer
from .config import AdaptationConfig
from .feedback import FeedbackSequence, FeedbackSession
from .gate import Candidate, Verdict
from .history import History
from .layers import modules_to_adapt
from .learner import Learner
from .loop import TrainingLoop
from .publisher import Publisher
from .requirements import check_draft, require_peft
from .session import GuardedSession
from .student import Student
from .trainer import Trainer
from .weights import DraftWeights


logger = logging.get_logger("transformers.hf_saguaro.adaptation")

CLOSE_SECONDS = 5.0

# The open adapter of each draft: a second one would take adapted weights for the user's own.
_OPEN: weakref.WeakKeyDictionary[nn.Module, weakref.ref[OnlineAdapter]] = weakref.WeakKeyDictionary()


class OnlineAdapter:
    """Lets a draft learn from what its target accepts, while both serve.

        adapter = OnlineAdapter(draft, AdaptationConfig(r=8))
        model.generate(**inputs, assistant_model=draft, speculation=SaguaroConfig(adaptation=adapter))

    The target's text stays what it is, whatever the draft learns. A background thread trains LoRA matrices of its own on
    the target's distributions along the emitted text; what wins on held-out text is merged into the draft's weights
    between two rounds, in place, and taken back if it accepts less. While the adapter is open the draft may hold adapted
    weights; `close()`, leaving the `with` block, or the end of the adapter's life give the user's own back, bit for bit.

    If training fails for good, the bare draft serves: an adapter that nobody watches could become worse than it when the
    traffic changes. Feedback is kept in memory only.

    Args:
        draft (`PreTrainedModel`): a decoder-only draft in float32, bfloat16 or float16, on one device. Refused are PEFT
            models (merge them first), quantised ones, and drafts whose adapted layers are also the target's.
        config (`AdaptationConfig`, *optional*)

    Raises:
        SaguaroError: for a draft that cannot be adapted, one that another open adapter owns, or without `peft`.
    """

    def __init__(self, draft: nn.Module, config: AdaptationConfig | None = None):
        require_peft()
        draft = getattr(draft, "_orig_mod", draft)
        check_draft(draft)
        owner = _OPEN.get(draft, lambda: None)()
        if owner is not None and owner.is_open:
            raise SaguaroError(
                "this draft already has an open OnlineAdapter, whose weights a second one would take for the user's own; "
                "use that one, or close it first."
            )
        self.config = AdaptationConfig() if config is None else config
        self._draft = weakref.ref(draft)
        self._history = History()
        self._weights = DraftWeights(draft, modules_to_adapt(draft, self.config), self.config.scale)
        student = Student(draft, self._weights, self.config)
        self._publisher = Publisher(self._weights, self.config.rollback, self._history)
        self._vocab_size = draft.get_input_embeddings().weight.shape[0]
        width = min(self.config.top_k_logits, self._vocab_size)
        self._buffer = FeedbackBuffer(self.config.buffer_tokens, 8 * width + 16, self.config.seed)
        # The thread must not keep the adapter alive, nor the adapter the draft.
        draft_ref, weights = self._draft, self._weights
        loop = TrainingLoop(
            Learner(student, self.config), self._buffer, self._publisher, self._history, self.config,
            base=lambda: weights.fingerprint(draft_ref()),
        )  # fmt: skip
        self._trainer = Trainer(
            loop, self._history, self.config.max_train_fraction, _Surrender(self._buffer, self._publisher)
        )
        self._target: weakref.ref[nn.Module] | None = None
        self._running_calls = 0
        self._finalizer = weakref.finalize(self, _shut_down, self._trainer, self._publisher, self._buffer)
        _OPEN[draft] = weakref.ref(self)

    # The user's side

    @property
    def draft(self) -> nn.Module | None:
        """The draft, while somebody else keeps it alive: an adapter does not."""
        return self._draft()

    @property
    def is_open(self) -> bool:
        """Whether `close` was not called yet."""
        return self._finalizer.alive

    @property
    def version(self) -> int:
        """Number of the publication that serves; 0 is the bare draft."""
        return self._publisher.version

    def metrics(self) -> dict[str, Any]:
        """Figures of the moment: counters since the start, sizes in rows and bytes, acceptance of recent rounds."""
        publisher, buffer = self._publisher, self._buffer
        loop = self._trainer.loop
        recent = publisher.recent
        return {
            "version": publisher.version,
            "published": publisher.published,
            "rolled_back": publisher.rolled_back,
            "refused": loop.refused if loop else None,
            "rounds": publisher.rounds,
            "accepted_per_round": recent.accepted_per_round,  # bonus token excluded, as in SaguaroStats.mean_accepted
            "tokens_per_round": None if recent.accepted_per_round is None else recent.accepted_per_round + 1,
            "acceptance_rate": recent.rate,
            "reference_acceptance_rate": publisher.reference.rate,
            "trainer": self._trainer.status,
            "train_seconds": self._trainer.train_seconds,
            "steps": loop.learner.steps if loop else None,
            "discarded_steps": loop.learner.discarded_steps if loop else None,
            "loss": loop.learner.last_loss if loop else None,
            "learning_rate": self.config.learning_rate * loop.learner.rate_factor if loop else None,
            "sequences": buffer.sequences,
            "rows": buffer.rows_seen,
            "buffer_rows": buffer.rows,
            "buffer_bytes": buffer.nbytes,
            "held_out_sequences": len(buffer.validation()),
            "rows_outside_vocabulary": buffer.rows_outside_vocabulary,
        }

    def history(self) -> list[dict[str, Any]]:
        """The last 1,000 events, oldest first: published, refused, rolled back, bare draft, adapter returned, trainer
        failed, ..., each with its reason, its time (seconds since the epoch) and its figures. JSON-safe."""
        return self._history.events()

    def pause(self) -> None:
        """Stops training and looking after the floor; feedback is still collected, and `flush` still works."""
        self._trainer.paused = True

    def resume(self) -> None:
        """Goes on after `pause`."""
        self._trainer.paused = False
        self._trainer.wake()

    def flush(self, timeout: float | None = None) -> bool:
        """Learns from all feedback at hand, without regard to the share of time, and examines a candidate if one is due.

        What passes serves at once if no `generate` call is running, else from the next round on. Calls with the same
        feedback and seed, the trainer paused in between, have the same result.

        Args:
            timeout (`float`, *optional*): seconds to wait.

        Returns:
            `bool`: whether the work was done in time.
        """
        loop = self._trainer.loop
        if loop is None:
            return False
        try:
            self._trainer.call(loop.flush, timeout)
        except Exception:  # recorded in the history where it happened
            return False
        self._swap(most_calls=0)
        return True

    def check_open(self) -> None:
        """Raises a [`SaguaroError`] after `close`."""
        if not self.is_open:
            raise SaguaroError("this OnlineAdapter is closed; make a new one for the draft.")

    def close(self) -> None:
        """Ends the training and gives the draft the user's own weights back, bit for bit. Safe to call twice."""
        self._finalizer()

    def __enter__(self) -> OnlineAdapter:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def save_pretrained(self, save_directory: str | os.PathLike, *, save_feedback: bool = False) -> None:
        """Writes the adapter that serves in PEFT's format, with a card, the history and the state to resume from.

        Every file is written aside and renamed into place; `from_pretrained` reads one of them only, so a crash leaves
        the previous save whole. `PeftModel.from_pretrained(draft, save_directory)` loads the adapter.

        Args:
            save_directory (`str` or `PathLike`): created if missing.
            save_feedback (`bool`, *optional*, defaults to `False`):
                Also saves the buffer: *token ids of the traffic*. With it a resumed adapter goes on bit for bit; without
                it the trained state is the same, but replay and held-out text start empty.
        """
        persistence.write(self._snapshot(save_feedback), save_directory)

    @classmethod
    def from_pretrained(cls, draft: nn.Module, directory: str | os.PathLike, *, device: Any = None) -> OnlineAdapter:
        """Goes on where `save_pretrained` left off: the saved adapter serves from the first round on.

        Args:
            draft (`PreTrainedModel`): the draft that it was saved for, unadapted.
            directory (`str` or `PathLike`): a folder, or a Hub repository.
            device (`str` or `torch.device`, *optional*): where training runs now; the saved choice by default.

        Raises:
            SaguaroError: where the folder holds no such save, or one of another draft.
        """
        require_peft()
        saved = persistence.read(directory)
        config = (
            saved.config if device is None else AdaptationConfig.from_dict(saved.config.to_dict() | {"device": device})
        )
        adapter = cls(draft, config)
        try:
            persistence.restore(adapter, adapter._trainer.loop, saved)
        except BaseException:
            adapter.close()
            raise
        return adapter

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, token: str | None = None,
                    commit_message: str = "Upload adapter") -> Any:  # fmt: skip
        """Uploads the adapter, its card, history and state; never the feedback.

        Returns:
            `huggingface_hub.CommitInfo`
        """
        saved = self._snapshot(save_feedback=False)
        return persistence.push(saved, repo_id, private=private, token=token, commit_message=commit_message)

    def propose(self, directory: str | os.PathLike, origin: str | None = None) -> Verdict | None:
        """Puts an adapter from elsewhere, in PEFT's format, through the gates; it serves if it passes.

        Args:
            directory (`str` or `PathLike`): a folder written by `save_pretrained` or `train_on_records`.
            origin (`str`, *optional*): what the history calls it; the folder by default.

        Returns:
            `Verdict`: `passed`, `reason`, `figures`; `None` where it is too early (too little held-out text, or another
            change waits for the next round) or too late (the trainer is off).
        """
        self.check_open()
        loop = self._trainer.loop
        if loop is None:
            return None
        origin = str(directory) if origin is None else origin

        def examine() -> Verdict | None:
            try:
                adapter, base = persistence.read_adapter(directory, self._weights.names, self.config)
            except SaguaroError as error:
                return loop.refuse(Verdict(False, str(error)), origin)
            adapter = {
                name: tuple(matrix.to(loop.learner.student.device) for matrix in pair) for name, pair in adapter.items()
            }
            return loop.nominate(Candidate(adapter, self._publisher.version, base, loop.learner.steps, origin))

        verdict = self._trainer.call(examine, timeout=None)
        self._swap(most_calls=0)
        return verdict

    def report(self, event: str, reason: str) -> None:
        """Records a fault of something that feeds this adapter; the log tells once."""
        self._history.warn(event, reason)

    # The engine's side: the sink of a `generate` call

    def attach(self, target: nn.Module) -> None:
        """Called with the target before the first round of a call.

        Raises:
            SaguaroError: where the draft's adapted layers are also the target's, or the adapter is closed.
        """
        self.check_open()
        target = compat.unwrap(target)
        if self._target is not None and self._target() is target:
            return
        shared = self._weights.shared_with(target)
        if shared:
            raise SaguaroError(
                f"the draft shares {len(shared)} of the adapted layers with the target ({shared[0]}, ...), so learning "
                "would change the target's text. Make a draft of its own, hf_saguaro.make_draft(target), or choose "
                "`layers` that are not shared."
            )
        if self._target is not None:
            # Another target, another teacher: what the old one said is no longer true.
            self._buffer.clear()
            self._history.add("target changed", "feedback of the earlier target was dropped")
        self._target = weakref.ref(target)

    def begin(self, prompts: list[torch.Tensor], temperature: float | None = 0.0) -> GuardedSession:
        """A `generate` call begins.

        Args:
            prompts (`list[Tensor]`): the real token ids of each row, 1-D.
            temperature (`float`, *optional*, defaults to 0.0): that the scores were divided by; 0 is greedy, `None` says
                sampled without one.
        """
        self.check_open()
        temperature = 1.0 if temperature is None else temperature
        self._running_calls += 1
        session = None
        if not self._trainer.stopped:
            held_out = [self._buffer.draw_held_out() for _ in prompts]
            session = FeedbackSession(
                prompts,
                temperature,
                self.config.top_k_logits,
                self._vocab_size,
                held_out,
                self._take,
                lambda: self.version,
            )
        return GuardedSession(session, self._saw_round, self._call_ended, self._collecting_failed)

    def before_round(self) -> None:
        """Swaps the draft's weights if something waits; the draft must be idle. Costs one attribute read if not."""
        if self._publisher.is_busy:
            self._swap(most_calls=1)

    # Inside

    def _snapshot(self, save_feedback: bool) -> persistence.Saved:
        self.check_open()
        loop = self._trainer.loop
        if loop is None:
            raise SaguaroError("the trainer gave up (see `history()`), so there is nothing to save.")
        return self._trainer.call(lambda: persistence.snapshot(self, loop, save_feedback), timeout=None)

    def _take(self, sequence: FeedbackSequence) -> None:
        if self._trainer.stopped:
            return
        buffer = self._buffer
        buffer.add(sequence)
        if buffer.rows_outside_vocabulary > 0.05 * buffer.rows_seen and buffer.rows_seen > 1000:
            self._history.warn_once(
                "vocabulary too small",
                f"the target preferred a token that the draft does not know in {buffer.rows_outside_vocabulary} of "
                f"{buffer.rows_seen} rows",
            )
        self._trainer.wake()

    def _saw_round(self, proposed: int, accepted: int) -> None:
        if proposed:
            self._publisher.saw_round(proposed, accepted)

    def _call_ended(self) -> None:
        self._running_calls -= 1

    def _collecting_failed(self, error: Exception) -> None:
        self._trainer.give_up("collecting failed", f"{type(error).__name__}: {error}")

    def _swap(self, most_calls: int) -> None:
        # With other calls in flight the draft may be in use: the swap waits for a round that is alone.
        if self._running_calls > most_calls:
            return
        try:
            self._publisher.apply()
        except Exception as error:
            self._trainer.give_up("publication failed", f"{type(error).__name__}: {error}")


class _Surrender:
    """What happens when the trainer is off for good: memory is freed, and the bare draft serves from the next round on."""

    def __init__(self, buffer: FeedbackBuffer, publisher: Publisher):
        self._buffer, self._publisher = buffer, publisher

    def __call__(self, event: str, reason: str) -> None:
        self._buffer.clear()
        self._publisher.stage_bare(event, reason)


def _shut_down(trainer: Trainer, publisher: Publisher, buffer: FeedbackBuffer) -> None:
    if not trainer.stop(CLOSE_SECONDS):
        logger.warning(f"The trainer did not end within {CLOSE_SECONDS:.0f} s; it is left to end by itself.")
    buffer.clear()
    publisher.restore("closed", "the draft has its own weights again")
