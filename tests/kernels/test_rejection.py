# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Rejection verification: every small case by hand, the law of every path, and the kernel beside the reference."""

import pytest
import torch
from scipy import stats

from hf_saguaro import kernels
from hf_saguaro.kernels import reference


ALMOST_ONE = 1 - 2**-24
INF = torch.inf


FILTERS = ("temperature", "top_k", "top_p", "min_p")


def verify(device, target, draft, proposals, lengths, **options):
    """Runs on `device`; lists become tensors, and what is not given is harmless."""
    filters = {name: options.pop(name) for name in FILTERS if name in options}
    target, proposals, lengths = torch.as_tensor(target), torch.as_tensor(proposals), torch.as_tensor(lengths)
    batch = target.shape[0]
    options = {
        "point_mass": torch.zeros(batch, dtype=torch.bool),
        "uniforms": torch.full(proposals.shape, 0.5),
        "residual_seeds": torch.arange(batch),
    } | {name: torch.as_tensor(value) for name, value in options.items()}
    draft = None if draft is None else torch.as_tensor(draft).to(device)
    accepted, token = kernels.rejection_verification(
        target.to(device),
        draft,
        proposals.to(device),
        lengths.to(device),
        **{name: value.to(device) for name, value in options.items()},
        **filters,
    )
    assert accepted.dtype == token.dtype == torch.int64
    return accepted.cpu(), token.cpu()


def logs(*rows):
    return torch.tensor(rows).log()


FLAT = [0.25, 0.25, 0.25, 0.25]
SURE_0, SURE_1, SURE_2, SURE_3 = torch.eye(4).tolist()

# p rows (K+1), q rows (K), proposals, uniforms, accepted, tokens that may follow
CASES = {
    "all accepted, bonus from p": ([FLAT, FLAT, SURE_2], [FLAT, FLAT], [0, 3], [0.9, 0.9], 2, {2}),
    "rejected at 0": ([[0.1, 0.9, 0, 0], FLAT, FLAT], [[0.9, 0.1, 0, 0], FLAT], [0, 1], [0.2, 0], 0, {1}),
    "rejected at K-1": ([FLAT, [0.1, 0.9, 0, 0], FLAT], [FLAT, [0.9, 0.1, 0, 0]], [0, 0], [0.9, 0.2], 1, {1}),
    "u equal to p/q is a rejection": ([[0.25, 0.75, 0, 0], FLAT], [[0.5, 0.5, 0, 0]], [0], [0.5], 0, {1}),
    "p = q never rejects": ([FLAT, SURE_1], [FLAT], [2], [ALMOST_ONE], 1, {1}),
    "p > q never rejects": ([[0.5, 0.5, 0, 0], SURE_1], [FLAT], [1], [ALMOST_ONE], 1, {1}),
    "disjoint p and q": ([[0.5, 0.5, 0, 0], FLAT], [[0, 0, 0.5, 0.5]], [3], [0.0], 0, {0, 1}),
    "p = 0 is refused even at u = 0": ([[0, 0.5, 0.5, 0], FLAT], [FLAT], [0], [0.0], 0, {1, 2}),
    "one-hot p, right proposal": ([SURE_1, SURE_3], [FLAT], [1], [ALMOST_ONE], 1, {3}),
    "one-hot p, wrong proposal": ([SURE_1, SURE_3], [FLAT], [0], [0.0], 0, {1}),
    "one-hot q, accepted": ([[0.3, 0.7, 0, 0], SURE_3], [SURE_0], [0], [0.29], 1, {3}),
    "one-hot q, refused": ([[0.3, 0.7, 0, 0], SURE_3], [SURE_0], [0], [0.31], 0, {1}),
    "no residual falls back to p": ([SURE_1, FLAT], [SURE_1], [0], [0.0], 0, {1}),
}


@pytest.mark.parametrize("name", CASES)
def test_small_cases(any_device, name):
    p, q, proposals, uniforms, accepted, tokens = CASES[name]
    result = verify(any_device, logs(*p)[None], logs(*q)[None], [proposals], [len(proposals)], uniforms=[uniforms])
    assert result[0].tolist() == [accepted]
    assert result[1].item() in tokens


