# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""A target on an accelerator that this machine does not have.

Its forward takes a set wall time without using a core, as a host sees a GPU work, and gives the true logits: those that
the real target gave on its own greedy text, recorded beforehand. Greedy speculation only ever acts on rows whose whole
prefix is that text, so the rest of what it asks for does not matter. What is left to measure is the draft, on real
hardware, and the engine.
"""

from __future__ import annotations

import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ..errors import SaguaroError
from ..generation.self_check import vouch_for


class SimulatedTarget(LlamaForCausalLM):
    """Stands in for a target on the prompts that it was told of, batch 1, greedy.

    It is a Llama model of one tiny layer, so that caches, masks and both decoding loops treat it as any model; its own
    logits are replaced by recorded ones. Its compute is part of the set time.

    Args:
        target (`PreTrainedModel`): the real one; asked once per prompt by [`~SimulatedTarget.learn`].
        seconds (`float`): what a forward takes, whatever its number of tokens.
    """

    def __init__(self, target: PreTrainedModel, seconds: float):
        text = target.config.get_text_config(decoder=True)
        config = LlamaConfig(
            vocab_size=text.vocab_size, max_position_embeddings=text.max_position_embeddings,
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
            bos_token_id=text.bos_token_id, eos_token_id=text.eos_token_id, pad_token_id=text.pad_token_id,
        )  # fmt: skip
        super().__init__(config)
        vouch_for(self)
        self.to(device=target.device, dtype=target.dtype).eval()
        self.generation_config = target.generation_config
        self.seconds = seconds
        self._target = [target]  # in a list: not a submodule, its weights are not this model's
        self._texts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._read = torch.empty(0, dtype=torch.long)

    @torch.no_grad()
    def learn(self, input_ids: torch.Tensor, max_new_tokens: int) -> None:
        """Records the target's greedy text after a prompt and its logits along it.

        Args:
            input_ids (`Tensor` of shape `[1, L]`)
        """
        if any(torch.equal(prompt, input_ids[0]) for prompt, _ in self._texts):
            return
        target = self._target[0]
        text = target.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
        )
        logits = target(input_ids=text, logits_to_keep=text.shape[1] - input_ids.shape[1] + 1).logits[0]
        self._texts.append((input_ids[0], logits))

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        logits_to_keep: int = 0,
        **kwargs,
    ):
        """As any causal model's, for input ids of shape `[1, n]`; `position_ids` tell where in the text they stand."""
        until = time.perf_counter() + self.seconds
        output = super().forward(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, logits_to_keep=1, **kwargs
        )
        if position_ids is None or input_ids.shape[0] != 1:
            raise SaguaroError("a simulated target runs one sequence at a time, with its position ids given.")
        positions = position_ids[0, -logits_to_keep:] if logits_to_keep else position_ids[0]
        output.logits = self._recorded(input_ids[0], int(position_ids[0, 0]), positions)[None]
        time.sleep(max(until - time.perf_counter(), 0.0))
        return output

    def _recorded(self, tokens: torch.Tensor, first: int, positions: torch.Tensor) -> torch.Tensor:
        """Rows of the text that what was read so far begins with."""
        self._read = torch.cat([self._read[:first].to(tokens.device), tokens])
        known = [text for text in self._texts if torch.equal(text[0], self._read[: text[0].shape[0]])]
        if known:
            prompt, logits = max(known, key=lambda text: text[0].shape[0])
            # Rows past the end of the recorded text decide nothing.
            return logits[(positions - prompt.shape[0] + 1).clamp(0, logits.shape[0] - 1)]
        if not any(torch.equal(prompt[: self._read.shape[0]], self._read) for prompt, _ in self._texts):
            raise SaguaroError("a simulated target only knows the prompts that it has learned; this is another.")
        # Of a long prompt that comes in pieces, only the last piece's logits matter.
        return self._texts[0][1].new_zeros(positions.shape[0], self.config.vocab_size)
