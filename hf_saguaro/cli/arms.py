# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""The arms of a benchmark: ways to get the same greedy text from the same pair of models."""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..config import SaguaroConfig
from ..errors import SaguaroError
from ..generation.strategy import last_stats


# What Transformers' assisted generation does when nobody sets anything.
STOCK_DEFAULTS = {"num_assistant_tokens": 20, "assistant_confidence_threshold": 0.4}
_NAME = re.compile(r"(?P<base>[a-z-]+?)(?:-k(?P<k>\d+))?(?:-f(?P<f>\d+))?")
ARM_HELP = (
    "plain, stock (assisted generation at its own defaults), saguaro (--config or the defaults), sync, async, "
    "autoregressive, and the peers economize, economize-sync, flashspec where installed; -kN fixes the draft tokens "
    "of a round, -fN the fan-out: stock-k3, async-k4-f3"
)


@dataclass
class Arm:
    """One way to generate. `generate` returns the new token ids and the figures of the run, where there are any.

    Args:
        name (`str`), threads (`int`, *optional*): intra-op threads it runs with.
    """

    name: str
    target: PreTrainedModel
    draft: PreTrainedModel | None
    threads: int | None = None

    # Whether tokens reach the streamer as they are settled.
    streams = True
    # Whether what reaches the streamer at once is what one verification settled.
    rounds_stream = False

    def generate(
        self, inputs: dict[str, torch.Tensor], max_new_tokens: int, streamer: BaseStreamer | None
    ) -> tuple[list[int], dict[str, Any] | None]:
        prompt = inputs["input_ids"].shape[1]
        output = self.target.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=max_new_tokens,
            pad_token_id=_pad_id(self.target),
            streamer=streamer,
            **self.generate_kwargs(),
        )
        return output[0, prompt:].tolist(), self.stats()

    def generate_kwargs(self) -> dict[str, Any]:
        return {}

    def stats(self) -> dict[str, Any] | None:
        return None

    def settings(self) -> dict[str, Any]:
        """What distinguishes this arm, JSON-safe."""
        return {"threads": self.threads}


class PlainArm(Arm):
    """`generate` and nothing else: the mark, and the reference text."""


@dataclass
class StockArm(Arm):
    """Transformers' assisted generation, at its own defaults or with a fixed number of draft tokens."""

    k: int | None = None

    rounds_stream = True

    def generate(self, inputs, max_new_tokens, streamer):
        with self._draft_settings():
            return super().generate(inputs, max_new_tokens, streamer)

    def generate_kwargs(self):
        return {"assistant_model": self.draft}

    def settings(self):
        return {**super().settings(), **self._values()}

    def _values(self) -> dict[str, Any]:
        if self.k is None:
            return STOCK_DEFAULTS
        return {"num_assistant_tokens": self.k, "assistant_confidence_threshold": 0.0}

    @contextmanager
    def _draft_settings(self) -> Iterator[None]:
        # The stock loop reads these from the draft alone, whatever `generate` is given.
        own = self.draft.generation_config
        self.draft.generation_config = copy.deepcopy(own)
        self.draft.generation_config.num_assistant_tokens_schedule = "constant"
        for name, value in self._values().items():
            setattr(self.draft.generation_config, name, value)
        try:
            yield
        finally:
            self.draft.generation_config = own


@dataclass
class SaguaroArm(Arm):
    """This project."""

    config: SaguaroConfig | None = None

    def generate_kwargs(self):
        return {"assistant_model": self.draft, "speculation": self.config}

    def stats(self):
        return last_stats(self.target).to_dict()

    def settings(self):
        return {**super().settings(), **self.config.to_dict()}


@dataclass
class EconomizeArm(Arm):
    """The peer `economize` (PyPI), its asynchronous decoder."""

    k: int | None = None
    fan_out: int | None = None
    mode: str = "async"

    streams = False

    def __post_init__(self):
        distributed = _peer("economize.distributed")
        given = {"draft_length": self.k, "fanout": self.fan_out}
        given = {name: value for name, value in given.items() if value is not None}
        self._config = distributed.SSDConfig(mode=self.mode, **given)
        self._decoder = distributed.AsyncSpeculativeDecoder(self.target, self.draft, self._config)

    def generate(self, inputs, max_new_tokens, streamer):
        result = self._decoder.generate(inputs["input_ids"], max_new_tokens, stop_tokens=_stop_ids(self.target))
        stats = {
            "rounds": result.rounds,
            "accepted_tokens": sum(result.accepted),
            "tokens_in_rounds": sum(result.accepted) + result.rounds,
            "cache_hits": result.hits,
        }
        return result.tokens.tolist(), stats

    def settings(self):
        return {**super().settings(), "draft_length": self._config.draft_length, "fanout": self._config.fanout}


