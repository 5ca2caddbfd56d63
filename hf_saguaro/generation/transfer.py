# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""To a device without a wait.

`torch.tensor(.., device=)`, an index that is a list and an element set to a number all copy from the host, and such a copy
first waits until the device has done all that it was given. In a round that would be a wait for the models themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def send(values: Sequence, device: torch.device, dtype: torch.dtype = torch.long) -> torch.Tensor:
    """The host's numbers (nested as for `torch.tensor`) as a tensor on `device`."""
    return move(torch.tensor(values, dtype=dtype), device)


def move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on `device`. CUDA alone takes the values before the call returns, so that their memory may be used again;
    what goes to the host must have arrived before anybody looks at it."""
    return tensor.to(device, non_blocking=device.type == "cuda")


def take_rows(tensor: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """`tensor[rows]` for ascending `rows`: `[B, ..]` -> `[R, ..]`."""
    return tensor if len(rows) == len(tensor) else tensor.index_select(0, send(rows, tensor.device))
