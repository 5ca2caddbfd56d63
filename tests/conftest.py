# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Tiny models that behave: random weights, float32, deterministic."""

from __future__ import annotations

import copy
import os

import pytest
import torch


if not torch.cuda.is_available():
    # Triton reads this while it is imported, and Transformers imports it.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402


VOCAB = 97


def tiny_llama(seed: int, vocab_size: int = VOCAB, layers: int = 2, **overrides) -> LlamaForCausalLM:
    """A Llama with random weights, no EOS, and scores far enough apart that float32 rounding decides nothing."""
    torch.manual_seed(seed)
    sizes = dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **{**sizes, **overrides})).eval()
    model.generation_config.pad_token_id = 0
    return model


def perturbed(model, scale: float, seed: int = 7):
    """A draft that agrees with `model` most of the time."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale * parameter.std())
    return draft


def constant_draft(model):
    """A draft that proposes one token for ever."""
    draft = copy.deepcopy(model)
    with torch.no_grad():
        draft.lm_head.weight.zero_()
    return draft


@pytest.fixture(scope="session", autouse=True)
def few_threads():
    # Tiny models gain nothing from threads, and threads that wait for each other on a busy machine cost everything.
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target():
    return tiny_llama(0)


@pytest.fixture(scope="session")
def drafts(target):
    return {
        "good": perturbed(target, 0.05),
        "fair": perturbed(target, 0.3),
        "unrelated": tiny_llama(5, layers=1),
        "constant": constant_draft(target),
        "itself": copy.deepcopy(target),
    }


@pytest.fixture
def prompt():
    return torch.randint(2, VOCAB, (1, 9), generator=torch.Generator().manual_seed(3))