@pytest.mark.parametrize(
    ("p", "proposal", "u", "accepted", "tokens"),
    [
        ([0.3, 0.7, 0, 0], 0, 0.29, 1, {3}),
        ([0.3, 0.7, 0, 0], 0, 0.31, 0, {1}),  # p without the proposal
        ([0.0, 0.7, 0.3, 0], 0, 0.0, 0, {1, 2}),
        ([0, 1.0, 0, 0], 1, ALMOST_ONE, 1, {3}),
    ],
)
@pytest.mark.parametrize("with_draft", [False, True])
def test_a_point_mass_is_accepted_with_p(any_device, p, proposal, u, accepted, tokens, with_draft):
    draft = logs(FLAT)[None] if with_draft else None  # another row of the batch may have needed scores
    result = verify(any_device, logs(p, SURE_3)[None], draft, [[proposal]], [1], uniforms=[[u]], point_mass=[True])
    assert result[0].tolist() == [accepted]
    assert result[1].item() in tokens


def test_rows_end_at_their_own_length_and_ignore_what_lies_beyond(any_device):
    target = logs(FLAT, SURE_1, SURE_2)[None].repeat(3, 1, 1)
    draft = logs(FLAT, SURE_1)[None].repeat(3, 1, 1)
    target[1, 2], draft[1, 1], draft[2] = torch.nan, torch.nan, torch.nan
    target[2, 1:] = torch.nan
    proposals = [[0, 1], [0, 3], [3, 3]]
    accepted, token = verify(any_device, target, draft, proposals, [2, 1, 0])
    assert accepted.tolist() == [2, 1, 0]
    assert token[:2].tolist() == [2, 1] and 0 <= token[2] < 4


def test_without_proposals_it_draws_from_p(any_device):
    target = logs(SURE_3, SURE_1)[:, None]
    for draft in (None, torch.empty(2, 0, 4)):
        accepted, token = verify(any_device, target, draft, torch.empty(2, 0, dtype=torch.int64), [0, 0])
        assert (accepted.tolist(), token.tolist()) == ([0, 0], [3, 1])


def test_scores_count_up_to_a_constant(any_device, generator):
    target, draft = torch.randn(2, 3, 50, generator=generator), torch.randn(2, 2, 50, generator=generator)
    options = {"proposals": [[1, 2], [3, 4]], "lengths": [2, 2], "uniforms": torch.rand(2, 2, generator=generator)}
    plain = verify(any_device, target, draft, **options)
    shifted = verify(any_device, target + 300, draft - 300, **options)
    assert all(a.equal(b) for a, b in zip(plain, shifted))


def test_sums_reach_over_the_whole_row(any_device):
    """Most of the mass lies far from the proposal, and further on in the row it grows: p(0) = 1/16."""
    target = torch.full((3, 2, 12_300), -INF)
    target[..., [0, 5000, 9000, 12_299]] = torch.tensor([1.0, 3.0, 4.0, 8.0]).log() - 50
    draft = torch.full((3, 1, 12_300), -INF)
    draft[..., 0] = 7.0
    uniforms = [[1 / 16 - 1e-4], [1 / 16 + 1e-4], [0.0]]
    accepted, _ = verify(any_device, target, draft, [[0]] * 3, [1] * 3, uniforms=uniforms)
    assert accepted.tolist() == [1, 0, 1]


# --- the law ----------------------------------------------------------------------------------------------------------

P = torch.tensor([[0.40, 0.20, 0.30, 0.10, 0.0], [0.05, 0.05, 0.10, 0.30, 0.50], [0.2, 0.2, 0.2, 0.2, 0.2]])
Q = torch.tensor([[0.50, 0.30, 0.15, 0.04, 0.01], [0.20, 0.20, 0.20, 0.20, 0.20]])
DRAWS = 40_000


def draw_rounds(device, generator, q_told, lengths=2, point_mass=False, **filters):
    """Emitted tokens of many independent rounds in which the proposals are really drawn from Q: accept lengths, and
    [DRAWS, 3] tokens of which the first `accepted + 1` are meant."""
    proposals = torch.stack([row.multinomial(DRAWS, replacement=True, generator=generator) for row in Q], 1)
    accepted, token = verify(
        device,
        P.log().expand(DRAWS, 3, 5),
        q_told.log().expand(DRAWS, 2, 5),
        proposals,
        torch.full((DRAWS,), lengths),
        uniforms=torch.rand(DRAWS, 2, generator=generator),
        residual_seeds=torch.randint(-(2**63), 2**63 - 1, (DRAWS,), generator=generator),
        point_mass=torch.full((DRAWS,), point_mass),
        **filters,
    )
    tokens = torch.cat([proposals, token[:, None]], 1)
    return accepted, tokens.scatter(1, accepted[:, None], token[:, None])


