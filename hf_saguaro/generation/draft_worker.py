# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""The draft's thread. It knows nothing about models: it runs what it is given, one task at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch


_setting_threads = threading.Lock()


class DraftWorker:
    """One thread beside the caller's, with its share of the cores.

    Two torch threads that each want all cores run about ten times slower than one each, so while both work the cores
    are split: the draft gets `threads`, the caller the rest. `close` gives the caller its own count back.

    Args:
        threads (`int` or `None`): intra-op threads for the draft; `None` leaves both sides alone (the models' work is
            not on this machine's cores).
        devices (`Sequence[torch.device]`): what the models run on. On a GPU the draft works on the caller's stream, as
            everything that it makes and reads is ordered by it.
    """

    def __init__(self, threads: int | None, devices: Sequence[torch.device] = ()):
        self._threads = threads
        self._streams = [torch.cuda.current_stream(device) for device in devices if device.type == "cuda"]
        self._callers_threads = torch.get_num_threads()
        self._inference = torch.is_inference_mode_enabled()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="hf_saguaro-draft", initializer=self._enter)

    def _enter(self) -> None:
        if self._threads is not None:
            _set_own_threads(self._threads)

    def submit(self, task: Callable, *args) -> Future:
        """Starts `task(*args)` on the draft's thread."""
        return self._executor.submit(self._run, task, args)

    def _run(self, task: Callable, args: tuple):
        # Grad mode, inference mode and streams belong to a thread; the draft works in the caller's.
        with torch.inference_mode(self._inference), torch.no_grad(), contextlib.ExitStack() as streams:
            for stream in self._streams:
                streams.enter_context(torch.cuda.stream(stream))
            return task(*args)

    def share_cores(self, both_busy: bool) -> None:
        """Sets the caller's thread count for a round in which the draft works beside it, or does not."""
        if self._threads is None:
            return
        count = max(self._callers_threads - self._threads, 1) if both_busy else self._callers_threads
        if torch.get_num_threads() != count:
            _set_own_threads(count)

    def close(self) -> None:
        """Waits for the task that runs and ends the thread."""
        try:
            self._executor.shutdown(wait=True, cancel_futures=True)
        finally:
            self.share_cores(False)


def _set_own_threads(count: int) -> None:
    """Sets the calling thread's count alone. torch also makes it the count that threads to come start with, for good;
    that one is asked of a new thread before, and put back from one after."""
    with _setting_threads:
        inherited = _in_a_new_thread(torch.get_num_threads)
        torch.set_num_threads(count)
        _in_a_new_thread(torch.set_num_threads, inherited)


def _in_a_new_thread(function: Callable, *args):
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function, *args).result()
