# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""The two exact verifications.

Coupled (Daliri, Musco, Suresh, arXiv 2408.07978): the token at a position is `argmax(log p + g)` with Gumbel noise `g`
keyed by (seed, row, position, token). The draft proposes `argmax(log q + g)` with the same `g`, and a proposal is
accepted when it equals the token. The text is a function of p and g alone. Greedy decoding is the case g = 0.

Rejection (Leviathan et al. 2023; arXiv 2603.03251, section 3): accept s with probability min(1, p(s)/q(s)), else draw
from (p - q)+. Accept tests and residual draws use keyed numbers that the draft never sees: a position is tested, and
decided, in one round only, so no number is used twice.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

from .. import kernels
from .transfer import send


# Streams of keyed numbers that must be independent of each other get seeds this far apart.
_STREAM = 0x9E3779B97F4A7C15
_SEED_MASK = (1 << 63) - 1


@dataclass
class Proposal:
    """What one round verifies: for every row a chain of draft tokens, all chains padded to one width K.

    Attributes:
        tokens (`Tensor` of shape `[B, K]`, int64): on the target's device.
        lengths (`list[int]`): real tokens of each row, at most K.
        scores (`Tensor` of shape `[B, K, V]` or `None`): log q up to a constant, the very scores that the tokens were
            drawn from; only rejection verification needs them.
        point_mass (`list[bool]`): rows whose tokens came from no distribution (an n-gram copy).
        hits (`list[bool]`): rows whose chain was waiting in the speculation cache.
        backups (`list[str]`): what the rows that missed got.
        confidence (`list[list[float]]`): the draft's probability of every token, empty for rows without one.
        drafted (`Tensor` of shape `[B, K]`, *optional*): `tokens` on the draft's device.
        awaited (`bool`): whether they were there when they were proposed. Else a device was still to make them, and the
            time that this takes shows up in the verification.
    """

    tokens: torch.Tensor
    lengths: list[int]
    scores: torch.Tensor | None = None
    point_mass: list[bool] = field(default_factory=list)
    hits: list[bool] = field(default_factory=list)
    backups: list[str] = field(default_factory=list)
    confidence: list[list[float]] = field(default_factory=list)
    drafted: torch.Tensor | None = None
    awaited: bool = True

    def for_draft(self, device: torch.device) -> torch.Tensor:
        """`tokens` for the draft to read. Fetched back from the target's device they would come when that is done with
        the round."""
        return self.tokens.to(device) if self.drafted is None else self.drafted

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    @classmethod
    def empty(cls, batch_size: int, device: torch.device) -> Proposal:
        """Nothing drafted: the round is one step of plain decoding."""
        tokens = torch.zeros(batch_size, 0, dtype=torch.long, device=device)
        return cls(
            tokens, [0] * batch_size, None, [True] * batch_size, [False] * batch_size, ["none"], [[]] * batch_size
        )


class KeyedNoise:
    """Gumbel noise rows, shared by target, draft and all branches.

    On a CPU a row of noise costs about as much as a softmax, and 2K + 1 positions are looked at from both sides every
    round: there each row is made once. On a GPU it is made anew where it is wanted.
    """

    def __init__(self, seed: int, vocab_size: int):
        self.seed, self.vocab_size = seed, vocab_size
        self._rows: dict[tuple[int, int], torch.Tensor] = {}
        self._lock = threading.Lock()

    def __call__(self, rows: list[int], positions: list[int], device: torch.device) -> torch.Tensor:
        """Noise of shape `[R, V]`, float32."""
        if device.type != "cpu":
            return kernels.keyed_gumbel(self.seed, send(rows, device), send(positions, device), self.vocab_size)
        keys = list(zip(rows, positions))
        with self._lock:
            missing = [key for key in dict.fromkeys(keys) if key not in self._rows]
            if missing:
                row, position = torch.tensor(missing).T
                self._rows.update(zip(missing, kernels.keyed_gumbel(self.seed, row, position, self.vocab_size)))
            return torch.stack([self._rows[key] for key in keys])

    def forget_before(self, positions: dict[int, int]) -> None:
        """Drops the rows of noise that no later choice can ask for; `positions` is the next position of every row."""
        with self._lock:
            for row, position in [key for key in self._rows if key[1] < positions.get(key[0], 1 << 62)]:
                del self._rows[row, position]


