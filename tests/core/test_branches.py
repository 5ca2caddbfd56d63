# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""What the draft prepares: every branch equals a fresh decode of the draft from that outcome."""

from __future__ import annotations

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LogitsProcessorList, MistralConfig, MistralForCausalLM

from hf_saguaro.generation.acceptance import CoupledVerification, Proposal
from hf_saguaro.generation.drafter import Drafter
from hf_saguaro.generation.processors import DraftProcessors
from hf_saguaro.generation.prompt import Prompt
from hf_saguaro.generation.slot_model import SlotModel
from hf_saguaro.generation.speculation_cache import Outcome, SpeculationCache
from hf_saguaro.generation.tree_mask import TreeLayout

from ..conftest import VOCAB, tiny_llama


def gemma(attention):
    torch.manual_seed(0)
    config = Gemma3TextConfig(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=3, head_dim=8,
                              num_attention_heads=4, num_key_value_heads=2, sliding_window=6, initializer_range=0.3,
                              layer_types=["sliding_attention", "full_attention", "sliding_attention"])  # fmt: skip
    config._attn_implementation = attention
    return Gemma3ForCausalLM(config).eval()


def mistral(attention):
    torch.manual_seed(0)
    config = MistralConfig(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, sliding_window=6,
                           num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3)  # fmt: skip
    config._attn_implementation = attention
    return MistralForCausalLM(config).eval()


MODELS = {
    "llama-sdpa": lambda: tiny_llama(4),
    "llama-eager": lambda: tiny_llama(4, attn_implementation="eager"),
    "gemma3-sdpa": lambda: gemma("sdpa"),
    "gemma3-eager": lambda: gemma("eager"),
    "mistral-sdpa": lambda: mistral("sdpa"),
}


def drafter_of(model, prompts):
    width = max(map(len, prompts))
    ids = torch.stack([torch.cat([torch.zeros(width - len(p), dtype=torch.long), p]) for p in prompts])
    mask = torch.stack([torch.tensor([0] * (width - len(p)) + [1] * len(p)) for p in prompts])
    prompt = Prompt.of(ids, {"attention_mask": mask}, None)
    drafter = Drafter(SlotModel(model, len(prompts)), CoupledVerification(None, VOCAB),
                      DraftProcessors(LogitsProcessorList(), None, len(prompts), torch.device("cpu")), prompt, VOCAB, ids)  # fmt: skip
    drafter.prefill()
    return drafter


@torch.no_grad()
def fresh(model, text, count):
    """Greedy continuation by full forwards, without any cache."""
    text = list(text)
    for _ in range(count):
        text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[-count:]


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_every_prepared_branch_equals_a_fresh_decode_from_its_outcome(name):
    model = MODELS[name]()
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(2, VOCAB, (n,), generator=generator) for n in (11, 7)]
    drafter = drafter_of(model, texts)
    rows, k, fan_out = [0, 1], 3, [2, 1, 2, 2]
    for row in rows:
        drafter.advance(row, [5 + row])
    texts = [[*text.tolist(), 5 + row] for row, text in enumerate(texts)]
    chain = drafter.chain(rows, k, lambda chain: True)
    sent = torch.stack(chain.tokens, dim=1)
    assert [fresh(model, text, k) for text in texts] == sent.tolist()

    proposal = Proposal(sent, [k, k])
    tree = drafter.plant(rows, proposal, drafter.glue(rows, proposal), fan_out)
    for _ in range(3):
        drafter.grow(tree)
    # One branch is finished alone, two passes further than the tree.
    for row in rows:
        for branch, (depth, fork) in enumerate(zip(tree.depths, tree.forks[row].tolist())):
            outcome = [*texts[row], *sent[row, :depth].tolist(), fork]
            harvested = drafter.harvest(tree, {row: branch}, 5, lambda chain: True)
            assert [int(tokens) for tokens in harvested.tokens] == fresh(model, outcome, 5), (row, depth, fork)
    # What the branches wrote does not show in the text: the next chain is that of a draft that never branched.
    for row in rows:
        drafter.advance(row, [*sent[row, :2].tolist(), 9])
    after = drafter.chain(rows, 4, lambda chain: True)
    for row in rows:
        assert torch.stack(after.tokens, 1)[row].tolist() == fresh(model, [*texts[row], *sent[row, :2].tolist(), 9], 4)


@torch.no_grad()
def test_forks_are_the_likeliest_outcomes():
    model = tiny_llama(4)
    drafter = drafter_of(model, [torch.arange(2, 9)])
    drafter.advance(0, [5])
    sent = torch.stack(drafter.chain([0], 2, lambda chain: True).tokens, dim=1)
    proposal = Proposal(sent, [2])
    tree = drafter.plant([0], proposal, drafter.glue([0], proposal), [3, 0, 2])
    scores = model(torch.tensor([[*range(2, 9), 5, *sent[0].tolist()]])).logits[0, -3:]
    best = scores.argsort(dim=-1, descending=True)
    expected = [int(t) for t in best[0] if t != sent[0, 0]][:3] + best[2, :2].tolist()
    assert tree.depths == [0, 0, 0, 2, 2] and tree.forks.tolist() == [expected]


@torch.no_grad()
def test_the_cache_answers_its_own_outcomes_and_no_others():
    drafter = drafter_of(tiny_llama(4), [torch.arange(2, 9), torch.arange(3, 12)])
    for row in (0, 1):
        drafter.advance(row, [5])
    proposal = Proposal(torch.stack(drafter.chain([0, 1], 1, lambda chain: True).tokens, dim=1), [1, 1])
    cache = SpeculationCache(drafter.plant([1], proposal, drafter.glue([1], proposal), [1, 1]))
    forks = cache.tree.forks[0].tolist()
    assert cache.lookup(Outcome([1], {1: [7, forks[1]]}, 9)) == {1: 1}
    assert cache.lookup(Outcome([1], {1: [7, forks[1] + 1]}, 9)) == {}
    assert cache.lookup(Outcome([0], {0: [7, forks[1]]}, 9)) == {}  # a row that was not in the round
    assert SpeculationCache(None).lookup(Outcome([1], {1: [7, forks[1]]}, 9)) == {}


def test_the_worked_example_of_masks_and_positions():
    """Text of 10 tokens (N - 1 = 9 before t*), K = 2, fan-out [2, 1, 1]; slot p + 1 holds position p, slot 0 the bin."""
    layout = TreeLayout(torch.tensor([[10, 10, 11, 12]]), start=13)
    assert layout.positions(0).tolist() == [[10, 10, 11, 12]] and layout.positions(1).tolist() == [[11, 11, 12, 13]]
    drawn = ["".join(map(str, row)) for row in layout.visible(1, torch.arange(layout.end(1))).int()[0].tolist()]
    bin_, prefix = "0", "1" * 9
    assert drawn == [
        bin_ + prefix + "100" + "1000" + "1000",
        bin_ + prefix + "100" + "0100" + "0100",
        bin_ + prefix + "110" + "0010" + "0010",
        bin_ + prefix + "111" + "0001" + "0001",
    ]
