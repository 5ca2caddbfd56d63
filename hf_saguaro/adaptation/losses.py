# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""What the draft is taught, and how far its distribution agrees with the target's.

A row of feedback keeps the target's k largest log-probabilities and the mass beside them. Everything here compares two
distributions over these k tokens and one bucket for all others. For k = V the bucket is empty and every figure is that of
the whole vocabulary; for smaller k each divergence is a lower bound of it (merging outcomes never adds divergence).
"""

from __future__ import annotations

from typing import NamedTuple

import torch


# Reverse KL asks for log p where the draft puts mass; a token that the target rules out (log p = -inf) counts as this.
LOG_PROBABILITY_FLOOR = -30.0


class TeacherRows(NamedTuple):
    """The target's distribution at R positions.

    Args:
        log_probs (`Tensor` of shape `[R, k]`, float32): the largest log-probabilities, in falling order; -inf is allowed.
        token_ids (`Tensor` of shape `[R, k]`, int): their tokens.
        log_residual (`Tensor` of shape `[R]`, float32): log of all the mass beside them; -inf where nothing is left.
    """

    log_probs: torch.Tensor
    token_ids: torch.Tensor
    log_residual: torch.Tensor


def buckets_of(logits: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The draft's log-probabilities of the teacher's tokens, and of all others together.

    Args:
        logits (`Tensor` of shape `[R, V]`): the draft's.
        token_ids (`Tensor` of shape `[R, k]`, int64)

    Returns:
        `[R, k]` and `[R]`, float32.
    """
    logits = logits.float()
    total = logits.logsumexp(dim=-1)
    top = logits.gather(1, token_ids) - total[:, None]
    if token_ids.shape[1] == logits.shape[1]:
        return top, torch.full_like(total, -torch.inf)
    return top, logits.scatter(1, token_ids, -torch.inf).logsumexp(dim=-1) - total


def row_losses(logits: torch.Tensor, teacher: TeacherRows, kind: str) -> torch.Tensor:
    """One loss a row.

    Args:
        logits (`Tensor` of shape `[R, V]`): the draft's, already divided by the temperature of the traffic.
        teacher (`TeacherRows`): of the same R positions.
        kind (`str`): `"kl"` is KL(target || draft) (the accepted half of Aurora's objective, arXiv 2602.06932),
            `"reverse_kl"` KL(draft || target), `"acceptance"` 1 - sum of min(p, q), the chance that speculative sampling
            rejects.

    Returns:
        `Tensor` of shape `[R]`, float32; nats for the two divergences.
    """
    log_q = torch.cat(_with_rest(*buckets_of(logits, teacher.token_ids)), dim=1)
    log_p = torch.cat(_with_rest(teacher.log_probs, teacher.log_residual), dim=1)
    if kind == "kl":
        return _expected(log_p, log_p, log_q)
    if kind == "reverse_kl":
        return _expected(log_q, log_q, log_p.clamp_min(LOG_PROBABILITY_FLOOR))
    return 1 - torch.minimum(log_p.exp(), log_q.exp()).sum(dim=1)


def acceptance(logits: torch.Tensor, teacher: TeacherRows, greedy: bool) -> torch.Tensor:
    """The chance of each row's draft token to be accepted, `[R]` float32 in [0, 1].

    Greedy decoding accepts the draft's favourite if it is the target's: 0 or 1. Sampling accepts with probability
    sum of min(p, q) (within the bucket an upper bound).
    """
    if greedy:
        return (logits.argmax(dim=-1) == teacher.token_ids[:, 0]).float()
    return (1 - row_losses(logits, teacher, "acceptance")).clamp(0, 1)


def rounds_needed(chances: list[float], lookahead: int) -> float:
    """Rounds that speculative decoding takes, on average, to emit a text whose tokens are accepted with `chances`.

    Every round proposes up to `lookahead` tokens, keeps those before the first rejection and adds one of the target's.
    With chances of 0 and 1 this replays greedy decoding exactly.
    """
    ahead = [0.0] * (len(chances) + 1)
    for start in range(len(chances) - 1, -1, -1):
        reached, expected = 1.0, 1.0
        for offset in range(lookahead):
            position = start + offset
            if position == len(chances) - 1 or reached == 0.0:
                break
            rejected = reached * (1.0 - chances[position])
            expected += rejected * ahead[position + 1]
            reached -= rejected
        else:
            position = start + lookahead
        ahead[start] = expected + reached * ahead[position + 1]
    return ahead[0]


def _with_rest(top: torch.Tensor, rest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return top, rest[:, None]


def _expected(log_weight: torch.Tensor, log_a: torch.Tensor, log_b: torch.Tensor) -> torch.Tensor:
    """Sum of exp(log_weight) * (log_a - log_b) where there is weight. Empty buckets are masked before the subtraction:
    -inf minus -inf would poison the gradient even behind a `where`."""
    some = log_weight > -torch.inf
    difference = log_a.masked_fill(~some, 0.0) - log_b.masked_fill(~some, 0.0)
    return (log_weight.exp() * difference).sum(dim=1)
