# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""The copy of the draft that is trained: its own LoRA matrices over frozen weights that it shares with the draft."""

from __future__ import annotations

import copy
import math
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from .config import AdaptationConfig
from .feedback import FeedbackSequence
from .losses import TeacherRows
from .weights import Adapter, DraftWeights


# Tokens (padding included) and feedback rows of one forward and backward pass; rows cost a vocabulary of logits each.
PASS_TOKENS = 2048
PASS_ROWS = 256


@dataclass
class TrainingItem:
    """One sequence as the student reads it.

    Args:
        tokens (`Tensor` of shape `[n]`, int32): what is fed.
        start (`int`): position of the first of them.
        first (`int`): index of the first output that has a row; the R rows are those of `first .. first + R - 1`.
        teacher (`TeacherRows`)
        temperature (`float`): that the outputs are divided by; 1 for greedy traffic.
        discarded (`bool`): whether this is a rejected branch.
    """

    tokens: torch.Tensor
    start: int
    first: int
    teacher: TeacherRows
    temperature: float
    discarded: bool = False

    @property
    def rows(self) -> int:
        return self.teacher.log_probs.shape[0]


def text_item(sequence: FeedbackSequence) -> TrainingItem:
    """The emitted text: every row is the target's distribution after a prefix that the target wrote."""
    return TrainingItem(
        sequence.tokens[:-1], sequence.start, sequence.first - 1, sequence.teacher, sequence.temperature or 1.0
    )


def branch_items(sequence: FeedbackSequence) -> list[TrainingItem]:
    """The rejected branches, each with the text that it left."""
    items = []
    for branch in sequence.branches:
        text = sequence.tokens[: sequence.first + branch.row]
        tokens = torch.cat([text, branch.tokens])
        items.append(
            TrainingItem(tokens, sequence.start, len(text), branch.teacher, sequence.temperature or 1.0, discarded=True)
        )
    return items


def passes(items: list[TrainingItem]) -> Iterator[list[TrainingItem]]:
    """Splits items into passes of bounded size, those of like length together."""
    batch: list[TrainingItem] = []
    for item in sorted(items, key=lambda item: len(item.tokens)):
        rows = sum(other.rows for other in batch) + item.rows
        if batch and (len(item.tokens) * (len(batch) + 1) > PASS_TOKENS or rows > PASS_ROWS):
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


