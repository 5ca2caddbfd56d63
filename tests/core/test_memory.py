# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""What a long run holds: the two caches and the text, nothing that grows with the rounds."""

from __future__ import annotations

import contextlib
import copy
import gc

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from hf_saguaro import SaguaroConfig


def held():
    """Bytes of all storages that a Python tensor holds."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class Watch(StoppingCriteria):
    """Notes what is held at some lengths."""

    def __init__(self, lengths):
        self.lengths, self.seen = lengths, {}

    def __call__(self, input_ids, scores, **kwargs):
        length = input_ids.shape[1]
        if length in self.lengths:
            self.seen[length] = held()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def cache_bytes(model, slots):
    config = model.config
    return 2 * config.num_hidden_layers * config.num_key_value_heads * slots * (config.hidden_size // 4) * 4


# Lengths at which to look, and the slots that each cache has by then: they grow by doubling.
SHORT = {120: 256, 250: 512, 990: 1024}
LONG = {900: 1024, 1900: 2048, 4090: 4256}  # and no further than a text may get
BRANCHES = {900: 2048, 1900: 4096, 4090: 4512}  # which lie beside the text in the draft's


@pytest.mark.parametrize("looks, fields", [
    (SHORT, {"execution": "sync", "num_assistant_tokens": 16, "seed": 0}),
    pytest.param(LONG, {"execution": "sync", "num_assistant_tokens": 16, "seed": 0}, marks=pytest.mark.slow),
    pytest.param(BRANCHES, {"execution": "async", "num_assistant_tokens": 16, "fan_out": 1}, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_long_text_holds_its_caches_and_little_else(target, drafts, prompt, looks, fields):
    target, draft = copy.deepcopy(target), copy.deepcopy(drafts["itself"])
    before, start = held(), prompt.shape[1]
    # Bytes a slot: beside the verify's 17 rows those of glue and tree, in float32 and as booleans.
    masks = 50 if fields["execution"] == "sync" else 300
    watch = Watch({start + length for length in looks})

    def run(target, draft):
        target.generate(
            prompt, max_new_tokens=max(looks) + 6, do_sample="seed" in fields, assistant_model=draft,
            speculation=SaguaroConfig(**fields), stopping_criteria=StoppingCriteriaList([watch]),
        )  # fmt: skip

    run(target, draft)
    for length, slots in looks.items():
        caches = 2 * cache_bytes(target, slots)
        ids = 8 * 4 * 2 * slots
        round_of_its_own = masks * slots + 200_000  # some rows of scores and noise, and the masks
        assert watch.seen[start + length] - before <= caches + ids + round_of_its_own
    # The slots are kept for the next call, which therefore takes no more, and are gone with the models.
    kept = held()
    assert kept - before <= caches + 50_000
    run(target, draft)
    assert abs(held() - kept) < 50_000
    for length, slots in looks.items():
        assert watch.seen[start + length] - kept <= 8 * 4 * 2 * slots + masks * slots + 200_000
    before -= parameter_bytes(target) + parameter_bytes(draft)
    del target, draft
    assert held() - before < 50_000


def parameter_bytes(model):
    return sum(parameter.nbytes for parameter in model.parameters())


def test_a_short_call_does_not_hold_what_a_long_one_needed(target, drafts, prompt):
    target, draft = copy.deepcopy(target), copy.deepcopy(drafts["fair"])
    before = held()
    for new_tokens in (900, 20):
        target.generate(
            prompt, max_new_tokens=new_tokens, do_sample=False, assistant_model=draft, speculation="saguaro"
        )
    assert held() - before <= 2 * cache_bytes(target, 256)


@contextlib.contextmanager
def broken(model):
    """Every score and every cached state is NaN."""
    weight = model.get_input_embeddings().weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
        yield
        weight.copy_(kept)


@pytest.mark.parametrize("batch", [1, 2])
def test_what_a_call_before_left_changes_nothing(target, drafts, prompt, batch):
    """Neither its text, nor its shape, nor where it ran."""
    target, draft = copy.deepcopy(target), copy.deepcopy(drafts["fair"])

    def text(prompts, draft=None, **kwargs):
        branches = SaguaroConfig(execution="async", num_assistant_tokens=4, fan_out=3)
        extra = {} if draft is None else {"assistant_model": draft, "speculation": branches}
        mask = torch.ones_like(prompts)
        mask[1:, :4] = 0  # a shorter row reads past its own end, at slots that another call may have written
        return target.generate(prompts, attention_mask=mask, max_new_tokens=30, do_sample=False, **extra, **kwargs)

    prompts = prompt.repeat(batch, 1)
    expected = text(prompts)
    with torch.inference_mode():
        assert text(prompts, draft).equal(expected)
    assert text(prompts, draft).equal(expected)
    with broken(target), broken(draft):
        text(prompts, draft)
    assert text(prompts, draft).equal(expected)
    text(prompt.flip(1).repeat(3 - batch, 6), draft)
    assert text(prompts, draft).equal(expected)
    target.double(), draft.double()
    assert text(prompts, draft).equal(text(prompts))
