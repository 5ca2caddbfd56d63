# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Adapters that are closed after each test, whatever happened in it."""

from __future__ import annotations

import pytest
from toy_serving import tiny_draft

from hf_saguaro.adaptation import AdaptationConfig, OnlineAdapter


@pytest.fixture
def make_adapter():
    """`make_adapter(draft=None, **config)`: an open adapter of a tiny draft whose trainer waits for `flush`."""
    made = []

    def make(draft=None, **config):
        draft = tiny_draft() if draft is None else draft
        settings = {"layers": "all", "learning_rate": 1e-2, "publish_every_rounds": 1, "buffer_tokens": 4096} | config
        adapter = OnlineAdapter(draft, AdaptationConfig(**settings))
        adapter.pause()
        made.append((adapter, draft))  # an adapter does not keep its draft alive
        return adapter

    yield make
    for adapter, _ in made:
        adapter.close()
