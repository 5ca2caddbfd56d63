# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""The losses are the divergences they are named after, on the rows they belong to."""

from __future__ import annotations

import itertools

import pytest
import torch

from hf_saguaro.adaptation.losses import TeacherRows, acceptance, rounds_needed, row_losses
from hf_saguaro.kernels import top_k_with_residual


VOCAB = 23


@pytest.fixture
def scores():
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(5, VOCAB, generator=generator) * 3
    draft = torch.randn(5, VOCAB, generator=generator) * 3
    return target, draft


def full(kind, p, q):
    if kind == "kl":
        return (p * (p.log() - q.log())).sum(-1)
    if kind == "reverse_kl":
        return (q * (q.log() - p.log())).sum(-1)
    return 1 - torch.minimum(p, q).sum(-1)


@pytest.mark.parametrize("kind", ["kl", "reverse_kl", "acceptance"])
def test_all_tokens_kept_gives_the_full_divergence(scores, kind):
    target, draft = scores
    teacher = TeacherRows(*top_k_with_residual(target, VOCAB))
    expected = full(kind, target.softmax(-1), draft.softmax(-1))
    torch.testing.assert_close(row_losses(draft, teacher, kind), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["kl", "reverse_kl", "acceptance"])
def test_few_tokens_kept_gives_the_divergence_with_one_bucket_for_the_rest(scores, kind):
    target, draft = scores
    teacher = TeacherRows(*top_k_with_residual(target, 4))
    p, q = target.softmax(-1), draft.softmax(-1)

    def merged(x):
        top = x.gather(1, teacher.token_ids)
        return torch.cat([top, 1 - top.sum(-1, keepdim=True)], 1)

    torch.testing.assert_close(row_losses(draft, teacher, kind), full(kind, merged(p), merged(q)), atol=1e-4, rtol=1e-4)
    assert (row_losses(draft, teacher, kind) <= full(kind, p, q) + 1e-5).all()


@pytest.mark.parametrize("kind", ["kl", "reverse_kl", "acceptance"])
@pytest.mark.parametrize("k", [3, VOCAB])
def test_gradient_is_that_of_finite_differences(scores, kind, k):
    target, draft = scores
    teacher = TeacherRows(*top_k_with_residual(target[:1], k))
    logits = draft[:1].clone().requires_grad_()
    row_losses(logits, teacher, kind).sum().backward()
    step = 1e-3
    for token in range(VOCAB):
        moved = [draft[:1].clone(), draft[:1].clone()]
        moved[0][0, token] += step
        moved[1][0, token] -= step
        up, down = (float(row_losses(logits, teacher, kind)) for logits in moved)
        assert float(logits.grad[0, token]) == pytest.approx((up - down) / (2 * step), abs=2e-3)


@pytest.mark.parametrize("kind", ["kl", "reverse_kl", "acceptance"])
def test_ruled_out_tokens_give_finite_losses_and_gradients(scores, kind):
    """A top-p target leaves two tokens; the others, and the bucket, have probability zero."""
    target, draft = scores
    target[:, 2:] = -torch.inf
    for k in (4, VOCAB):
        teacher = TeacherRows(*top_k_with_residual(target, k))
        logits = draft.clone().requires_grad_()
        losses = row_losses(logits, teacher, kind)
        losses.sum().backward()
        assert losses.isfinite().all() and logits.grad.isfinite().all() and logits.grad.abs().sum() > 0


def test_acceptance_is_the_rejection_rule(scores):
    target, draft = scores
    teacher = TeacherRows(*top_k_with_residual(target, VOCAB))
    sampled = torch.minimum(target.softmax(-1), draft.softmax(-1)).sum(-1)
    torch.testing.assert_close(acceptance(draft, teacher, greedy=False), sampled, atol=1e-5, rtol=1e-5)
    assert acceptance(target * 0.5, teacher, greedy=True).tolist() == [1.0] * 5
    assert acceptance(-target, teacher, greedy=True).tolist() == [0.0] * 5


def replay(hits, lookahead):
    rounds, at = 0, 0
    while at < len(hits):
        run = 0
        while run < lookahead and at + run < len(hits) and hits[at + run]:
            run += 1
        at, rounds = at + run + 1, rounds + 1
    return rounds


@pytest.mark.parametrize("lookahead", [1, 2, 4])
def test_rounds_needed_replays_greedy_decoding(lookahead):
    for hits in itertools.product([0.0, 1.0], repeat=7):
        assert rounds_needed(list(hits), lookahead) == replay(hits, lookahead)


@pytest.mark.parametrize("lookahead", [1, 3])
def test_rounds_needed_is_the_mean_over_what_may_be_accepted(lookahead):
    chances = [0.3, 0.9, 0.5, 0.7, 0.2]
    mean = 0.0
    for hits in itertools.product([0, 1], repeat=len(chances)):
        probability = 1.0
        for hit, chance in zip(hits, chances):
            probability *= chance if hit else 1 - chance
        mean += probability * replay(hits, lookahead)
    assert rounds_needed(chances, lookahead) == pytest.approx(mean)
