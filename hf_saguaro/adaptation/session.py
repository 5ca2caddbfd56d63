# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""What `generate` holds of the adaptation during a call: it never raises."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .feedback import FeedbackSession


class GuardedSession:
    """A feedback session whose faults never reach `generate`.

    Args:
        session (`FeedbackSession`, *optional*): `None` where nothing is collected any more.
        saw_round (`Callable[[int, int], None]`): told (proposed, accepted) of every round.
        ended (`Callable[[], None]`): called once at the end.
        failed (`Callable[[Exception], None]`): told of the fault, after which nothing is collected.
    """

    def __init__(self, session: FeedbackSession | None, saw_round: Callable[[int, int], None],
                 ended: Callable[[], None], failed: Callable[[Exception], None]):  # fmt: skip
        self._session, self._saw_round, self._failed = session, saw_round, failed
        self._ended: Callable[[], None] | None = ended

    def observe(self, row: int, proposed: torch.Tensor, accepted: int, next_token: int, scores: torch.Tensor) -> None:
        """See [`FeedbackSession.observe`]."""
        if self._session is None:
            return
        try:
            self._saw_round(len(proposed), accepted)
            self._session.observe(row, proposed, accepted, next_token, scores)
        except Exception as error:
            self._session = None
            self._failed(error)

    def end(self) -> None:
        """The call is over. Safe to call twice."""
        ended, self._ended = self._ended, None
        if ended is None:
            return
        ended()
        session, self._session = self._session, None
        if session is not None:
            try:
                session.end()
            except Exception as error:
                self._failed(error)