def pvalue(tokens, law):
    counts = tokens.bincount(minlength=5).double()
    assert counts[law == 0].sum() == 0
    wanted = law.double() / law.double().sum() * counts.sum()
    return stats.chisquare(counts[law > 0].numpy(), wanted[law > 0].numpy()).pvalue


@pytest.mark.parametrize("point_mass", [False, True])
def test_every_emitted_token_has_the_law_of_the_target(fast_device, generator, point_mass):
    accepted, tokens = draw_rounds(fast_device, generator, Q, point_mass=point_mass)
    assert pvalue(tokens[:, 0], P[0]) > 0.01
    assert pvalue(tokens[accepted >= 1, 1], P[1]) > 0.01
    assert pvalue(tokens[accepted == 2, 2], P[2]) > 0.01
    share = torch.minimum(P[:2], Q).sum(1) if not point_mass else (P[:2] * Q).sum(1)
    first, second = (accepted >= 1).float().mean(), (accepted == 2).float().sum() / (accepted >= 1).sum()
    torch.testing.assert_close(torch.stack([first, second]), share, atol=0.01, rtol=0)


@pytest.mark.parametrize("filters", [{"temperature": 0.6, "top_k": 2}, {"top_p": 0.75}, {"min_p": 0.4}], ids=str)
def test_filters_make_the_law_of_what_they_leave(fast_device, generator, filters):
    accepted, tokens = draw_rounds(fast_device, generator, Q, **filters)
    law = reference.warp(P.log(), **filters).softmax(-1)
    assert (law == 0).sum() > (P == 0).sum()
    assert pvalue(tokens[:, 0], law[0]) > 0.01
    assert pvalue(tokens[accepted >= 1, 1], law[1]) > 0.01
    assert pvalue(tokens[accepted == 2, 2], law[2]) > 0.01


def test_the_residual_is_what_the_draft_lacks(fast_device, generator):
    accepted, tokens = draw_rounds(fast_device, generator, Q)
    assert pvalue(tokens[accepted == 0, 0], (P[0] - Q[0]).clamp(min=0)) > 0.01


def test_the_residual_of_a_point_mass_is_the_target_without_it(fast_device, generator):
    accepted, token = verify(
        fast_device,
        P[:2].log().expand(DRAWS, 2, 5),
        None,
        torch.full((DRAWS, 1), 2),
        torch.ones(DRAWS, dtype=torch.int64),
        uniforms=torch.rand(DRAWS, 1, generator=generator),
        point_mass=torch.ones(DRAWS, dtype=torch.bool),
    )
    without = P[0].clone()
    without[2] = 0
    assert pvalue(token[accepted == 0], without) > 0.01
    assert abs((accepted == 1).float().mean() - P[0, 2]) < 0.01


def test_shorter_rounds_have_the_same_law(fast_device, generator):
    accepted, tokens = draw_rounds(fast_device, generator, Q, lengths=1)
    assert accepted.max() == 1
    assert pvalue(tokens[:, 0], P[0]) > 0.01
    assert pvalue(tokens[accepted == 1, 1], P[1]) > 0.01


def test_a_wrong_q_is_noticed(fast_device, generator):
    """The tests above have the power to see an error: here verification is told another q than the draft drew from."""
    wrong = Q.clone()
    wrong[0] = torch.tensor([0.45, 0.30, 0.20, 0.04, 0.01])
    assert pvalue(draw_rounds(fast_device, generator, wrong)[1][:, 0], P[0]) < 1e-6


# --- the kernel and the reference -------------------------------------------------------------------------------------
# Equal tokens, with no tolerance: probabilities differ in the last digits, which these draws are not close to.


def random_round(batch, depth, vocab_size, dtype, draft_dtype, generator):
    target = torch.randn(batch, depth + 1, vocab_size, generator=generator) * 2
    draft = target[:, :depth] + torch.randn(batch, depth, vocab_size, generator=generator) * 0.7
    proposals = (
        draft
        + reference.keyed_gumbel(1, torch.arange(batch * depth), torch.arange(batch * depth), vocab_size).view(
            batch, depth, vocab_size
        )
    ).argmax(-1)
    lengths = torch.randint(0, depth + 1, (batch,), generator=generator)
    lengths[-1] = depth
    options = {
        "uniforms": torch.rand(batch, depth, generator=generator),
        "residual_seeds": torch.randint(-(2**63), 2**63 - 1, (batch,), generator=generator),
        "point_mass": torch.arange(batch) % 3 == 1,
    }
    return (target.to(dtype), draft.to(draft_dtype), proposals, lengths), options


