# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""`SaguaroConfig`: what a user can choose about speculation."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from . import compat
from .errors import SaguaroError


MAX_DRAFT_TOKENS = 64
MAX_FAN_OUT = 64

_CHOICES = {
    "fan_out_shape": ("geometric", "uniform"),
    "backup": ("auto", "draft", "prompt_lookup", "none"),
    "execution": ("auto", "async", "sync", "autoregressive"),
    "verification": ("coupled", "rejection"),
}


@dataclass
class SaguaroConfig:
    """How `model.generate(..., assistant_model=draft, speculation=SaguaroConfig(...))` speculates.

    No field changes the text: greedy and coupled sampling give the same tokens for every setting (in float32), and
    rejection sampling the same law.

    Args:
        num_assistant_tokens (`int` or `"auto"`, *optional*, defaults to `"auto"`):
            K, the draft tokens verified in one round (1 to 64). `"auto"` lets the policy choose and end chains early.
        fan_out (`int`, `list[int]` or `"auto"`, *optional*, defaults to `"auto"`):
            Outcomes prepared per accept length. An int F >= 0 is a budget of F * (K + 1) for `fan_out_shape` to spread,
            0 prepares nothing; a list of K + 1 ints is used as it is.
        fan_out_shape (`str`, *optional*, defaults to `"geometric"`):
            `"geometric"` (Theorem 12 of arXiv 2603.03251, from the measured accept lengths) or `"uniform"`.
        cache_bias (`float`, *optional*, defaults to 1.0):
            C in (0, 1], Saguaro sampling (section 4.2 of the paper); needs `verification="rejection"`. 1.0 is off.
        backup (`str`, *optional*, defaults to `"auto"`):
            What a cache miss gets: `"draft"` (a chain drafted on the spot), `"prompt_lookup"` (n-gram copy), `"none"`.
        execution (`str`, *optional*, defaults to `"auto"`):
            `"async"` (the draft works while the target verifies), `"sync"` (they take turns), `"autoregressive"` (no
            draft, the same keyed noise) or `"auto"` (measured).
        verification (`str`, *optional*, defaults to `"coupled"`):
            `"coupled"` (same seed, same text, whatever the draft) or `"rejection"` (the paper's).
        seed (`int`, *optional*):
            Seed of the sampling noise; `None` draws one from the global torch generator.
        compile (`bool` or `"auto"`, *optional*, defaults to `"auto"`):
            Whether draft passes go through `torch.compile` with fixed shapes. `"auto"` is off: on a CPU each shape costs
            tens of seconds to compile, more than all but the longest runs win back (`compile_seconds` in the stats).
        adaptation (`OnlineAdapter`, `AdaptationConfig` or `True`, *optional*):
            Lets the draft learn from what the target accepts. An adapter object itself is not serialised.
        draft_temperature (`float`, *optional*):
            Temperature of the draft alone; `None` warps the draft once, exactly like the target.

    Raises:
        SaguaroError: for a value that cannot work, before anything runs.
    """

    num_assistant_tokens: int | str = "auto"
    fan_out: int | list[int] | str = "auto"
    fan_out_shape: str = "geometric"
    cache_bias: float = 1.0
    backup: str = "auto"
    execution: str = "auto"
    verification: str = "coupled"
    seed: int | None = None
    compile: bool | str = "auto"
    adaptation: Any = None
    draft_temperature: float | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise SaguaroError(
                    f"`{name}` is {getattr(self, name)!r}; choose one of {', '.join(map(repr, choices))}."
                )
        self._check_num_assistant_tokens()
        self._check_fan_out()
        if not _is_number(self.cache_bias) or not 0 < self.cache_bias <= 1:
            raise SaguaroError(f"`cache_bias` is {self.cache_bias!r}; it scales a probability, use a number in (0, 1].")
        if self.cache_bias < 1 and self.verification == "coupled":
            raise SaguaroError(
                f"`cache_bias`={self.cache_bias} needs `verification='rejection'`: coupled verification makes outcomes "
                "predictable without a bias. Leave `cache_bias` at 1.0 or change `verification`."
            )
        if self.seed is not None and not _is_int(self.seed):
            raise SaguaroError(f"`seed` is {self.seed!r}; use an int, or None to draw one from torch's generator.")
        if self.compile != "auto" and not isinstance(self.compile, bool):
            raise SaguaroError(f"`compile` is {self.compile!r}; use True, False or 'auto'.")
        if self.draft_temperature is not None and (
            not _is_number(self.draft_temperature) or self.draft_temperature <= 0
        ):
            raise SaguaroError(f"`draft_temperature` is {self.draft_temperature!r}; use a number above 0, or None.")

    def _check_num_assistant_tokens(self) -> None:
        k = self.num_assistant_tokens
        if k != "auto" and not (_is_int(k) and 1 <= k <= MAX_DRAFT_TOKENS):
            raise SaguaroError(f"`num_assistant_tokens` is {k!r}; use an int from 1 to {MAX_DRAFT_TOKENS}, or 'auto'.")

    def _check_fan_out(self) -> None:
        f, k = self.fan_out, self.num_assistant_tokens
        if isinstance(f, (list, tuple)):
            self.fan_out = f = list(f)
            if len(f) < 2 or not all(_is_int(count) and 0 <= count <= MAX_FAN_OUT for count in f):
                raise SaguaroError(
                    f"`fan_out` is {f!r}; a list needs K + 1 ints from 0 to {MAX_FAN_OUT}, K at least 1."
                )
            if k == "auto":
                self.num_assistant_tokens = len(f) - 1
                self._check_num_assistant_tokens()
            elif len(f) != k + 1:
                raise SaguaroError(
                    f"`fan_out` has {len(f)} entries for `num_assistant_tokens`={k}; give K + 1 = {k + 1} of them, one "
                    "per accept length."
                )
        elif f != "auto" and not (_is_int(f) and 0 <= f <= MAX_FAN_OUT):
            raise SaguaroError(f"`fan_out` is {f!r}; use an int from 0 to {MAX_FAN_OUT}, a list of ints, or 'auto'.")

    def __deepcopy__(self, memo: dict) -> SaguaroConfig:
        # `generate` copies its config; a live adapter is one object, with a thread of its own.
        return dataclasses.replace(self)

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON-safe values; a live adapter becomes its config, or `True`."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        adaptation = getattr(self.adaptation, "config", self.adaptation)
        values["adaptation"] = adaptation.to_dict() if hasattr(adaptation, "to_dict") else adaptation
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SaguaroConfig:
        """The config that `to_dict` described. Unknown fields raise [`SaguaroError`]."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise SaguaroError(
                f"unknown speculation field(s) {', '.join(unknown)}; known are {', '.join(sorted(known))}."
            )
        return cls(**values)

    @classmethod
    def resolve(cls, speculation: Any) -> SaguaroConfig:
        """What a user may pass as `speculation=`: the name, a dict or a config."""
        if isinstance(speculation, cls):
            return speculation
        if isinstance(speculation, dict):
            return cls.from_dict(speculation)
        if speculation == "saguaro":
            return cls()
        raise SaguaroError(
            f"`speculation` is {speculation!r}; use 'saguaro', a dict of SaguaroConfig fields, or a SaguaroConfig."
        )

    @classmethod
    def of(cls, generation_config: GenerationConfig) -> SaguaroConfig:
        """The config of one `generate` call: its `speculation`, and `num_assistant_tokens` if that stands beside it."""
        config = cls.resolve(generation_config.speculation)
        beside = compat.chosen_assistant_tokens(generation_config)
        if beside is None or beside == config.num_assistant_tokens:
            return config
        if config.num_assistant_tokens != "auto":
            raise SaguaroError(
                f"`num_assistant_tokens` is {beside!r} for `generate` and {config.num_assistant_tokens} in `speculation`; "
                "give it once."
            )
        return dataclasses.replace(config, num_assistant_tokens=beside)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
