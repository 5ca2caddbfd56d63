# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Speculative decoding in forty lines over the sink interface, with targets that are easy, hard or impossible to learn."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


VOCAB = 64


class MarkovTarget(nn.Module):
    """Its next token depends on the last one alone: a draft can learn it. `seed` is the domain."""

    def __init__(self, seed: int = 0, sharpness: float = 4.0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(torch.randn(VOCAB, VOCAB, generator=generator) * sharpness, requires_grad=False)

    def scores(self, tokens: list[int]) -> torch.Tensor:
        """`[V]` after `tokens`."""
        return self.table[tokens[-1]]


class HashTarget(MarkovTarget):
    """Its next token depends on all tokens so far, without any pattern: nothing can be learned."""

    def scores(self, tokens: list[int]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash(tuple(tokens)) % 2**31)
        return torch.randn(VOCAB, generator=generator) * 4


def tiny_draft(seed: int = 1, layers: int = 2, **overrides) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = dict(
        hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2
    )
    config = LlamaConfig(
        vocab_size=VOCAB, num_hidden_layers=layers, max_position_embeddings=512, **{**sizes, **overrides}
    )
    return LlamaForCausalLM(config).eval()


def random_prompts(count: int, seed: int = 0, length: int = 4) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB) for _ in range(length)] for _ in range(count)]


@dataclass
class Served:
    texts: list[list[int]] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)  # one entry a round
    versions: list[int] = field(default_factory=list)

    @property
    def accepted_per_round(self) -> float:
        return sum(self.accepted) / len(self.accepted)


@torch.no_grad()
def serve(
    adapter, draft, target, prompts, new_tokens: int = 16, k: int = 4, temperature: float = 0.0, seed: int = 0
) -> Served:
    """Decodes each prompt in a call of its own. With a temperature, proposals and verdicts share Gumbel noise."""
    served = Served()
    noise = torch.Generator().manual_seed(seed)
    for prompt in prompts:
        session = adapter.begin([torch.tensor(prompt)], temperature)
        try:
            text: list[int] = []
            while len(text) < new_tokens:
                adapter.before_round()
                gumbel = torch.zeros(k + 1, VOCAB)
                if temperature:
                    gumbel = -torch.log(-torch.log(torch.rand(k + 1, VOCAB, generator=noise)))
                proposed = _propose(
                    draft, prompt + text, min(k, new_tokens - len(text) - 1) if text else 0, gumbel, temperature
                )
                scores = torch.stack(
                    [target.scores(prompt + text + proposed[:j]) / (temperature or 1) for j in range(len(proposed) + 1)]
                )
                choices = (scores + gumbel[: len(scores)]).argmax(-1).tolist()
                accepted = 0
                while accepted < len(proposed) and proposed[accepted] == choices[accepted]:
                    accepted += 1
                session.observe(
                    0, torch.tensor(proposed, dtype=torch.long), accepted, choices[accepted], scores[: accepted + 1]
                )
                text += choices[: accepted + 1]
                if proposed:
                    served.accepted.append(accepted)
                    served.versions.append(adapter.version)
            served.texts.append(text)
        finally:
            session.end()
    return served


def plain_text(target, prompt: list[int], new_tokens: int) -> list[int]:
    text: list[int] = []
    while len(text) < new_tokens:
        text.append(int(target.scores(prompt + text).argmax()))
    return text


def _propose(draft, tokens: list[int], count: int, gumbel: torch.Tensor, temperature: float) -> list[int]:
    proposed: list[int] = []
    for j in range(count):
        logits = draft(torch.tensor([tokens + proposed])).logits[0, -1]
        proposed.append(int((logits / (temperature or 1) + gumbel[j]).argmax()))
    return proposed


def teach(adapter, target, prompts, new_tokens: int = 16, temperature: float = 0.0) -> None:
    """The same feedback as `serve` gives, at once: each prompt's text comes as rounds that accept nothing."""
    noise = torch.Generator().manual_seed(0)
    for prompt in prompts:
        session = adapter.begin([torch.tensor(prompt)], temperature)
        adapter.before_round()
        text: list[int] = []
        for _ in range(new_tokens):
            scores = target.scores(prompt + text) / (temperature or 1)
            token = int(torch.multinomial(scores.softmax(-1), 1, generator=noise) if temperature else scores.argmax())
            proposed = torch.tensor([(token + 1) % VOCAB] if text else [], dtype=torch.long)
            session.observe(0, proposed, 0, token, scores[None])
            text.append(token)
        session.end()
