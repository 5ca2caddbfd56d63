# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""The draft's side of a round: what it prepares while the target verifies, and what it serves when the verdict is in."""

from __future__ import annotations

import time
from concurrent.futures import Future

import torch

from .acceptance import Proposal
from .drafter import Chain, Drafter, Tree
from .policy import Policy, RoundPlan
from .prompt_lookup import NGramIndex
from .speculation_cache import Outcome, SpeculationCache
from .transfer import move, send


class Speculator:
    """Serves proposals: from the speculation cache on a hit, from a backup on a miss.

    Args:
        drafter (`Drafter`)
        policy (`Policy`)
        device (`torch.device`): where proposals are verified.
    """

    def __init__(self, drafter: Drafter, policy: Policy, device: torch.device):
        self.drafter, self.policy, self.device = drafter, policy, device
        self.primary_seconds = self.backup_seconds = 0.0  # drafting that led to hits, and on misses
        self.busy_seconds = self._preparing = 0.0
        self._lookup = None
        if policy.config.backup in ("auto", "prompt_lookup"):
            self._lookup = [NGramIndex(tokens.tolist()) for tokens in drafter.prompts]

    def prefill(self) -> None:
        """The draft reads the prompts."""
        self.drafter.prefill()

    def close(self) -> None:
        """After the last round."""
        self.drafter.slots.close()

    @property
    def compile_seconds(self) -> float:
        return self.drafter.slots.compile_seconds

    def prepare(self, proposal: Proposal, plan: RoundPlan, verdict: Future) -> Proposal:
        """The draft's work beside one verification: glue, forks, tree; then the next proposal, once the verdict is in.

        Between two passes it looks whether the verdict has come: an unfinished tree is served as it is, so a slow draft
        never holds a round up for longer than one pass (on a device: for longer than the passes it was given by then).
        """
        began = time.perf_counter()
        tree = None
        if self.policy.prepares and plan.depth:
            tree = self._plant(proposal, plan)
            while len(tree.tokens) < plan.depth and not verdict.done():
                self.drafter.grow(tree)
        cache = SpeculationCache(tree)
        self._preparing = time.perf_counter() - began
        if tree is not None:
            self.policy.estimates.tree_pass.add(self._preparing / (1 + len(tree.tokens)))
        return self.serve(verdict.result(), plan, cache)

    def _plant(self, proposal: Proposal, plan: RoundPlan) -> Tree:
        scores = self.drafter.glue(plan.rows, proposal)
        return self.drafter.plant(plan.rows, proposal, scores, self.policy.fan_out(proposal))

    def serve(self, outcome: Outcome, plan: RoundPlan, cache: SpeculationCache) -> Proposal:
        """The next proposal, given how the last round ended."""
        began = time.perf_counter()
        depth = min(plan.depth, outcome.room - 1)
        hits = cache.lookup(outcome) if depth > 0 else {}
        served: list[Chain] = []
        if hits:
            chain = self.drafter.harvest(cache.tree, hits, depth, self._pays)
            served = [chain] if chain.tokens else []
        for row in outcome.rows:
            self.drafter.advance(row, outcome.tokens[row])
            if self._lookup is not None:
                self._lookup[row].extend(outcome.tokens[row])
        ready = set(hits) if served else set()
        missed = [row for row in outcome.rows if row not in ready]
        next_proposal = self._assemble(served, ready, *self._back_up(missed, depth, plan))
        serving = time.perf_counter() - began
        self.busy_seconds += self._preparing + serving
        if missed:
            self.backup_seconds += serving
        else:
            self.primary_seconds += self._preparing + serving
        self._preparing = 0.0
        return next_proposal

    def open(self, plan: RoundPlan) -> Proposal:
        """A proposal for the text as it is, before any round."""
        return self._assemble([], set(), *self._back_up(plan.rows, plan.depth, plan))

    def answer(self, outcome: Outcome, plan: RoundPlan) -> Proposal:
        """The next proposal where nothing was prepared: draft and target take turns."""
        return self.serve(outcome, plan, SpeculationCache(None))

    def _back_up(
        self, rows: list[int], depth: int, plan: RoundPlan
    ) -> tuple[Chain | None, dict[int, list[int]], list[str]]:
        """What the rows that missed get: a draft chain, or copied tokens by row; and its name, once a row."""
        if not rows or depth <= 0:
            return None, {}, ["none"] * len(rows)
        wanted = self.policy.config.backup
        whole = self.policy.completes_chains(plan)
        if wanted == "draft" or wanted == "auto" and self.policy.draft_backs_up(plan):
            return self.drafter.chain(rows, depth, self._complete if whole else self._pays), {}, ["draft"] * len(rows)
        if self._lookup is not None:
            depth = self.policy.worth_copying(depth)
            copies = {row: self._lookup[row].continuation(depth) for row in rows}
            return None, {row: tokens for row, tokens in copies.items() if tokens}, ["prompt_lookup"] * len(rows)
        return None, {}, ["none"] * len(rows)

    def _pays(self, chain: Chain) -> bool:
        by_token = chain.read_confidence() if self.policy.weighs_confidence else []
        self._complete(chain)
        return self.policy.pass_pays([sum(values) / len(values) for values in by_token])

    @property
    def _awaits_passes(self) -> bool:
        """Whether the host knows how long a pass of a chain takes: passes of a device may follow each other unread."""
        return self.policy.weighs_confidence or self.drafter.slots.device.type == "cpu"

    def _complete(self, chain: Chain) -> bool:
        if chain.pass_began is not None and self._awaits_passes:
            self.policy.estimates.draft_pass.add(time.perf_counter() - chain.pass_began)
        return True

    def _assemble(self, prepared: list[Chain], hits: set[int], chain: Chain | None, copies: dict[int, list[int]],
                  backups: list[str]) -> Proposal:  # fmt: skip
        chains, batch_size = prepared + ([] if chain is None else [chain]), len(self.drafter.lengths)
        lengths, point_mass = [0] * batch_size, [True] * batch_size
        confidence: list[list[float]] = [[] for _ in range(batch_size)]
        for chain in chains:
            weighed = self.policy.weighs_confidence
            for r, row in enumerate(chain.rows):
                values = [by_token[r] for by_token in chain.read_confidence()] if weighed else []
                lengths[row] = self.policy.worth_verifying(values) if weighed else len(chain.tokens)
                point_mass[row], confidence[row] = False, values[: lengths[row]]
        for row, copied in copies.items():
            lengths[row] = len(copied)
        width, device = max(lengths), self.drafter.slots.device
        tokens = torch.zeros(batch_size, width, dtype=torch.long, device=device)
        scores = None
        for chain in chains:
            count = min(len(chain.tokens), width)
            if count == 0:
                continue
            rows = send(chain.rows, device)
            tokens[:, :count].index_copy_(0, rows, torch.stack(chain.tokens[:count], dim=1))
            if chain.scores[0] is not None:
                if scores is None:
                    scores = chain.scores[0].new_zeros(batch_size, width, chain.scores[0].shape[-1])
                scores[:, :count].index_copy_(0, rows, torch.stack(chain.scores[:count], dim=1))
        for row, copied in copies.items():
            tokens[row, : len(copied)] = send(copied, device)
        return Proposal(
            move(tokens, self.device),
            lengths,
            None if scores is None else move(scores, self.device),
            point_mass,
            [row in hits and lengths[row] > 0 for row in range(batch_size)],
            backups,
            confidence,
            tokens,
            awaited=self._awaits_passes or not any(chain.tokens for chain in chains),
        )
