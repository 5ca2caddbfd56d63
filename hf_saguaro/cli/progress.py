# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""A progress bar on a terminal, silence elsewhere."""

from __future__ import annotations

import sys

from transformers.utils import logging


def quiet_unless_terminal() -> None:
    """Turns the libraries' own bars off where nobody watches."""
    if not sys.stderr.isatty():
        logging.disable_progress_bar()


class Progress:
    """Counts the steps of a long job.

    Args:
        total (`int`): steps.
        what (`str`): what the job is.
    """

    def __init__(self, total: int, what: str):
        self._bar = logging.tqdm(total=total, desc=what, disable=not sys.stderr.isatty(), leave=False)
        self._started = False

    def step(self, what: str) -> None:
        """A step begins, so the one before is done."""
        if self._started:
            self._bar.update(1)
        self._started = True
        self._bar.set_postfix_str(what)

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        self._bar.clear()
        print(text, flush=True)

    def close(self) -> None:
        self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_) -> None:
        self.close()
