# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""The bench measures what it says: time where it was spent, texts that differ as differing."""

from __future__ import annotations

import time

import pytest
import torch

from hf_saguaro.cli import measure
from hf_saguaro.cli.arms import Arm, PlainArm, StockArm
from hf_saguaro.cli.prompts import Question, read_prompts


class Metronome(Arm):
    """Takes a set time for the prefill and for every token."""

    def generate(self, inputs, max_new_tokens, streamer):
        streamer.put(inputs["input_ids"])
        time.sleep(0.06)
        for token in range(max_new_tokens):
            time.sleep(0.02 if token else 0.0)
            streamer.put(torch.tensor([token]))
        return list(range(max_new_tokens)), None


class Liar(PlainArm):
    """Plain generate with its fourth token replaced."""

    def generate(self, inputs, max_new_tokens, streamer):
        tokens, stats = super().generate(inputs, max_new_tokens, streamer)
        tokens[3] = (tokens[3] + 1) % 97
        return tokens, stats


class Words:
    """A tokenizer's decode, as far as a conversation needs it."""

    def decode(self, tokens, skip_special_tokens):
        return " ".join(map(str, tokens))


def encode(conversation):
    text = "".join(turn["content"] for turn in conversation)
    return torch.tensor([[2 + sum(map(ord, word)) % 90 for word in text.split()]])


@pytest.mark.timed
def test_prefill_is_told_apart_from_decoding(target):
    answer = measure.run_arm(Metronome("metronome", target, None), torch.ones(1, 4, dtype=torch.long), 6)
    assert answer.first == 1
    assert 0.06 <= answer.prefill_seconds < 0.10 <= answer.decode_seconds < 0.3


def test_a_text_that_differs_is_counted_with_its_gap(target):
    arms = [PlainArm("plain", target, None), Liar("liar", target, None)]
    questions = [Question(1, "qa", ["one two three"])]
    items = measure.run_arms(arms, questions, encode, Words(), max_new_tokens=8, repeats=2, warm_up_tokens=0)
    summary = measure.summarize(arms, items, target)
    assert (summary["liar"]["identical"], summary["plain"]["identical"]) == (0, 1)
    ids = torch.cat([items[0].input_ids, torch.tensor([items[0].answers["plain"][0].tokens[:3]])], dim=1)
    best, second = target(ids).logits[0, -1].detach().topk(2).values
    assert summary["liar"]["largest_gap"] == pytest.approx(float(best - second), abs=1e-4)


def test_every_turn_sees_what_plain_generate_answered_before(target, drafts):
    arms = [PlainArm("plain", target, None), StockArm("stock", target, drafts["good"], k=2)]
    seen = []

    def spy(conversation):
        seen.append([turn["content"] for turn in conversation])
        return encode(conversation)

    questions = [Question(1, "writing", ["a b", "c d"]), Question(2, "rag", ["e f"])]
    items = measure.run_arms(arms, questions, spy, Words(), max_new_tokens=5, repeats=2, warm_up_tokens=0)
    assert len(items) == 3 and all(len(item.answers[name]) == 2 for item in items for name in ("plain", "stock"))
    reply = " ".join(map(str, items[0].answers["plain"][0].tokens))
    assert seen == [["a b"], ["a b", reply, "c d"], ["e f"]]
    assert [item.column for item in items] == ["mt_bench", "mt_bench", "rag"]


def test_stock_settings_leave_the_draft_as_it_was(target, drafts):
    draft = drafts["good"]
    own = draft.generation_config
    before = own.to_dict()
    measure.run_arm(StockArm("stock", target, draft), torch.ones(1, 4, dtype=torch.long), 4)
    assert draft.generation_config is own and own.to_dict() == before


def test_figures_of_several_runs_add_up():
    one = {"rounds": 2, "accepted_by_depth": [1, 1], "verify_seconds": 0.5, "execution": "sync", "hit_rate": 0.5,
           "predicted_speedup": 1.0, "adapter_version": None, "draft_failure": None}  # fmt: skip
    two = one | {"rounds": 3, "accepted_by_depth": [0, 0, 3], "execution": "async", "predicted_speedup": 2.0}
    total = measure.add_up([one, two])
    assert total["rounds"] == 5 and total["accepted_by_depth"] == [1, 1, 3] and total["verify_seconds"] == 1.0
    assert total["execution"] == {"sync": 1, "async": 1} and total["predicted_speedup"] == 1.5
    assert "hit_rate" not in total


def test_a_limit_takes_questions_evenly(tmp_path):
    path = tmp_path / "q.jsonl"
    lines = [f'{{"question_id": {i}, "category": "{c}", "turns": ["x"]}}\n' for i, c in
             enumerate(["qa", "qa", "qa", "math", "coding", "rag"])]  # fmt: skip
    path.write_text("".join(lines))
    assert [q.category for q in read_prompts(path, 4)] == ["qa", "math", "rag", "qa"]
    assert len(read_prompts()) == 8
