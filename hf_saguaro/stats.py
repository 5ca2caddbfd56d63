# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""What a run reports."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .generation.theory import ssd_speedup


@dataclass
class SaguaroStats:
    """Figures of one `generate` call. The token that the prefill gives belongs to no round.

    A round verifies one proposal for every running row. It is a cache hit when the proposal of every running row came
    from the speculation cache, so that nothing had to be drafted while the target waited (arXiv 2603.03251, section 3).
    `accepted_by_depth[k]` counts row-rounds that accepted k tokens, `hits_by_depth[k]` those of them whose outcome had
    been prepared. Seconds are wall-clock time; `primary_seconds` is drafting that ended in hits, `backup_seconds` drafting
    while the target waited. With a fixed K a GPU drafts without the host looking on, and its time is counted where the
    host waits next; then the two speedups are `None`.
    """

    rounds: int = 0
    new_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    hits_by_depth: list[int] = field(default_factory=list)
    tokens_in_rounds: int = 0
    tokens_on_hit: int = 0
    row_hits: int = 0
    row_rounds: int = 0
    verify_seconds: float = 0.0
    draft_seconds: float = 0.0
    wait_seconds: float = 0.0
    total_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    compile_seconds: float = 0.0
    primary_seconds: float = 0.0
    backup_seconds: float = 0.0
    predicted_speedup: float | None = None
    measured_speedup: float | None = None
    execution: str = "autoregressive"
    backup: str = "none"
    adapter_version: tuple[int, int] | None = None
    draft_failure: str | None = None

    def __post_init__(self) -> None:
        self.rounds_by_execution: Counter[str] = Counter()
        self.rounds_by_backup: Counter[str] = Counter()
        self._tells_times = True

    @property
    def hit_rate(self) -> float:
        return self.cache_hits / self.rounds if self.rounds else 0.0

    @property
    def mean_accepted(self) -> float:
        return self.accepted_tokens / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_round(self) -> float:
        return self.tokens_in_rounds / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_round_on_hit(self) -> float:
        return self.tokens_on_hit / self.cache_hits if self.cache_hits else 0.0

    @property
    def tokens_per_round_on_miss(self) -> float:
        return (self.tokens_in_rounds - self.tokens_on_hit) / self.cache_misses if self.cache_misses else 0.0

    def record_round(self, *, execution: str, backups: list[str], hits: list[bool], drafted: list[int], accepted: list[int],
                     prepared: list[bool], emitted: int, awaited: bool) -> None:  # fmt: skip
        """Counts one round.

        Args:
            backups (`list[str]`): what each row that missed was served.
            hits (`list[bool]`): whether each row's proposal came from the speculation cache.
            accepted (`list[int]`), prepared (`list[bool]`): each row's accept length, and whether this very outcome had
                been prepared, so that the next proposal is a hit.
            drafted (`list[int]`): the length of each row's chain.
            emitted (`int`): tokens of all rows.
            awaited (`bool`): whether the host knew when the proposals were made.
        """
        self.rounds += 1
        self._tells_times &= awaited
        hit = all(hits)
        self.cache_hits += hit
        self.cache_misses += not hit
        self.row_hits += sum(hits)
        self.row_rounds += len(hits)
        self.drafted_tokens += sum(drafted)
        for counts in (self.accepted_by_depth, self.hits_by_depth):
            counts.extend([0] * (max(drafted) + 1 - len(counts)))
        self.accepted_tokens += sum(accepted)
        for length, hit_next in zip(accepted, prepared):
            for counts, one in ((self.accepted_by_depth, 1), (self.hits_by_depth, int(hit_next))):
                counts[length] += one
        self.tokens_in_rounds += emitted
        self.tokens_on_hit += emitted if hit else 0
        self.rounds_by_execution[execution] += 1
        self.rounds_by_backup.update(backups)

    def close(self, total_seconds: float) -> None:
        """Settles what only the whole run can tell: what really ran, the longest share named."""
        self.total_seconds = total_seconds
        if self.rounds_by_execution:
            self.execution = self.rounds_by_execution.most_common(1)[0][0]
        if self.rounds_by_backup:
            self.backup = self.rounds_by_backup.most_common(1)[0][0]
        if self.rounds and self.verify_seconds and self._tells_times:
            self._compare_with_theory()

    def _compare_with_theory(self) -> None:
        """Theorem 7 on the measured hit rate, tokens and times, beside what came of them. The unit of both is one
        verification a token, which is plain decoding where further rows of a verify are free."""
        verify, rows = self.verify_seconds / self.rounds, self.row_rounds / self.rounds
        self.predicted_speedup = ssd_speedup(
            self.hit_rate,
            self.tokens_per_round_on_hit / rows,
            self.tokens_per_round_on_miss / rows,
            self.primary_seconds / verify / max(self.cache_hits, 1),
            self.backup_seconds / verify / max(self.cache_misses, 1),
        )
        self.measured_speedup = self.tokens_in_rounds / rows * verify / max(self.decode_seconds, 1e-9)

    def to_dict(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        for name in (
            "hit_rate",
            "mean_accepted",
            "tokens_per_round",
            "tokens_per_round_on_hit",
            "tokens_per_round_on_miss",
        ):
            values[name] = getattr(self, name)
        return values

    def __str__(self) -> str:
        speedup = ""
        if self.predicted_speedup is not None:
            speedup = f"; speedup {self.measured_speedup:.2f} (Theorem 7: {self.predicted_speedup:.2f})"
        failure = f"; the draft failed: {self.draft_failure}" if self.draft_failure else ""
        return (
            f"{self.new_tokens} tokens in {self.total_seconds:.2f} s: {self.rounds} rounds ({self.execution}, backup "
            f"{self.backup}), {self.tokens_per_round:.2f} tokens a round, {self.mean_accepted:.2f} accepted, hit rate "
            f"{self.hit_rate:.2f}; verify {self.verify_seconds:.2f} s, draft {self.draft_seconds:.2f} s, wait "
            f"{self.wait_seconds:.2f} s{speedup}{failure}"
        )
