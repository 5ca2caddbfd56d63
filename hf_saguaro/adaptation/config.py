# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""`AdaptationConfig`: what a user can choose about learning while serving."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ..errors import SaguaroError


LOSSES = ("kl", "reverse_kl", "acceptance")


@dataclass
class AdaptationConfig:
    """How a draft learns from what its target accepts. JSON-safe: `to_dict`, `from_dict`.

    Args:
        r (`int`, *optional*, defaults to 8):
            Rank of the LoRA matrices.
        lora_alpha (`float`, *optional*):
            LoRA scale times `r`; `None` means `r`, a scale of 1.
        target_modules (`str` or `list[str]`, *optional*, defaults to `"all-linear"`):
            Linear layers to adapt inside the chosen decoder layers, by the end of their names (`["q_proj", "v_proj"]`).
        layers (`str` or `list[int]`, *optional*, defaults to `"last_third"`):
            Decoder layers to adapt: `"last_third"` (the backward pass stops there), `"all"`, or indices.
        learning_rate (`float`, *optional*, defaults to 1e-3):
            Peak rate of AdamW; halved after a rollback, given back after five clean publications.
        train_every_tokens (`int`, *optional*, defaults to 512):
            New feedback rows that make a training step due.
        publish_every_rounds (`int`, *optional*, defaults to 50):
            Rounds that pass at least between two publications.
        max_train_fraction (`float`, *optional*, defaults to 0.1):
            Largest share of wall time that training may take. It gets a quarter of that before the first publication, and
            less with every candidate that the gate refuses without promise.
        buffer_tokens (`int`, *optional*, defaults to 65536):
            Feedback rows that are kept (528 bytes each for 64 logits); the buffer's bytes are bounded by the same figure.
        replay_ratio (`float`, *optional*, defaults to 1.0):
            Sequences replayed from the reservoir for every fresh one.
        discard_weight (`float`, *optional*, defaults to 0.0):
            Weight of the loss on what followed the first rejected token; 0 is off.
        loss (`str`, *optional*, defaults to `"kl"`):
            `"kl"` (forward KL), `"reverse_kl"` or `"acceptance"` (1 - sum of min(p, q)).
        top_k_logits (`int`, *optional*, defaults to 64):
            Target log-probabilities kept a row; the mass beside them is one more bucket.
        validate (`bool`, *optional*, defaults to `True`):
            Whether a candidate must win on held-out text before it serves (the shadow gate).
        rollback (`bool`, *optional*, defaults to `True`):
            Whether an adapter that accepts less than its forerunner is taken back (the canary).
        device (`str` or `torch.device`, *optional*):
            Where training runs; `None` is the draft's device.
        seed (`int`, *optional*, defaults to 0):
            Seed of the LoRA init, of the held-out choice and of the replay.

    Raises:
        SaguaroError: for a value that cannot work.
    """

    r: int = 8
    lora_alpha: float | None = None
    target_modules: str | list[str] = "all-linear"
    layers: str | list[int] = "last_third"
    learning_rate: float = 1e-3
    train_every_tokens: int = 512
    publish_every_rounds: int = 50
    max_train_fraction: float = 0.1
    buffer_tokens: int = 65536
    replay_ratio: float = 1.0
    discard_weight: float = 0.0
    loss: str = "kl"
    top_k_logits: int = 64
    validate: bool = True
    rollback: bool = True
    device: Any = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("r", "train_every_tokens", "publish_every_rounds", "buffer_tokens", "top_k_logits"):
            value = getattr(self, name)
            if not _is_int(value) or value < 1:
                raise SaguaroError(f"`{name}` is {value!r}; use an int of at least 1.")
        for name in ("learning_rate", "replay_ratio", "discard_weight", "lora_alpha"):
            value = getattr(self, name)
            if value is not None and (not _is_number(value) or not 0 <= value < float("inf")):
                raise SaguaroError(f"`{name}` is {value!r}; use a finite number that is not negative.")
        if not _is_number(self.max_train_fraction) or not 0 < self.max_train_fraction <= 1:
            raise SaguaroError(f"`max_train_fraction` is {self.max_train_fraction!r}; it is a share of time in (0, 1].")
        if self.loss not in LOSSES:
            raise SaguaroError(f"`loss` is {self.loss!r}; choose one of {', '.join(map(repr, LOSSES))}.")
        if not _is_int(self.seed):
            raise SaguaroError(f"`seed` is {self.seed!r}; use an int.")
        for name in ("validate", "rollback"):
            if not isinstance(getattr(self, name), bool):
                raise SaguaroError(f"`{name}` is {getattr(self, name)!r}; use True or False.")
        self._check_choice_of_modules()
        if self.device is not None:
            self.device = str(self.device)

    def _check_choice_of_modules(self) -> None:
        if not isinstance(self.layers, str):
            self.layers = list(self.layers)
            if not self.layers or not all(_is_int(layer) for layer in self.layers):
                raise SaguaroError(f"`layers` is {self.layers!r}; use 'last_third', 'all' or a list of layer indices.")
        elif self.layers not in ("last_third", "all"):
            raise SaguaroError(f"`layers` is {self.layers!r}; use 'last_third', 'all' or a list of layer indices.")
        if isinstance(self.target_modules, str):
            if self.target_modules != "all-linear":
                self.target_modules = [self.target_modules]
        else:
            self.target_modules = list(self.target_modules)
            if not self.target_modules or not all(isinstance(name, str) for name in self.target_modules):
                raise SaguaroError(
                    f"`target_modules` is {self.target_modules!r}; use 'all-linear' or a list of module name endings."
                )

    @property
    def scale(self) -> float:
        """What multiplies B @ A."""
        return 1.0 if self.lora_alpha is None else self.lora_alpha / self.r

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON-safe values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> AdaptationConfig:
        """The config that `to_dict` described. Unknown fields raise [`SaguaroError`]."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise SaguaroError(
                f"unknown adaptation field(s) {', '.join(unknown)}; known are {', '.join(sorted(known))}."
            )
        return cls(**values)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
