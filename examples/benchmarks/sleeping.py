# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""A simulated accelerator: models that sleep for as long as their forwards should take, so that only the engine is timed."""

import copy
import inspect
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_pair(noise, generator=None):
    """Two small models of random weights; the draft is the target with `noise` times each weight's spread added."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    target = LlamaForCausalLM(config).eval()
    target.generation_config.pad_token_id = 0
    draft = copy.deepcopy(target)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * noise * parameter.std())
    return target, draft


def sleeping(model, seconds):
    """A copy of `model` whose forwards take `seconds`, mostly without a core, as a host sees an accelerator work."""
    model = copy.deepcopy(model)
    stock = model.forward

    def forward(*args, **kwargs):
        due = time.perf_counter() + seconds
        output = stock(*args, **kwargs)
        time.sleep(max(due - time.perf_counter(), 0))
        return output

    forward.__signature__ = inspect.signature(stock)
    model.forward = forward
    return model
