# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Row-wise processors, applied to a whole block, leave what the stock ones leave row by row."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as stock

from hf_saguaro.generation.processors import DraftProcessors, TargetProcessors


V = 300
CHAINS = {
    "top-k": [stock.TopKLogitsWarper(20)],
    "top-k, top-p": [stock.TopKLogitsWarper(20), stock.TopPLogitsWarper(0.8)],
    "temperature, top-k, top-p, min-p": [
        stock.TemperatureLogitsWarper(0.7),
        stock.TopKLogitsWarper(50),
        stock.TopPLogitsWarper(0.9),
        stock.MinPLogitsWarper(0.1),
    ],
    "min-p": [stock.TopKLogitsWarper(20), stock.MinPLogitsWarper(0.2)],
    "more than there are": [stock.TopKLogitsWarper(V), stock.TopPLogitsWarper(0.5)],
    "another filter value": [stock.TopKLogitsWarper(5, filter_value=-1e4), stock.TopPLogitsWarper(0.9)],
    "top-p first": [stock.TopPLogitsWarper(0.9), stock.TopKLogitsWarper(5)],
    "normalized": [stock.TopKLogitsWarper(5), stock.TopPLogitsWarper(0.9), stock.LogitNormalization()],
}


def scores(kind):
    values = torch.randn(2, 3, V, generator=torch.Generator().manual_seed(1)) * 3
    if kind == "ties":  # as half precision makes them, also at the k-th place and at the edge of the nucleus
        values = values.round()
    if kind == "ties above":  # at the edge of the nucleus alone
        values[:, :, ::31] = 14.0
    if kind == "few":
        values[:, :, 4:] = -torch.inf
    return values


@pytest.mark.parametrize("kind", ["distinct", "ties", "ties above", "few"])
@pytest.mark.parametrize("chain", CHAINS)
def test_a_block_is_processed_as_its_rows_are(chain, kind):
    processors, block = LogitsProcessorList(CHAINS[chain]), scores(kind)
    ids = torch.zeros(2, 4, dtype=torch.long)
    expected = torch.stack([processors(ids, block[:, j]) for j in range(block.shape[1])], dim=1)
    assert TargetProcessors(processors, 2).block(ids, block.clone()).equal(expected)
    draft = DraftProcessors(processors, None, 1, torch.device("cpu"))(block[0].clone(), [0, 0, 0], None)
    assert draft.equal(expected[0])


def test_a_draft_elsewhere_goes_without_what_draws_on_the_targets_device():
    watermark = stock.WatermarkLogitsProcessor(vocab_size=V, device="cpu")
    here, elsewhere = (
        DraftProcessors(LogitsProcessorList([watermark]), None, 1, torch.device(device)) for device in ("cpu", "cuda")
    )
    row, text = scores("distinct")[0, :1], torch.arange(2, 9)[None]
    assert not here(row, [0], lambda i: text).equal(row)
    assert elsewhere(row, [0], lambda i: text).equal(row)
