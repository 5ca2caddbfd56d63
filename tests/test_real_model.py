# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""A real model and real text: SmolLM2-135M-Instruct, with a draft made of its own layers."""

from __future__ import annotations

import pytest
import torch

import hf_saguaro
from hf_saguaro import SaguaroConfig, SaguaroError


pytestmark = pytest.mark.slow

PROMPTS = [
    "Explain in two sentences why the sky is blue.",
    "Write a short letter to a friend about a day at the sea.",
    "What is 17 times 23? Show your steps.",
    "List three uses of a paper clip.",
]
NEW_TOKENS = 40


@pytest.fixture(scope="module")
def pair():
    from hf_saguaro.cli.pair import drop_layers, load_smollm2

    try:
        model, tokenizer = load_smollm2()
    except SaguaroError as error:
        pytest.skip(str(error))
    return model, drop_layers(model, [4, 5, 17, 25]), tokenizer


@pytest.mark.parametrize("execution", ["async", "sync"])
def test_float32_text_is_plain_generates_and_bfloat16_differs_at_near_ties_only(pair, execution, capsys):
    model, draft, tokenizer = pair
    config = SaguaroConfig(num_assistant_tokens=4, fan_out=3, execution=execution, backup="draft")
    differ = {}
    for dtype in (torch.float32, torch.bfloat16):
        target, assistant = model.to(dtype), draft.to(dtype)
        differ[dtype] = 0
        for prompt in PROMPTS:
            chat = [{"role": "user", "content": prompt}]
            inputs = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            kwargs = dict(max_new_tokens=NEW_TOKENS, do_sample=False)
            plain = target.generate(**inputs, **kwargs)
            out = target.generate(**inputs, **kwargs, assistant_model=assistant, speculation=config)
            if out.tolist() == plain.tolist():
                continue
            assert dtype is torch.bfloat16
            differ[dtype] += 1
            length = min(out.shape[1], plain.shape[1])
            first = int((out[:, :length] != plain[:, :length])[0].nonzero()[0])
            top = target(plain[:, :first]).logits[0, -1].detach().float().topk(2).values
            assert float(top[0] - top[1]) < 0.25
    assert hf_saguaro.last_stats(model).mean_accepted > 0.5
    with capsys.disabled():
        print(
            f"\n{execution}: {differ[torch.bfloat16]} of {len(PROMPTS)} bfloat16 texts part from plain greedy, at near-ties"
        )
