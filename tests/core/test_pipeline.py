# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Text in, text out: the `text-generation` pipeline, `stop_strings` on a real tokenizer, and targets with weights
elsewhere."""

from __future__ import annotations

import copy

import accelerate
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, pipeline

import hf_saguaro
from hf_saguaro import SaguaroConfig

from ..conftest import VOCAB, perturbed, tiny_llama


PROMPTS = ["ab ba", "once more, and then on", "z"]
NEW_TOKENS = 24
CONFIGS = {
    "name": "saguaro",
    "async": SaguaroConfig(num_assistant_tokens=3, fan_out=2, execution="async", backup="draft"),
    "sync": {"num_assistant_tokens": 3, "execution": "sync"},
}


@pytest.fixture(scope="module")
def tokenizer():
    """One token a character; every id of the tiny models is one."""
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    characters = [chr(code) for code in range(32, 32 + VOCAB - len(special))]
    vocabulary = {token: index for index, token in enumerate([*special, *characters])}
    words = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", pad_token="<pad>", bos_token="<s>",
                                   eos_token="</s>", unk_token="<unk>", clean_up_tokenization_spaces=False)  # fmt: skip


@pytest.fixture
def text(tokenizer):
    """Runs a pipeline: `text(target, prompts, made_with, **call)`."""

    def run(target, prompts, made_with=None, **call):
        # A pipeline writes its own defaults into the generation config of the model it is given.
        pipe = pipeline("text-generation", model=copy.deepcopy(target), tokenizer=tokenizer, **(made_with or {}))
        call = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **call}
        out = pipe(prompts, **call)
        return out, hf_saguaro.last_stats(pipe.model)

    return run


@pytest.mark.parametrize("speculation", CONFIGS)
@pytest.mark.parametrize("batch_size", [None, 3])
def test_a_pipeline_that_always_speculates(text, target, drafts, speculation, batch_size):
    size = {} if batch_size is None else {"batch_size": batch_size}
    plain, _ = text(target, PROMPTS, **size)
    ours, stats = text(target, PROMPTS, dict(assistant_model=drafts["good"], speculation=CONFIGS[speculation]), **size)
    assert ours == plain and all(len(text) == 1 for text in ours)
    assert stats.new_tokens == NEW_TOKENS * (batch_size or 1)


def test_a_pipeline_that_speculates_in_one_call(text, target, drafts):
    plain, _ = text(target, PROMPTS[1])
    ours, stats = text(target, PROMPTS[1], assistant_model=drafts["good"], speculation=CONFIGS["async"])
    assert ours == plain and stats.rounds


def test_a_pipeline_returns_several_sequences(text, target, drafts):
    sampled = dict(do_sample=True, num_return_sequences=3)
    made_with = dict(assistant_model=drafts["good"])
    ours, _ = text(target, PROMPTS[1], made_with, speculation=SaguaroConfig(seed=3, execution="async"), **sampled)
    alone, _ = text(target, PROMPTS[1], made_with, speculation=SaguaroConfig(seed=3, execution="autoregressive"), **sampled)  # fmt: skip
    assert ours == alone and len({record["generated_text"] for record in ours}) == 3


def test_a_pipelines_stop_sequence_cuts_where_plain_generate_stops(text, target, drafts):
    visible = dict(suppress_tokens=[0, 1, 2, 3])  # no special tokens, which the text would not show
    whole, _ = text(target, PROMPTS[0], return_full_text=False, **visible)
    for place in range(4, 9):
        stop = whole[0]["generated_text"][place : place + 2]
        plain, _ = text(target, PROMPTS[0], stop_sequence=stop, **visible)
        ours, _ = text(target, PROMPTS[0], dict(assistant_model=drafts["good"]), stop_sequence=stop,
                       speculation=CONFIGS["async"], **visible)  # fmt: skip
        # Older pipelines take each token of a stop sequence for an EOS.
        assert ours == plain and plain[0]["generated_text"].endswith((stop, *stop))


@pytest.mark.parametrize("speculation", CONFIGS)
def test_stop_strings_end_every_row_at_its_own_token(target, drafts, tokenizer, speculation):
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True, return_token_type_ids=False)
    call = dict(max_new_tokens=NEW_TOKENS, do_sample=False, tokenizer=tokenizer)
    whole = target.generate(**inputs, **call)[:, inputs.input_ids.shape[1] :]
    stops = [tokenizer.decode(row[4 + 3 * place : 6 + 3 * place]) for place, row in enumerate(whole)]
    for some, eos in ((stops[:1], {}), (stops, {}), (stops, {"eos_token_id": tokenizer.eos_token_id})):
        plain = target.generate(**inputs, **call, stop_strings=some, **eos)
        ours = target.generate(**inputs, **call, stop_strings=some, **eos, assistant_model=drafts["good"],
                               speculation=CONFIGS[speculation])  # fmt: skip
        assert ours.tolist() == plain.tolist()
    assert plain.shape[1] < inputs.input_ids.shape[1] + NEW_TOKENS


def test_stop_strings_without_a_tokenizer_are_refused_as_in_plain_generate(target, drafts, prompt):
    with pytest.raises(ValueError, match="tokenizer"):
        target.generate(
            prompt, max_new_tokens=4, stop_strings="a", assistant_model=drafts["good"], speculation="saguaro"
        )


PLACES = {
    "a layer on disk": {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"},
    "the embeddings on disk": {"model.embed_tokens": "disk", "model.layers.0": "cpu", "model.layers.1": "cpu"},
    "all layers on disk": {"model.embed_tokens": "disk", "model.layers.0": "disk", "model.layers.1": "disk"},
}


@pytest.mark.parametrize("execution", ["async", "sync"])
@pytest.mark.parametrize("who", ["target", "draft"])
@pytest.mark.parametrize("places", PLACES)
def test_a_model_with_weights_elsewhere(prompt, tmp_path, places, who, execution):
    """As `device_map=` spreads a model: the weights of a layer arrive with its turn and leave after it."""
    target = tiny_llama(0)
    draft = perturbed(target, 0.05)
    plain = target.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
    spread = {"target": target, "draft": draft}[who]
    rest = {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    accelerate.dispatch_model(spread, {**PLACES[places], **rest}, main_device="cpu", offload_dir=str(tmp_path),
                              force_hooks=True)  # fmt: skip
    assert any(parameter.is_meta for parameter in spread.parameters())
    assert target.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False).tolist() == plain.tolist()
    config = SaguaroConfig(num_assistant_tokens=3, fan_out=2, execution=execution, backup="draft")
    ours = target.generate(
        prompt, max_new_tokens=NEW_TOKENS, do_sample=False, assistant_model=draft, speculation=config
    )
    stats = hf_saguaro.last_stats(target)
    assert ours.tolist() == plain.tolist() and stats.draft_failure is None and stats.accepted_tokens
    assert any(parameter.is_meta for parameter in spread.parameters())


def test_a_model_kept_in_main_memory_between_layers(prompt):
    """`accelerate.cpu_offload`: no `hf_device_map`, hooks alone say where the model computes."""
    target = tiny_llama(0)
    draft = perturbed(target, 0.05)
    plain = target.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
    accelerate.cpu_offload(target, torch.device("cpu"))
    assert all(parameter.is_meta for parameter in target.parameters())
    ours = target.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, assistant_model=draft,
                           speculation=CONFIGS["async"])  # fmt: skip
    assert ours.tolist() == plain.tolist()
