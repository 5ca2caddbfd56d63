# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""The model card of an adapter that was learned online."""

from __future__ import annotations

from typing import Any

from huggingface_hub import ModelCard, ModelCardData


_TEMPLATE = """---
{{ card_data }}
---

# Draft adapter learned online

LoRA matrices for a draft model in speculative decoding, trained by [hf_saguaro](https://pypi.org/project/hf_saguaro) on
what its target accepted while both were serving. The draft never changes the target's text; the adapter makes it be
accepted more often. It is of use with the draft below only.

* Draft: {{ base_model or "not recorded" }}
* Version: {{ metrics["version"] }} ({{ metrics["published"] }} published, {{ metrics["refused"] }} refused, {{ metrics["rolled_back"] }} rolled back)
* Optimizer steps: {{ metrics["steps"] }} on {{ metrics["rows"] }} rows of feedback

{% if gate %}
## Measured by its own gate

On {{ gate["sequences"] }} held-out texts ({{ gate["rows"] }} tokens), greedy traffic counted exactly and sampled traffic in
expectation, five draft tokens a round:

| draft | accepted tokens a round |
|---|---|
| bare | {{ "%.3f" | format(gate["accepted_bare"]) }} |
| with this adapter | {{ "%.3f" | format(gate["accepted_candidate"]) }} |
{% endif %}

## Use

```python
from hf_saguaro import OnlineAdapter, SaguaroConfig

adapter = OnlineAdapter.from_pretrained(draft, "{{ name }}")     # goes on learning
model.generate(**inputs, assistant_model=draft, speculation=SaguaroConfig(adaptation=adapter))
```

or, as it is: `peft.PeftModel.from_pretrained(draft, "{{ name }}")`.
"""


def adapter_card(
    adapter_dir: str, base_model: str | None, history: list[dict[str, Any]], metrics: dict[str, Any]
) -> str:
    """The text of an adapter's README.md.

    Args:
        adapter_dir (`str`): folder or repository of the adapter, named in the usage lines.
        base_model (`str`, *optional*): Hub id or path of the draft.
        history (`list[dict]`): `OnlineAdapter.history()`; the last publication's figures are shown.
        metrics (`dict`): `OnlineAdapter.metrics()`.
    """
    # A local path is no Hub id, and the Hub refuses a card that claims it is.
    hub_id = base_model if base_model and base_model.count("/") <= 1 and not base_model.startswith((".", "/")) else None
    data = ModelCardData(
        base_model=hub_id,
        base_model_relation="adapter" if hub_id else None,
        library_name="peft",
        pipeline_tag="text-generation",
        tags=["hf_saguaro", "speculative-decoding", "lora", "online-adaptation"],
    )
    published = [event for event in history if event["event"] == "published" and "accepted_bare" in event]
    gate = published[-1] if published else None
    card = ModelCard.from_template(
        data, template_str=_TEMPLATE, base_model=base_model, metrics=metrics, gate=gate, name=adapter_dir
    )
    return str(card)
