# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""The trainer's thread: when the loop may run, for how long, and what happens when it fails. Generation never waits for it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from .history import History
from .learner import Interrupted
from .loop import TrainingLoop


STRIKES = 3
PAUSE_AFTER_FAILURE_SECONDS = 10.0
# A trainer that shows no sign of life for this long counts as hung.
HANG_SECONDS = 300.0


class Throttle:
    """Keeps work below a share of wall time: after `t` seconds of work it asks for a rest of `t / share - t`."""

    def __init__(self):
        self.ready = 0.0

    def charge(self, seconds: float, share: float) -> None:
        self.ready = max(self.ready, time.monotonic()) + seconds * (1 / share - 1)


class Trainer:
    """A daemon thread that drives a [`TrainingLoop`].

    Args:
        loop (`TrainingLoop`)
        history (`History`)
        max_fraction (`float`): largest share of wall time.
        gave_up (`Callable[[str, str], None]`): called once with (event, reason) when the trainer is off for good.
    """

    def __init__(self, loop: TrainingLoop, history: History, max_fraction: float, gave_up: Callable[[str, str], None]):
        self.loop: TrainingLoop | None = loop
        self.history, self.max_fraction, self._gave_up = history, max_fraction, gave_up
        self.paused = self.stopped = False
        self.train_seconds = 0.0
        self._failures = self._verdicts = 0
        self._wake = threading.Event()
        self._jobs: deque[tuple[Callable[[], Any], Future]] = deque()
        self._training, self._checking = Throttle(), Throttle()
        self._working_since: float | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()
        loop.check = self.check

    # Other threads

    @property
    def status(self) -> str:
        """`"idle"`, `"training"`, `"paused"` or `"off"`."""
        if self.stopped:
            return "off"
        if self._working_since is not None:
            return "training"
        return "paused" if self.paused else "idle"

    def wake(self) -> None:
        """Something may be due. Starts the thread if it does not run yet, and notices if it hangs."""
        if self.stopped:
            return
        since = self._working_since
        if since is not None and time.monotonic() - since > HANG_SECONDS:
            self.give_up("trainer hung", f"no sign of life for {HANG_SECONDS:.0f} s")
            return
        with self._lock:
            if self._thread is None:
                self._start()
        self._wake.set()

    def call(self, job: Callable[[], Any], timeout: float | None) -> Any:
        """Runs `job` on the trainer's thread, between two steps, and waits for it.

        Raises:
            TimeoutError: where it did not finish in time.
        """
        future: Future = Future()
        self._jobs.append((job, future))
        self.wake()
        if self.stopped:
            self._drop_jobs()
        return future.result(timeout)

    def stop(self, timeout: float) -> bool:
        """Ends the thread; whether it ended in time."""
        self.stopped = True
        self._wake.set()
        self._drop_jobs()
        if self._thread is None:
            self.loop = None
        elif self._thread is not threading.current_thread():  # the garbage collector may call from anywhere
            self._thread.join(timeout)
            return not self._thread.is_alive()
        return True

    def give_up(self, event: str, reason: str) -> None:
        """Switches the trainer off for good."""
        with self._lock:
            if self.stopped:
                return
            self.stopped = True
        self._wake.set()
        self._drop_jobs()
        self._gave_up(event, reason)

    def _drop_jobs(self) -> None:
        with contextlib.suppress(IndexError):  # another thread may drop them, too
            while True:
                self._jobs.popleft()[1].set_exception(TimeoutError("the trainer is off"))

    def _start(self) -> None:
        threads, started = torch.get_num_threads(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="hf_saguaro-trainer", daemon=True)
        self._thread.start()
        started.wait()
        # The trainer's own count also became the default of threads to come: give that back.
        torch.set_num_threads(threads)

    # The thread itself

    def check(self) -> None:
        """A sign of life; raises [`Interrupted`] once the trainer was stopped."""
        if self.stopped:
            raise Interrupted
        self._working_since = time.monotonic()

    def _run(self, started: threading.Event) -> None:
        torch.set_num_threads(1)
        started.set()
        stream = _quiet_stream(self.loop.learner.student.device)
        with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
            while not self.stopped:
                self._wake.wait(self._rest())
                self._wake.clear()
                self._work()
                if stream:
                    stream.synchronize()
        self.loop = None
        self._drop_jobs()

    def _rest(self) -> float | None:
        """Seconds until something that is due may run; `None` waits for a call."""
        if self.paused or self.stopped:
            return None
        now, rests = time.monotonic(), []
        if self.loop.wants_to_check_floor:
            rests.append(self._checking.ready - now)
        if self.loop.wants_to_train:
            rests.append(self._training.ready - now)
        return max(0.0, min(rests)) if rests else None

    def _work(self) -> None:
        while self._jobs and not self.stopped:
            job, future = self._jobs.popleft()
            self._guarded(job, future)
        if self.paused or self.stopped:
            return
        now = time.monotonic()
        if self.loop.wants_to_check_floor and now >= self._checking.ready:
            spent = self._guarded(self.loop.check_floor)
            self._checking.charge(spent, self.max_fraction)
            self._training.charge(spent, self._share)
        if self.loop.wants_to_train and now >= self._training.ready:
            self._training.charge(self._guarded(self.loop.train), self._share)

    @property
    def _share(self) -> float:
        return self.max_fraction * self.loop.trust

    def _guarded(self, work: Callable[[], Any], future: Future | None = None) -> float:
        """Runs one piece of work; the seconds it took. No fault of it leaves the thread."""
        began = self._working_since = time.monotonic()
        try:
            result = work()
            if future is not None:
                future.set_result(result)
            # Work that went well proves little if no candidate ever comes of it.
            if self.loop.verdicts > self._verdicts:
                self._failures, self._verdicts = 0, self.loop.verdicts
        except Interrupted:
            if future is not None:
                future.set_exception(TimeoutError("the trainer is off"))
        except Exception as error:
            self._failed(f"{type(error).__name__}: {error}")
            if future is not None:
                future.set_exception(error.with_traceback(None))
        finally:
            self._working_since = None
        spent = time.monotonic() - began
        self.train_seconds += spent
        return spent

    def _failed(self, reason: str) -> None:
        self._failures += 1
        self.loop.buffer.clear()
        if self.loop.learner.student.device.type == "cuda":
            torch.cuda.empty_cache()
        self.history.warn("trainer failed", reason, in_a_row=self._failures)
        self._training.ready = self._checking.ready = time.monotonic() + PAUSE_AFTER_FAILURE_SECONDS * self._failures
        if self._failures >= STRIKES:
            self.give_up("trainer off", f"{STRIKES} failures in a row, the last: {reason}")


def _quiet_stream(device: torch.device):
    """A CUDA stream of its own, of the lowest priority there is, the default stream's; `None` elsewhere."""
    return torch.cuda.Stream(device, priority=0) if device.type == "cuda" else None
