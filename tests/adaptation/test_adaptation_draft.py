# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""A draft made from its target: fewer layers, its own storage, a model like any other."""

from __future__ import annotations

import copy

import pytest
import torch
from test_adaptation_weights import FAMILIES

from hf_saguaro import SaguaroError, make_draft


@pytest.fixture(params=FAMILIES)
def target(request):
    return FAMILIES[request.param]()


def layers_of(model):
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def skip(layer):
    """Lets a layer hand its input on; older Transformers wrap it in a tuple."""
    forward = layer.forward

    def hand_on(hidden_states, *args, **kwargs):
        out = forward(hidden_states, *args, **kwargs)
        return (hidden_states, *out[1:]) if isinstance(out, tuple) else hidden_states

    layer.forward = hand_on


def test_it_computes_what_the_kept_layers_compute(target):
    depth = len(layers_of(target))
    kept = [0, depth - 1]
    draft = make_draft(target, keep_layers=kept)
    by_hand = copy.deepcopy(target)
    for index in range(depth):
        if index not in kept:
            skip(layers_of(by_hand)[index])
    tokens = torch.arange(2, 14)[None]
    with torch.no_grad():
        expected = by_hand(tokens, use_cache=False).logits
        torch.testing.assert_close(draft(tokens, use_cache=False).logits, expected, atol=1e-5, rtol=1e-5)


def test_it_generates_with_its_cache(target):
    draft = make_draft(target, keep_layers=2)
    tokens = torch.arange(2, 9)[None]
    settings = dict(max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
    with_cache = draft.generate(tokens, **settings)
    assert with_cache.tolist() == draft.generate(tokens, use_cache=False, **settings).tolist()


def test_it_is_a_model_of_its_own(target):
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    depth = target.config.num_hidden_layers
    draft = make_draft(target, keep_layers=2)
    assert type(draft) is type(target) and not draft.training
    assert draft.config.num_hidden_layers == len(layers_of(draft)) == 2
    assert target.config.num_hidden_layers == len(layers_of(target)) == depth
    theirs = {tensor.untyped_storage().data_ptr() for tensor in target.state_dict().values()}
    assert not theirs & {tensor.untyped_storage().data_ptr() for tensor in draft.state_dict().values()}
    assert draft.generation_config is not target.generation_config
    assert draft.generation_config.to_dict() == target.generation_config.to_dict()
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())


def test_it_saves_and_loads(target, tmp_path):
    draft = make_draft(target, keep_layers=2)
    draft.save_pretrained(tmp_path)
    again = type(draft).from_pretrained(tmp_path)
    tokens = torch.arange(2, 9)[None]
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, draft(tokens).logits)


def test_layer_kinds_follow_their_layers():
    target = FAMILIES["gemma3"]()
    kinds = target.config.layer_types
    assert len(set(kinds)) == 2
    assert make_draft(target, keep_layers=[1, 5]).config.layer_types == [kinds[1], kinds[5]]


@pytest.mark.parametrize(("count", "kept"), [(None, [0, 2, 5]), (1, [0]), (2, [0, 5]), (6, [0, 1, 2, 3, 4, 5])])
def test_layers_are_spread_evenly(count, kept):
    target = FAMILIES["gemma3"]()
    assert list(_origins(make_draft(target, keep_layers=count), target)) == kept


def _origins(draft, target):
    for layer in layers_of(draft):
        weight = layer.mlp.up_proj.weight
        yield next(i for i, own in enumerate(layers_of(target)) if torch.equal(own.mlp.up_proj.weight, weight))


@pytest.mark.parametrize("wrong", [0, 7, [], [0, 0], [6], True, "half"])
def test_layers_that_do_not_exist_are_refused(wrong):
    with pytest.raises(SaguaroError, match="keep_layers"):
        make_draft(FAMILIES["gemma3"](), keep_layers=wrong)
