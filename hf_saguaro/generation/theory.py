# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""The paper's arithmetic (arXiv 2603.03251, Theorems 7 and 17). Times are in units of one verification."""

from __future__ import annotations


def expected_tokens(acceptance: list[float]) -> float:
    """Tokens of a round, the target's own included, for acceptance rates by depth: 1 + a_1 + a_1 a_2 + .."""
    total, reached = 1.0, 1.0
    for rate in acceptance:
        reached *= rate
        total += reached
    return total


def ssd_speedup(hit_rate: float, tokens_on_hit: float, tokens_on_miss: float, primary_time: float, backup_time: float,
                rows: int = 1) -> float:  # fmt: skip
    """Theorem 7, and for `rows` > 1 Corollary 16: a batch waits for its slowest row, tokens stay per row.

    Args:
        hit_rate (`float`): probability that a row's outcome was prepared.
        primary_time, backup_time (`float`): T_p and T_b, draft seconds over verify seconds.
    """
    all_hit = hit_rate**rows
    time = all_hit * max(1.0, primary_time) + (1 - all_hit) * (1.0 + backup_time)
    return (hit_rate * tokens_on_hit + (1 - hit_rate) * tokens_on_miss) / time


def async_over_sync(hit_rate: float, sync_time: float, primary_time: float) -> float:
    """What preparing outcomes wins over taking turns, at equal accept lengths and with the neural backup.

    Args:
        sync_time (`float`): T, the K draft passes of a sync round.
        primary_time (`float`): T_p, glue and K tree passes.
    """
    return (1 + sync_time) / (hit_rate * max(1.0, primary_time) + (1 - hit_rate) * (1 + sync_time))
