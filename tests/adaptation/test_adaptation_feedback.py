# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Feedback lands on the right tokens, and never takes more memory than it was given."""

from __future__ import annotations

import pytest
import torch
from toy_serving import VOCAB, MarkovTarget, random_prompts, teach, tiny_draft

from hf_saguaro.adaptation import AdaptationConfig, OnlineAdapter
from hf_saguaro.adaptation.buffer import FeedbackBuffer
from hf_saguaro.adaptation.feedback import CONTEXT_TOKENS, PIECE_ROWS, FeedbackSequence, FeedbackSession
from hf_saguaro.adaptation.losses import TeacherRows
from hf_saguaro.adaptation.student import branch_items, text_item


def collect(rounds, prompt=(1, 2, 3), vocab_size=VOCAB, temperature=0.0):
    """`rounds`: (proposed, accepted, next token, scores)."""
    delivered = []
    session = FeedbackSession([torch.tensor(prompt)], temperature, 8, vocab_size, [False], delivered.append, lambda: 5)
    for proposed, accepted, next_token, scores in rounds:
        session.observe(0, torch.tensor(proposed, dtype=torch.long), accepted, next_token, scores)
    session.end()
    return delivered


def peaked(*tokens):
    """Scores whose favourite is the given token, a row each."""
    scores = torch.zeros(len(tokens), VOCAB)
    scores[range(len(tokens)), tokens] = 9.0
    return scores


def test_rows_of_a_round_are_the_accepted_and_the_first_rejected():
    # K = 4, rejected at the third: the target wanted 30 instead of 12.
    (sequence,) = collect([([10, 11, 12, 13], 2, 30, peaked(10, 11, 30))])
    assert sequence.tokens.tolist() == [1, 2, 3, 10, 11, 30]
    assert sequence.rows == 3 and sequence.first == 3
    assert sequence.teacher.token_ids[:, 0].tolist() == [10, 11, 30]
    assert sequence.version == 5


def test_a_full_accept_keeps_the_bonus_row():
    (sequence,) = collect([([10, 11], 2, 30, peaked(10, 11, 30))])
    assert sequence.tokens.tolist() == [1, 2, 3, 10, 11, 30] and sequence.rows == 3


def test_a_round_cut_by_a_stop_keeps_what_was_emitted():
    (sequence,) = collect([([10, 11, 12], 2, 11, peaked(10, 11))])
    assert sequence.tokens.tolist() == [1, 2, 3, 10, 11] and sequence.rows == 2


def test_every_row_is_the_distribution_of_its_own_token_over_many_rounds():
    rounds = [([], 0, 20, peaked(20)), ([21, 9], 1, 22, peaked(21, 22)), ([23], 1, 24, peaked(23, 24))]
    (sequence,) = collect(rounds)
    text = sequence.tokens[sequence.first :].tolist()
    assert text == sequence.teacher.token_ids[:, 0].tolist() == [20, 21, 22, 23, 24]


def test_loss_reads_each_row_after_its_true_prefix_and_nowhere_else():
    """Against the off-by-one that trains the position after a miss: the gradient reaches the logits of exactly the
    positions that predict the text."""
    adapter = OnlineAdapter(tiny_draft(), AdaptationConfig(layers="all", top_k_logits=VOCAB))
    with adapter:
        student = adapter._trainer.loop.learner.student
        (sequence,) = collect([([10, 11, 12, 13], 2, 30, peaked(10, 11, 30))])
        logits = student.logits([text_item(sequence)])
        with torch.no_grad():
            whole = student.model.model(input_ids=sequence.tokens[None].long()).last_hidden_state
            expected = whole[0, [2, 3, 4]] @ student.model.lm_head.weight.T
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_rows_do_not_depend_on_what_shares_their_pass():
    adapter = OnlineAdapter(tiny_draft(), AdaptationConfig())
    with adapter:
        student = adapter._trainer.loop.learner.student
        (short,) = collect([([10], 1, 30, peaked(10, 30))])
        (long,) = collect([([7, 8, 9], 3, 4, peaked(7, 8, 9, 4))], prompt=tuple(range(20)), temperature=0.5)
        together = student.logits([text_item(short), text_item(long)])
        apart = torch.cat([student.logits([text_item(short)]), student.logits([text_item(long)])])
        torch.testing.assert_close(together, apart, atol=1e-5, rtol=1e-5)


def test_rejected_branch_follows_the_text_that_it_left():
    scores = peaked(10, 30, 40, 41, 42)  # n + 1 rows: two emitted, three along what was rejected
    (sequence,) = collect([([], 0, 9, peaked(9)), ([10, 11, 12, 13], 1, 30, scores)])
    assert sequence.tokens.tolist() == [1, 2, 3, 9, 10, 30]
    (branch,) = branch_items(sequence)
    assert branch.tokens.tolist() == [1, 2, 3, 9, 10, 11, 12, 13]
    # The row at index i is the target's view after token i: after 11, 12 and 13.
    assert branch.first == 5 and branch.teacher.token_ids[:, 0].tolist() == [40, 41, 42]


