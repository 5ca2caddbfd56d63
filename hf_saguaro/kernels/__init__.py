# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Verification kernels: the functions of `reference.py`."""

from .reference import (
    biased_draw,
    commit_slots,
    coupled_verification,
    keyed_gumbel,
    keyed_uniform,
    rejection_verification,
    select_forks,
    top_k_with_residual,
)


__all__ = [
    "biased_draw",
    "commit_slots",
    "coupled_verification",
    "keyed_gumbel",
    "keyed_uniform",
    "rejection_verification",
    "select_forks",
    "top_k_with_residual",
]