class CoupledVerification:
    """Keyed noise on both sides; `seed=None` is greedy decoding."""

    needs_scores = False

    def __init__(self, seed: int | None, vocab_size: int):
        self.seed = None if seed is None else seed & _SEED_MASK
        self.noise = None if seed is None else KeyedNoise(self.seed, vocab_size)

    def choose(self, scores: torch.Tensor, rows: list[int], positions: list[int]) -> torch.Tensor:
        """The token of every (row, position): `[R, V]` -> `[R]`."""
        nothing = torch.zeros(len(rows), 0, dtype=torch.long, device=scores.device)
        return self._verify(scores[:, None], nothing, [0] * len(rows), rows, positions)[1]

    def draw(self, scores: torch.Tensor, rows: list[int], positions: list[int]) -> tuple[torch.Tensor, None]:
        """A draft token for every (row, position), chosen as the target would; its law q plays no part."""
        return self.choose(scores, rows, positions), None

    def fork_scores(self, scores: torch.Tensor, rows: list[int], positions: list[int]) -> torch.Tensor:
        """What ranks the likely outcomes of `[R, V]`: the noised scores, since the target uses the same noise."""
        return scores if self.noise is None else scores + self.noise(rows, positions, scores.device)

    def verify(self, scores: torch.Tensor, proposal: Proposal, rows: list[int], positions: list[int],
               filters: dict[str, float] | None = None):  # fmt: skip
        """Accept lengths and next tokens of a block.

        Args:
            scores (`Tensor` of shape `[R, K + 1, V]`): the target's processed scores.
            rows, positions (`list[int]`): row index, and the position of each row's first choice.
            filters (`dict[str, float]`, *optional*): what the kernel is to do to scores that are not processed yet.

        Returns:
            Two `Tensor` of shape `[R]`, int64.
        """
        return self._verify(scores, proposal.tokens, proposal.lengths, rows, positions, filters)

    def _verify(self, scores, tokens, lengths, rows, positions, filters=None):
        lengths = send(lengths, scores.device)
        filters = filters or {}
        if self.noise is None:
            return kernels.coupled_verification(scores, tokens, lengths, **filters)[:2]
        if scores.device.type != "cpu" or kernels.uses_triton(scores):
            row, position = send(rows, scores.device), send(positions, scores.device)
            return kernels.coupled_verification(
                scores, tokens, lengths, seed=self.seed, rows=row, positions=position, **filters
            )[:2]
        width = scores.shape[1]
        flat = [(row, start + j) for row, start in zip(rows, positions) for j in range(width)]
        noise = self.noise(*map(list, zip(*flat)), scores.device).view(len(rows), width, -1)
        return kernels.coupled_verification(scores, tokens, lengths, noise=noise)[:2]

    def forget_before(self, positions: dict[int, int]) -> None:
        if self.noise is not None:
            self.noise.forget_before(positions)


class RejectionVerification:
    """The paper's verification; `cache_bias` below 1 is Saguaro sampling (section 4.2)."""

    needs_scores = True

    def __init__(self, seed: int, vocab_size: int, cache_bias: float = 1.0, fan_out: int = 0):
        # Three independent streams: what the draft draws, what the accept tests see, what the target draws.
        self._draft = KeyedNoise(seed & _SEED_MASK, vocab_size)
        self._tests, self._target = ((seed + stream * _STREAM) & _SEED_MASK for stream in (1, 2))
        self.cache_bias = cache_bias
        # The F forks leave out the token that is sent, so F + 1 tokens cover both.
        self._biased_tokens = fan_out + 1

    def draw(self, scores: torch.Tensor, rows: list[int], positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """A draft token for every (row, position), and log q of exactly the law it was drawn from.

        With Saguaro sampling the tokens that will be in the speculation cache are made less likely, so that more of the
        residual falls on them.
        """
        noise = self._draft(rows, positions, scores.device)
        if self.cache_bias < 1:
            return kernels.biased_draw(scores, self._biased_tokens, self.cache_bias, noise)[:2]
        return (scores + noise).argmax(dim=-1), scores

    def fork_scores(self, scores: torch.Tensor, rows: list[int], positions: list[int]) -> torch.Tensor:
        return scores

    def choose(self, scores: torch.Tensor, rows: list[int], positions: list[int]) -> torch.Tensor:
        """A target token from softmax(scores), where nothing was proposed."""
        empty = torch.zeros(len(rows), 0, dtype=torch.long, device=scores.device)
        proposal = Proposal(empty, [0] * len(rows), None, [True] * len(rows))
        return self.verify(scores[:, None], proposal, rows, positions)[1]

    def verify(self, scores: torch.Tensor, proposal: Proposal, rows: list[int], positions: list[int],
               filters: dict[str, float] | None = None):  # fmt: skip
        """As [`CoupledVerification.verify`]."""
        device, width = scores.device, proposal.width
        row, start = send(rows, device), send(positions, device)
        at = start[:, None] + torch.arange(max(width, 1), device=device)
        tests = kernels.keyed_uniform(self._tests, row.repeat_interleave(at.shape[1]), at.flatten(), 1).view_as(at)
        return kernels.rejection_verification(
            scores,
            proposal.scores,
            proposal.tokens,
            send(proposal.lengths, device),
            point_mass=send(proposal.point_mass, device, torch.bool),
            uniforms=tests[:, :width],
            residual_seeds=self._target ^ (row << 40) ^ start,
            **(filters or {}),
        )

    def forget_before(self, positions: dict[int, int]) -> None:
        self._draft.forget_before(positions)