def test_tokens_the_draft_does_not_know_are_cut_off_and_counted():
    scores = torch.zeros(2, VOCAB)
    scores[0, VOCAB - 1], scores[1, 3] = 9.0, 9.0
    (sequence,) = collect([([5], 1, 3, scores)], vocab_size=VOCAB - 4)
    assert sequence.outside_vocabulary == 1
    assert int(sequence.teacher.token_ids.max()) < VOCAB - 4
    total = sequence.teacher.log_probs.exp().sum(-1) + sequence.teacher.log_residual.exp()
    torch.testing.assert_close(total, torch.ones(2))


def test_long_text_is_handed_over_in_pieces_with_true_positions():
    prompt = tuple(i % VOCAB for i in range(CONTEXT_TOKENS + 50))
    rounds = [([], 0, i % VOCAB, peaked(i % VOCAB)) for i in range(PIECE_ROWS + 10)]
    first, second = collect(rounds, prompt=prompt)
    assert (first.rows, second.rows) == (PIECE_ROWS, 10)
    assert first.start == 50 and first.first == CONTEXT_TOKENS
    whole = list(prompt) + [i % VOCAB for i in range(PIECE_ROWS + 10)]
    assert second.tokens.tolist() == whole[second.start :]


def test_feedback_of_inference_mode_can_be_trained_on():
    with OnlineAdapter(tiny_draft(), AdaptationConfig()) as adapter:
        with torch.inference_mode():
            session = adapter.begin([torch.tensor([1, 2, 3])])
            session.observe(0, torch.tensor([4]), 1, 5, peaked(4, 5))
            session.end()
        assert adapter.flush(60)
        assert adapter.metrics()["steps"] == 1, adapter.history()


def sequence_of(rows, prompt=4):
    teacher = TeacherRows(torch.zeros(rows, 8), torch.zeros(rows, 8, dtype=torch.int32), torch.zeros(rows))
    return FeedbackSequence(torch.ones(prompt + rows, dtype=torch.int32), 0, prompt, teacher)


@pytest.mark.parametrize("lengths", [(1,), (3, 40, 7), (PIECE_ROWS - 1,)])
def test_buffer_stays_within_rows_and_bytes(lengths):
    buffer = FeedbackBuffer(max_rows=600, row_bytes=80, seed=0)
    for index in range(400):
        sequence = sequence_of(lengths[index % len(lengths)], prompt=1 + 400 * (index % 3 == 0))
        sequence.held_out = buffer.draw_held_out()
        buffer.add(sequence)
        if index % 5 == 0:
            taken = buffer.take_fresh(2)
            buffer.keep(taken)
        assert buffer.rows <= 600 and buffer.nbytes <= 600 * 80
    kept = sum(buffer.contents().values(), [])
    assert buffer.rows == sum(sequence.rows for sequence in kept)
    assert buffer.nbytes == sum(sequence.nbytes for sequence in kept)


def test_reservoir_keeps_old_and_new_alike():
    buffer = FeedbackBuffer(max_rows=160, row_bytes=10_000, seed=3)
    for version in range(1200):
        sequence = sequence_of(2)
        sequence.version = version
        buffer.keep([sequence])
    kept = [sequence.version for sequence in buffer.contents()["reservoir"]]
    assert len(kept) == 30
    assert 350 < sum(kept) / len(kept) < 850  # the mean of a uniform choice is 600


def test_one_sequence_in_eight_is_held_out_and_never_trained_on():
    buffer = FeedbackBuffer(max_rows=100_000, row_bytes=1000, seed=0)
    flags = [buffer.draw_held_out() for _ in range(80)]
    assert [sum(flags[i : i + 8]) for i in range(0, 80, 8)] == [1] * 10
    assert len({tuple(flags[i : i + 8]) for i in range(0, 80, 8)}) > 1  # no rhythm that traffic could line up with


def test_ten_times_the_stream_takes_the_same_memory():
    target, draft = MarkovTarget(), tiny_draft()
    config = AdaptationConfig(buffer_tokens=128, publish_every_rounds=1, layers="all", validate=False)
    with OnlineAdapter(draft, config) as adapter:
        sizes = []
        for part in range(10):
            teach(adapter, target, random_prompts(12, seed=part), new_tokens=8)
            assert adapter.flush(60)
            sizes.append((adapter.metrics()["buffer_rows"], adapter.metrics()["buffer_bytes"]))
        assert max(rows for rows, _ in sizes) <= 128
        assert len(adapter._publisher._adapters) <= 3
        kept = sum(adapter._buffer.contents().values(), [])
        assert not any(part.requires_grad for sequence in kept for part in sequence.teacher)
