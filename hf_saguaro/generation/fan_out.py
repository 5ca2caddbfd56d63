# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""How many outcomes to prepare at each accept length: the shape of the speculation cache.

Theorem 12 of arXiv 2603.03251: if F forks miss with probability F^-r, and the accept length is k with probability P(k),
the hit rate under sum F_k <= B is highest for F_k in proportion to P(k)^(1/(1+r)). With acceptance a at every depth that
is the capped geometric shape F_k = F_0 a^(k/(1+r)), larger again at k = K, where everything was accepted.
"""

from __future__ import annotations

import heapq


# Exponent r of the miss probability: about what drafts of a third of the target's depth show on text.
DEFAULT_EXPONENT = 1.0


def accept_length_distribution(acceptance: list[float]) -> list[float]:
    """P(accept length = 0..K) for acceptance rates `acceptance[j]` of the (j+1)-th draft token (given the ones before)."""
    distribution, reached = [], 1.0
    for rate in acceptance:
        distribution.append(reached * (1 - rate))
        reached *= rate
    return [*distribution, reached]


def geometric(acceptance: list[float], budget: int, exponent: float = DEFAULT_EXPONENT) -> list[float]:
    """The continuous optimum of Theorem 12: K + 1 shares that add up to `budget`."""
    weights = [p ** (1 / (1 + exponent)) for p in accept_length_distribution(acceptance)]
    return [budget * weight / sum(weights) for weight in weights]


def allocate(acceptance: list[float], budget: int, exponent: float = DEFAULT_EXPONENT) -> list[int]:
    """The best integer counts for a budget, by marginal gain: every fork goes where it catches most.

    The power law is about the forks after the first: it has F = 1 miss always, which no draft does. So the first fork of
    a depth counts for its whole P(k), each further one for P(k) (F^-r - (F+1)^-r). Gains fall, so greedy is optimal.

    Args:
        acceptance (`list[float]`): K acceptance rates by depth.
        budget (`int`): forks in all.

    Returns:
        K + 1 counts, `sum == budget`.
    """
    distribution = accept_length_distribution(acceptance)
    counts = [0] * len(distribution)

    def gain(k: int) -> float:
        f = counts[k]
        caught = 1.0 if f == 0 else f**-exponent - (f + 1) ** -exponent
        return distribution[k] * caught

    queue = [(-gain(k), k) for k in range(len(counts))]
    heapq.heapify(queue)
    for _ in range(budget):
        k = queue[0][1]
        counts[k] += 1
        heapq.heapreplace(queue, (-gain(k), k))
    return counts


def hit_rate(acceptance: list[float], counts: list[float], exponent: float = DEFAULT_EXPONENT) -> float:
    """Probability that the outcome of a round is prepared, under the power law."""
    distribution = accept_length_distribution(acceptance)
    return sum(p * (1 - f**-exponent) for p, f in zip(distribution, counts) if f >= 1)