@dataclass
class FlashSpecArm(Arm):
    """The peer `flashspec` (PyPI), at its own defaults or with a fixed gamma."""

    k: int | None = None

    streams = False

    def __post_init__(self):
        flashspec, drafter = _peer("flashspec"), _peer("flashspec.engine.hf_drafter")
        verifier, device = _peer("flashspec.engine.verifier"), self.target.device
        dtype = str(self.target.dtype).removeprefix("torch.")
        fixed = {} if self.k is None else {"drafter_strategy": "bandit", "bandit": {"n_arms": 1}}
        sampling = {"temperature": 0.0, **({} if self.k is None else {"gamma": self.k})}
        config = flashspec.FlashSpecConfig(device=str(device), dtype=dtype, sampling=sampling, **fixed)
        draft = drafter.HuggingFaceDrafter("draft", device, self.draft.dtype, temperature=0.0, model=self.draft)
        target = verifier.TargetModel("target", device, self.target.dtype, model=self.target)
        self._engine = flashspec.SpeculativeEngine(config, [draft], target)

    def generate(self, inputs, max_new_tokens, streamer):
        result = self._engine.generate(inputs["input_ids"], max_new_tokens, eos_token_ids=_stop_ids(self.target))
        accepted = sum(step.accepted for step in result.arm_steps)
        rounds = len(result.arm_steps)
        stats = {"rounds": rounds, "accepted_tokens": accepted, "tokens_in_rounds": accepted + rounds}
        return [token for token in result.output_ids[0].tolist() if token >= 0], stats

    def settings(self):
        return {**super().settings(), "gamma": self.k, "strategy": self._engine.drafter_strategy}


def build_arm(
    name: str,
    target: PreTrainedModel,
    draft: PreTrainedModel,
    config: dict[str, Any] | None = None,
    threads: int | None = None,
) -> Arm:
    """The arm of that name.

    Args:
        name (`str`): see `ARM_HELP`.
        config (`dict`, *optional*): fields of [`SaguaroConfig`] for this project's arms; the name has the last word.
        threads (`int`, *optional*): intra-op threads of this arm.

    Raises:
        SaguaroError: for an unknown name, a part that the arm does not have, or a peer that is not installed.
    """
    match = _NAME.fullmatch(name)
    base = match["base"] if match else name
    k, fan_out = (int(match[part]) if match and match[part] else None for part in "kf")
    common = (name, target, draft, threads)
    if base in ("saguaro", "sync", "async", "autoregressive"):
        fields = dict(config or {})
        if base != "saguaro":
            fields["execution"] = base
        if k is not None:
            fields["num_assistant_tokens"] = k
        if fan_out is not None:
            fields["fan_out"] = fan_out
        return SaguaroArm(*common, SaguaroConfig.from_dict(fields))
    if base in ("economize", "economize-sync"):
        return EconomizeArm(*common, k, fan_out, "sync" if base.endswith("sync") else "async")
    if fan_out is None and base == "stock":
        return StockArm(*common, k)
    if fan_out is None and base == "flashspec":
        return FlashSpecArm(*common, k)
    if name == "plain":
        return PlainArm(*common)
    raise SaguaroError(f"there is no arm {name!r}; choose among {ARM_HELP}.")


def _peer(module: str):
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise SaguaroError(
            f"the arm {package} needs the package {package}, which is not to be had here ({error}); run `pip install "
            f"{package}`, or leave the arm out."
        ) from None


def _stop_ids(model: PreTrainedModel) -> list[int]:
    ids = model.generation_config.eos_token_id
    return [] if ids is None else ids if isinstance(ids, list) else [ids]


def _pad_id(model: PreTrainedModel) -> int | None:
    """The model's own, or an EOS id: unset, `generate` would choose it with a warning for every prompt."""
    ids = [model.generation_config.pad_token_id, *_stop_ids(model)]
    return next((token for token in ids if token is not None), None)
