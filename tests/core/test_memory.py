# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""What a long run holds: the two caches and the text, nothing that grows with the rounds."""

from __future__ import annotations

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
LONG = {900: 1024, 1900: 2048, 4090: 8192}


@pytest.mark.parametrize("looks, fields", [
    (SHORT, {"execution": "sync", "num_assistant_tokens": 16, "seed": 0}),
    pytest.param(LONG, {"execution": "sync", "num_assistant_tokens": 16, "seed": 0}, marks=pytest.mark.slow),
    pytest.param(LONG, {"execution": "async", "num_assistant_tokens": 16, "fan_out": 1}, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_long_text_holds_its_caches_and_little_else(target, drafts, prompt, looks, fields):
    before, start = held(), prompt.shape[1]
    watch = Watch({start + length for length in looks})
    target.generate(prompt, max_new_tokens=max(looks) + 6, do_sample="seed" in fields, assistant_model=drafts["itself"],
                    speculation=SaguaroConfig(**fields), stopping_criteria=StoppingCriteriaList([watch]))  # fmt: skip
    for length, slots in looks.items():
        caches = 2 * cache_bytes(target, slots)
        ids = 8 * 4 * 2 * slots
        round_of_its_own = 50 * slots + 200_000  # some rows of scores, noise and masks
        assert watch.seen[start + length] - before <= caches + ids + round_of_its_own
    assert held() <= before + 50_000
