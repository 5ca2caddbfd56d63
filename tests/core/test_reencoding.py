# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""A draft with another tokenizer works through its text."""

from __future__ import annotations

import copy

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import hf_saguaro
from hf_saguaro import SaguaroConfig, SaguaroError
from hf_saguaro.adaptation import AdaptationConfig, FeedbackRecorder, load_records

from ..conftest import tiny_llama


CHARACTERS = [chr(code) for code in range(ord("!"), ord("!") + 60)]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]


def tokenizer_of(characters):
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate([*SPECIAL, *characters])}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")


@pytest.fixture(scope="module")
def translated():
    """(target, draft, tokenizers): the draft is the target with its ids turned round, so its text is the target's."""
    size = len(SPECIAL) + len(CHARACTERS)
    target = tiny_llama(0, vocab_size=size)
    order = torch.tensor([*range(len(SPECIAL)), *reversed(range(len(SPECIAL), size))])
    draft = tiny_llama(0, vocab_size=size + 20)
    state = copy.deepcopy(target.state_dict())
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = torch.cat([state[name][order], torch.zeros(20, 32)])
    draft.load_state_dict(state)
    return target, draft, {"tokenizer": tokenizer_of(CHARACTERS), "assistant_tokenizer": tokenizer_of(CHARACTERS[::-1])}


@pytest.mark.parametrize("execution", ["sync", "async", "auto"])
def test_text_is_plain_generates_and_the_draft_is_understood(translated, execution):
    target, draft, tokenizers = translated
    ids = tokenizers["tokenizer"](["ABCDE", "QRS"], return_tensors="pt", padding=True, padding_side="left")
    ids.pop("token_type_ids", None)
    plain = target.generate(**ids, max_new_tokens=20, do_sample=False, suppress_tokens=[0, 1, 2, 3])
    out = target.generate(
        **ids, max_new_tokens=20, do_sample=False, suppress_tokens=[0, 1, 2, 3], assistant_model=draft,
        speculation=SaguaroConfig(num_assistant_tokens=4, execution=execution), **tokenizers,
    )  # fmt: skip
    assert out.tolist() == plain.tolist()
    stats = hf_saguaro.last_stats(target)
    assert stats.draft_failure is None
    if execution == "sync":
        assert stats.accepted_tokens > 0.8 * stats.drafted_tokens > 0


def test_without_tokenizers_it_is_refused(translated):
    target, draft, _ = translated
    with pytest.raises(SaguaroError, match="assistant_tokenizer"):
        target.generate(torch.tensor([[5, 6]]), max_new_tokens=4, assistant_model=draft, speculation="saguaro")


@pytest.mark.parametrize("adaptation", [True, AdaptationConfig(r=2)], ids=["true", "config"])
@pytest.mark.parametrize("execution", ["auto", "autoregressive"])
def test_such_a_draft_cannot_learn_the_targets_ids(translated, adaptation, execution):
    target, draft, tokenizers = translated
    before = copy.deepcopy(draft.state_dict())
    with pytest.raises(SaguaroError, match="another tokenizer"):
        target.generate(
            torch.tensor([[5, 6]]), max_new_tokens=4, assistant_model=draft,
            speculation=SaguaroConfig(adaptation=adaptation, execution=execution), **tokenizers,
        )  # fmt: skip
    assert all(value.equal(before[name]) for name, value in draft.state_dict().items())


def test_what_such_a_pair_writes_can_be_recorded(translated, tmp_path):
    """For a draft that shares the target's ids, another day."""
    target, draft, tokenizers = translated
    with FeedbackRecorder(tmp_path) as recorder:
        text = target.generate(
            torch.tensor([[5, 6]]), max_new_tokens=6, do_sample=False, assistant_model=draft,
            speculation=SaguaroConfig(adaptation=recorder), **tokenizers,
        )[0]  # fmt: skip
    assert load_records(tmp_path)[0]["tokens"] == text.tolist()
