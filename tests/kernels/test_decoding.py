# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Decoding with Triton behind it: the text of the torch kernels, without a pass of processors where none is needed."""

import copy

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

from hf_saguaro import SaguaroConfig
from hf_saguaro.generation.processors import TargetProcessors


def text(monkeypatch, kernels, target, draft, prompt, verification="coupled", **kwargs):
    device = kernels[1]
    target, draft = copy.deepcopy(target).to(device), copy.deepcopy(draft).to(device)
    monkeypatch.setenv("HF_SAGUARO_KERNELS", kernels[0])
    # In turns: the interpreter runs one kernel at a time.
    mode = SaguaroConfig(seed=11, num_assistant_tokens=3, execution="sync", verification=verification)
    kwargs = {"do_sample": True, "max_new_tokens": 10, "assistant_model": draft, "speculation": mode} | kwargs
    ids = prompt.to(device)
    return target.generate(ids, attention_mask=torch.ones_like(ids), **kwargs)


@pytest.fixture
def triton(triton_device):
    return "triton", triton_device


@pytest.fixture
def no_pass_of_processors(monkeypatch):
    """Makes such a pass over the target's scores an error."""

    def passes(*args):
        raise AssertionError("the target's processors were called")

    return lambda: monkeypatch.setattr(TargetProcessors, "block", passes)


@pytest.mark.parametrize(
    ("verification", "sampling", "batch"),
    [
        ("coupled", {"temperature": 0.8, "top_k": 20, "top_p": 0.9}, 1),
        ("coupled", {"temperature": 1.3, "top_k": 0, "top_p": 0.8, "min_p": 0.05}, 1),
        ("coupled", {"top_k": 5}, 2),
        ("coupled", {"do_sample": False}, 2),
        ("rejection", {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.05}, 1),
        ("rejection", {"temperature": 1.3, "top_k": 0}, 2),
    ],
)
def test_kernels_filter_in_place_of_the_processors(
    monkeypatch, triton, no_pass_of_processors, target, drafts, prompt, verification, sampling, batch
):
    prompts = prompt.repeat(batch, 1)
    expected = text(monkeypatch, ("torch", "cpu"), target, drafts["fair"], prompts, verification, **sampling)
    no_pass_of_processors()
    assert text(monkeypatch, triton, target, drafts["fair"], prompts, verification, **sampling).cpu().equal(expected)


@pytest.mark.parametrize(
    "asked",
    [
        {"repetition_penalty": 1.3},
        {"typical_p": 0.9},
        {"logits_processor": LogitsProcessorList([TopKLogitsWarper(4), TemperatureLogitsWarper(3.0)])},
        {"logits_processor": LogitsProcessorList([TopKLogitsWarper(4, filter_value=-3.0)])},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_other_processors_are_called_as_ever(monkeypatch, triton, target, drafts, prompt, asked):
    expected = text(monkeypatch, ("torch", "cpu"), target, drafts["fair"], prompt, **asked)
    assert text(monkeypatch, triton, target, drafts["fair"], prompt, **asked).cpu().equal(expected)


def test_scores_are_shown_to_who_asks(monkeypatch, triton, target, drafts, prompt):
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "top_k": 6}
    expected = text(monkeypatch, ("torch", "cpu"), target, drafts["fair"], prompt, **asked)
    shown = text(monkeypatch, triton, target, drafts["fair"], prompt, **asked)
    for name in ("scores", "logits"):
        for step, wanted in zip(shown[name], expected[name], strict=True):
            torch.testing.assert_close(step.cpu(), wanted)