class Student:
    """The training copy.

    It owns its modules, so that training flags and hooks never meet the draft's, and shares the draft's frozen
    parameters (without a copy where `config.device` allows), the *pristine* ones for the adapted modules.

    Args:
        draft (`PreTrainedModel`): the model that serves, with the user's own weights; it is not kept.
        weights (`DraftWeights`): of that draft.
        config (`AdaptationConfig`)
    """

    def __init__(self, draft: nn.Module, weights: DraftWeights, config: AdaptationConfig):
        self.device = torch.device(config.device) if config.device else weights.serving[0].device
        self.peft_config = lora_config(draft, weights, config)
        with torch.inference_mode(False), torch.no_grad():
            self.model = _copy_of(draft, weights, self.device)
            self._inject(weights, config)
        self._head = self.model.get_output_embeddings()
        self._selected: torch.Tensor | None = None
        if self._head is not None:
            self._head.register_forward_pre_hook(self._select_rows)

    def _inject(self, weights: DraftWeights, config: AdaptationConfig) -> None:
        from peft import inject_adapter_in_model

        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inject_adapter_in_model(self.peft_config, self.model)
        self.model.eval()
        generator = torch.Generator().manual_seed(config.seed)
        self.matrices: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        for name in weights.names:
            layer = self.model.get_submodule(name)
            a, b = layer.lora_A["default"], layer.lora_B["default"]
            a.float(), b.float()
            bound = 1 / math.sqrt(a.weight.shape[1])
            a.weight.copy_(torch.empty(a.weight.shape).uniform_(-bound, bound, generator=generator))
            b.weight.zero_()
            self.matrices[name] = (a.weight.requires_grad_(), b.weight.requires_grad_())

    @property
    def parameters(self) -> list[nn.Parameter]:
        """A and B of every adapted module, in a fixed order."""
        return [matrix for pair in self.matrices.values() for matrix in pair]

    def snapshot(self) -> Adapter:
        """An immutable copy of the LoRA matrices."""
        return {name: (a.detach().clone(), b.detach().clone()) for name, (a, b) in self.matrices.items()}

    def load(self, adapter: Adapter | None) -> None:
        """Takes over an adapter; `None` is the bare draft (B = 0)."""
        with torch.no_grad():
            for name, (a, b) in self.matrices.items():
                if adapter is None:
                    b.zero_()
                else:
                    a.copy_(adapter[name][0])
                    b.copy_(adapter[name][1])

    def logits(self, items: list[TrainingItem]) -> torch.Tensor:
        """The student's logits at the items' rows, one sequence a row of the batch, padded on the right.

        Right padding behind a causal mask changes nothing for any model, and positions start anew in each sequence.

        Returns:
            `Tensor` of shape `[sum of rows, V]`, float32, divided by the temperatures.
        """
        width = max(len(item.tokens) for item in items)
        tokens = torch.zeros(len(items), width, dtype=torch.long)
        mask = torch.zeros_like(tokens)
        selected = []
        for row, item in enumerate(items):
            tokens[row, : len(item.tokens)] = item.tokens
            mask[row, : len(item.tokens)] = 1
            selected.append(torch.arange(item.rows) + row * width + item.first)
        self._selected = torch.cat(selected).to(self.device)
        kwargs = {}
        if any(item.start for item in items):  # the head of a long context was cut off
            starts = torch.tensor([item.start for item in items])
            kwargs["position_ids"] = (starts[:, None] + torch.arange(width)).to(self.device)
        mask = mask.to(self.device)
        logits = self.model(input_ids=tokens.to(self.device), attention_mask=mask, use_cache=False, **kwargs).logits
        if self._head is None:
            logits = logits.reshape(-1, logits.shape[-1])[self._selected]
        logits = logits.reshape(-1, logits.shape[-1]).float()
        if all(item.temperature == 1 for item in items):
            return logits
        temperatures = torch.cat([torch.full((item.rows, 1), item.temperature) for item in items])
        return logits / temperatures.to(self.device)

    def teacher(self, items: list[TrainingItem]) -> TeacherRows:
        """The items' rows together, where the student computes."""
        log_probs, token_ids, log_residual = (
            torch.cat(parts).to(self.device) for parts in zip(*(item.teacher for item in items))
        )
        return TeacherRows(log_probs, token_ids.long(), log_residual)

    def _select_rows(self, head: nn.Module, inputs: tuple[torch.Tensor, ...]):
        """Only the rows that have feedback go through the output head: its vocabulary is most of the memory."""
        hidden = inputs[0]
        return (hidden.reshape(-1, hidden.shape[-1])[self._selected][None], *inputs[1:])


def lora_config(draft: nn.Module, weights: DraftWeights, config: AdaptationConfig):
    """The `peft.LoraConfig` that says in PEFT's words what `config` chose."""
    from peft import LoraConfig

    return LoraConfig(
        r=config.r,
        lora_alpha=config.scale * config.r,
        lora_dropout=0.0,
        bias="none",
        target_modules=list(weights.names),
        fan_in_fan_out=any(weights.transposed),
        task_type="CAUSAL_LM",
        base_model_name_or_path=getattr(draft.config, "_name_or_path", None) or None,
        inference_mode=True,
    )


def _copy_of(draft: nn.Module, weights: DraftWeights, device: torch.device) -> nn.Module:
    """A model with modules of its own over the same weights. The parameter objects are new: freezing them must not
    freeze the user's."""
    pristine = {id(serving): own for serving, own in zip(weights.serving, weights.pristine)}
    memo = {}
    for parameter in draft.parameters():
        source = pristine.get(id(parameter), parameter.detach())
        memo[id(parameter)] = nn.Parameter(source.to(device), requires_grad=False)
    model = copy.deepcopy(draft, memo).to(device)
    for module in model.modules():  # a user's hooks belong to the draft alone
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
        # A function in place of the method cannot be copied: it would run the draft's own modules.
        if isinstance(module.__dict__.get("forward"), types.FunctionType):
            del module.forward
    return model.eval()