@pytest.mark.parametrize(
    ("batch", "depth", "vocab_size", "dtype", "draft_dtype"),
    [
        (1, 1, 97, torch.float32, torch.float32),
        (4, 3, 1031, torch.bfloat16, torch.float32),
        (2, 16, 257, torch.float16, torch.float16),
        (5, 2, 33, torch.float32, torch.bfloat16),
        (1, 1, 128_256, torch.bfloat16, torch.bfloat16),
    ],
)
def test_kernel_equals_the_reference(triton_device, generator, batch, depth, vocab_size, dtype, draft_dtype):
    arguments, options = random_round(batch, depth, vocab_size, dtype, draft_dtype, generator)
    expected = reference.rejection_verification(*arguments, **options)
    results = verify(triton_device, *arguments, **options)
    assert all(a.equal(b) for a, b in zip(results, expected))


def test_kernel_equals_the_reference_without_a_draft(triton_device, generator):
    (target, _, proposals, lengths), options = random_round(3, 2, 300, torch.float32, torch.float32, generator)
    expected = reference.rejection_verification(target, None, proposals, lengths, **options)
    results = verify(triton_device, target, None, proposals, lengths, **options)
    assert all(a.equal(b) for a, b in zip(results, expected))


# Scores in steps of a quarter tie everywhere, also at the ends of what a filter keeps.
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    ("batch", "depth", "vocab_size", "dtype", "filters"),
    [
        (3, 2, 1031, torch.float32, {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.02}),
        (4, 3, 777, torch.bfloat16, {"top_p": 0.8}),
        (2, 4, 97, torch.float16, {"top_p": 0.95, "temperature": 1.6}),
        (3, 3, 5000, torch.float32, {"min_p": 0.1}),
        (5, 1, 4099, torch.float32, {"top_k": 7}),
        (3, 2, 300, torch.float32, {"top_k": 200, "top_p": 0.5}),  # more than a kernel lists
        (2, 2, 31, torch.float32, {"top_k": 64, "top_p": 0.0}),
        (2, 1, 49_152, torch.bfloat16, {"top_p": 0.9, "temperature": 0.8}),
        (3, 2, 500, torch.float32, {"temperature": 0.5}),
    ],
)
def test_kernel_filters_as_the_reference(triton_device, generator, batch, depth, vocab_size, dtype, filters, ties):
    (target, draft, proposals, lengths), options = random_round(
        batch, depth, vocab_size, dtype, torch.float32, generator
    )
    if ties:
        target = (target * 4).round() / 4
    for seed in range(2):
        options["residual_seeds"] += seed
        expected = reference.rejection_verification(target, draft, proposals, lengths, **options, **filters)
        results = verify(triton_device, target, draft, proposals, lengths, **options, **filters)
        assert all(a.equal(b) for a, b in zip(results, expected))


def test_kernel_equals_the_reference_after_filters(triton_device, generator):
    (target, draft, proposals, lengths), options = random_round(4, 2, 500, torch.float32, torch.float32, generator)
    target = target.masked_fill(torch.rand(target.shape, generator=generator) < 0.9, -INF)
    draft = draft.masked_fill(torch.rand(draft.shape, generator=generator) < 0.5, -INF)
    draft.scatter_(2, proposals[..., None], 1.0)  # what was proposed was possible
    options["uniforms"].zero_()
    expected = reference.rejection_verification(target, draft, proposals, lengths, **options)
    results = verify(triton_device, target, draft, proposals, lengths, **options)
    assert all(a.equal(b) for a, b in zip(results, expected))
    assert target[torch.arange(4), results[0], results[1]].isfinite().all()


def test_kernel_reads_any_strides(triton_device, generator):
    (target, draft, proposals, lengths), options = random_round(2, 3, 600, torch.float32, torch.float32, generator)
    expected = reference.rejection_verification(target, draft, proposals, lengths, **options)
    strided = target.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    wide = torch.stack([draft, draft], 2).flatten(1, 2)[:, ::2]
    options["uniforms"] = torch.stack([options["uniforms"]] * 2, 2)[..., 0]
    results = verify(triton_device, strided, wide, proposals, lengths, **options)
    assert all(a.equal(b) for a, b in zip(results, expected))
