# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Model folders, a tokenizer of characters and a prompt file, as a user has them."""

from __future__ import annotations

import json
import string

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


QUESTIONS = [
    {"question_id": 1, "category": "writing", "turns": ["Write a line.", "Now another."]},
    {"question_id": 2, "category": "qa", "turns": ["Who holds water?"]},
]


def character_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    characters = (string.ascii_letters + string.digits + string.punctuation + " \n")[: vocab_size - len(special)]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate([*special, *characters])}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    wrapped.chat_template = "{% for m in messages %}{{ m['role'][0] }}: {{ m['content'] }} {% endfor %}a: "
    return wrapped


@pytest.fixture(scope="session")
def folders(tmp_path_factory, target, drafts):
    """(target folder, draft folder)."""
    root = tmp_path_factory.mktemp("models")
    for name, model in (("target", target), ("draft", drafts["good"])):
        model.save_pretrained(root / name)
        character_tokenizer(target.config.vocab_size).save_pretrained(root / name)
    return str(root / "target"), str(root / "draft")


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "questions.jsonl"
    path.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    return str(path)
