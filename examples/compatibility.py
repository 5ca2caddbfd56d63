# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Writes `compatibility.md`: what `generate` promises, feature by feature, run plain, stock assisted and with Saguaro.

Every cell is what happened when this script ran, on tiny random models in float32:

    python examples/compatibility.py [OUTPUT.md]

To add a feature, write a function that takes a way of generating and returns what it is judged by, mark it with
`@feature`, and run the script. It exits with 1 if Saguaro gave anything but plain `generate`'s result or a refusal.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.metadata
import platform
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GenerationConfig, StaticCache
from transformers.utils import logging

import hf_saguaro
from hf_saguaro import SaguaroConfig
from hf_saguaro.compat import CACHE_KEY


VOCAB = 97
SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
COMMON = dict(bos_token_id=1, eos_token_id=None, pad_token_id=0, initializer_range=0.3)
GREEDY = dict(max_new_tokens=24, do_sample=False)
K = 3
SPECULATION = SaguaroConfig(num_assistant_tokens=K, fan_out=2, execution="async", backup="draft")


# Ways to generate


@dataclass
class Way:
    """Plain, stock assisted or Saguaro: what a call adds to `generate`'s arguments."""

    name: str
    drafted: bool = False
    hooks: list[Any] = field(default_factory=list)

    def with_draft(self, draft: Any, speculation: Any = SPECULATION) -> dict[str, Any]:
        if self.name == "plain":
            return {}
        embeddings = [module for module in draft.modules() if isinstance(module, torch.nn.Embedding)]
        self.hooks += [module.register_forward_hook(self._saw_the_draft) for module in embeddings]
        return {"assistant_model": draft, **({"speculation": speculation} if self.name == "Saguaro" else {})}

    def _saw_the_draft(self, *_: Any) -> None:
        self.drafted = True

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()


class Different(Exception):
    """The call went through but did not do what was asked. Its text becomes the cell."""


WAYS = ("plain", "stock assisted", "Saguaro")
FEATURES: dict[str, Callable[[Way], Any]] = {}


def feature(name: str):
    def register(run: Callable[[Way], Any]):
        FEATURES[name] = run
        return run

    return register


# Tiny models


def tiny(kind: str = "llama", seed: int = 0, auto: Any = AutoModelForCausalLM, **fields):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**COMMON, "vocab_size": VOCAB, **fields})
    return settled(auto.from_config(config, attn_implementation=fields.get("attn_implementation")))


def settled(model):
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model.eval()


def close_to(model, scale: float = 0.05):
    """A draft that agrees with `model` nearly always, so that whole blocks are accepted."""
    draft, generator = copy.deepcopy(model), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale * parameter.std())
    # The stock loop cuts blocks short where the draft is unsure, and random weights are.
    draft.generation_config.assistant_confidence_threshold = 0.0
    return draft


def tokenizer(size: int = VOCAB, shift: int = 0):
    """One token a character; with a shift, other ids for the same characters."""
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    characters = [chr(32 + (code + shift) % (size - len(special))) for code in range(size - len(special))]
    words = Tokenizer(models.WordLevel({token: i for i, token in enumerate([*special, *characters])}, "<unk>"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        padding_side="left", clean_up_tokenization_spaces=False,
    )  # fmt: skip


def ids(length: int = 9, rows: int = 1, below: int = VOCAB) -> torch.Tensor:
    return torch.randint(4, below, (rows, length), generator=torch.Generator().manual_seed(3))


TARGET = tiny(**SIZES)
DRAFT = close_to(TARGET)
PROMPT = ids()


def text(way: Way, prompt=PROMPT, target=TARGET, draft=DRAFT, **kwargs) -> Any:
    out = target.generate(prompt, **{**GREEDY, **kwargs}, **way.with_draft(draft))
    return out.tolist()


# Batches and stopping


def ragged() -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[0, :5] = mask[1, :2] = 0
    return ids(rows=3), mask


@feature("batch, left-padded")
def batch(way: Way):
    prompt, mask = ragged()
    return text(way, prompt, attention_mask=mask, eos_token_id=[5, 17, 33])


@feature("`num_return_sequences`")
def return_sequences(way: Way):
    return text(way, do_sample=True, top_k=1, num_return_sequences=3)  # sampling that has no choice


@feature("`stop_strings`")
def stop_strings(way: Way):
    return text(way, stop_strings=[stop()], tokenizer=tokenizer(), suppress_tokens=[0, 1, 2, 3])


def stop() -> str:
    whole = TARGET.generate(PROMPT, **GREEDY, suppress_tokens=[0, 1, 2, 3])
    return tokenizer().decode(whole[0, 14:16])


class StopsAt(transformers.StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 13)


@feature("custom stopping criteria")
def stopping_criteria(way: Way):
    return text(way, stopping_criteria=transformers.StoppingCriteriaList([StopsAt()]))


@feature("`num_assistant_tokens` as an argument")
def num_assistant_tokens(way: Way):
    """With the target as its own draft all is accepted, so the target's passes tell how long the blocks were."""
    target, widths = copy.deepcopy(TARGET), []
    target.get_input_embeddings().register_forward_hook(lambda _, given, __: widths.append(given[0].shape[1]))
    speculated = way.with_draft(close_to(TARGET, 0.0), SaguaroConfig(execution="sync"))
    out = target.generate(PROMPT, max_new_tokens=90, do_sample=False, num_assistant_tokens=4, **speculated)
    drafted = statistics.mode(widths) - 1
    if speculated and drafted != 4:
        raise Different(f"ignored: {drafted} draft tokens in a block instead of 4")
    return out.tolist()


# Caches


@feature("multi-turn cache, full ids")
def chat_full_ids(way: Way):
    cache = DynamicCache(config=TARGET.config)
    first = TARGET.generate(PROMPT, **GREEDY, **{CACHE_KEY: cache}, **way.with_draft(DRAFT))
    return text(way, torch.cat([first, ids(4)], dim=1), **{CACHE_KEY: cache})


@feature("multi-turn cache, new ids")
def chat_new_ids(way: Way):
    cache = DynamicCache(config=TARGET.config)
    first = TARGET.generate(PROMPT, **GREEDY, **{CACHE_KEY: cache}, **way.with_draft(DRAFT))
    whole = torch.cat([first, ids(4)], dim=1)
    held = int(cache.get_seq_length())
    return text(way, whole[:, held:], attention_mask=torch.ones_like(whole), **{CACHE_KEY: cache})


@feature("sliding window, past its window")
def sliding_window(way: Way):
    layers = ["sliding_attention", "full_attention"]
    target = tiny("gemma3_text", **SIZES, head_dim=8, sliding_window=8, layer_types=layers)
    return text(way, target=target, draft=close_to(target))


@feature("static cache, by name")
def static_cache(way: Way):
    return text(way, cache_implementation="static")


@feature("static cache, handed in")
def static_cache_of_the_user(way: Way):
    return text(way, **{CACHE_KEY: StaticCache(config=TARGET.config, max_cache_len=64)})


@feature("quantized cache")
def quantized_cache(way: Way):
    # Of the backends, the one that needs no further package.
    return text(way, cache_implementation="quantized", cache_config={"backend": "fp8"})


@feature("offloaded cache")
def offloaded_cache(way: Way):
    return text(way, cache_implementation="offloaded")


# Processors


@feature("repetition and n-gram penalties, bad words, minimum length")
def processors(way: Way):
    return text(way, repetition_penalty=1.3, no_repeat_ngram_size=3, bad_words_ids=[[5]], min_new_tokens=6,
                eos_token_id=9)  # fmt: skip


class BansWhatItSaw(transformers.LogitsProcessor):
    """Its result depends on how often it was called and on what it was shown."""

    def __init__(self):
        self.prefixes = []

    def __call__(self, input_ids, scores):
        self.prefixes.append(input_ids[0].tolist())
        scores = scores.clone()
        scores[:, [(7 * len(self.prefixes)) % VOCAB, self.prefixes[len(self.prefixes) // 2][-1]]] = -torch.inf
        return scores


@feature("user's processor with a state")
def stateful_processor(way: Way):
    processor = BansWhatItSaw()
    return text(way, logits_processor=transformers.LogitsProcessorList([processor])), processor.prefixes


@feature("user's processor with a state, in a batch")
def stateful_processor_in_a_batch(way: Way):
    processor = BansWhatItSaw()
    prompt, mask = ragged()
    out = text(way, prompt, attention_mask=mask, logits_processor=transformers.LogitsProcessorList([processor]))
    return out, processor.prefixes


@feature("`guidance_scale`")
def guidance(way: Way):
    return text(way, guidance_scale=1.8, negative_prompt_ids=ids(4))


@feature("beams")
def beams(way: Way):
    return text(way, num_beams=3)


# Outputs and streaming


@feature("`output_scores`, `output_logits`")
def scores(way: Way):
    out = TARGET.generate(PROMPT, **GREEDY, output_scores=True, output_logits=True, return_dict_in_generate=True,
                          **way.with_draft(DRAFT))  # fmt: skip
    if len(out.scores) != out.sequences.shape[1] - PROMPT.shape[1]:
        raise Different(f"{len(out.scores)} scores for {out.sequences.shape[1] - PROMPT.shape[1]} tokens")
    return out.sequences.tolist(), torch.stack([*out.scores, *out.logits])


@feature("`output_attentions`")
def attentions(way: Way):
    target = tiny(**SIZES, attn_implementation="eager")
    out = target.generate(PROMPT, **GREEDY, output_attentions=True, return_dict_in_generate=True,
                          **way.with_draft(close_to(target)))  # fmt: skip
    return out.sequences.tolist(), len(out.attentions), out.attentions[-1][-1]


class Puts(transformers.generation.streamers.BaseStreamer):
    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens.extend(value.flatten().tolist())

    def end(self):
        self.tokens.append("end")


@feature("streamer")
def streamer(way: Way):
    puts = Puts()
    return text(way, streamer=puts), puts.tokens


@feature("`TextIteratorStreamer`")
def text_iterator(way: Way):
    pieces = transformers.TextIteratorStreamer(tokenizer(), skip_prompt=True, timeout=60)
    failure = []

    def run():
        try:
            text(way, streamer=pieces)
        except Exception as error:
            failure.append(error)
            pieces.end()

    thread = threading.Thread(target=run)
    thread.start()
    words = "".join(pieces)
    thread.join()
    if failure:
        raise failure[0]
    return words


# Models


@feature("encoder-decoder")
def encoder_decoder(way: Way):
    sizes = dict(d_model=32, d_ff=64, d_kv=8, num_heads=4, num_layers=2, decoder_start_token_id=0)
    target = tiny("t5", auto=transformers.AutoModelForSeq2SeqLM, **sizes)
    return text(way, target=target, draft=close_to(target))


@feature("ALiBi positions (BLOOM)")
def alibi(way: Way):
    target = tiny("bloom", hidden_size=32, n_layer=2, n_head=4)
    return text(way, target=target, draft=close_to(target))


@feature("stateful target (Mamba)")
def stateful_target(way: Way):
    target = tiny("mamba", hidden_size=16, num_hidden_layers=1, state_size=4)
    return text(way, target=target, draft=close_to(target))


@feature("stateful draft (Mamba)")
def stateful_draft(way: Way):
    return text(way, draft=tiny("mamba", hidden_size=16, num_hidden_layers=1, state_size=4))


def llava():
    torch.manual_seed(0)
    language = transformers.LlamaConfig(**COMMON, **SIZES, vocab_size=VOCAB)
    vision = transformers.CLIPVisionConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, image_size=8,
                                           num_attention_heads=2, patch_size=4)  # fmt: skip
    config = transformers.LlavaConfig(vision_config=vision, text_config=language, image_token_index=3, image_token_id=3)
    model = settled(transformers.LlavaForConditionalGeneration(config))
    draft = settled(transformers.LlamaForCausalLM(language))
    draft.model.load_state_dict(model.model.language_model.state_dict())
    draft.lm_head.load_state_dict(model.lm_head.state_dict())
    return model, draft


@feature("vision-language target, text only, text draft")
def vision_text(way: Way):
    target, draft = llava()
    return text(way, target=target, draft=draft)


@feature("vision-language target, with a picture, text draft")
def vision_picture(way: Way):
    target, draft = llava()
    prompt = torch.cat([torch.full((1, 4), 3), PROMPT], dim=1)
    return text(way, prompt, target=target, draft=draft, pixel_values=torch.ones(1, 3, 8, 8))


@feature("padded vocabularies (202 and 201 ids)")
def padded_vocabularies(way: Way):
    target, draft = tiny(**SIZES, vocab_size=202), tiny(**SIZES, vocab_size=201)
    return text(way, ids(below=200), target=target, draft=draft)


@feature("different tokenizers, both given")
def different_tokenizers(way: Way):
    draft = tiny(**SIZES, seed=5, vocab_size=81)
    both = {} if way.name == "plain" else dict(tokenizer=tokenizer(), assistant_tokenizer=tokenizer(81, shift=5))
    return text(way, draft=draft, **both)


# Around it


@feature('`pipeline("text-generation")`')
def pipeline(way: Way):
    pipe = transformers.pipeline("text-generation", model=copy.deepcopy(TARGET), tokenizer=tokenizer(),
                                 **way.with_draft(DRAFT))  # fmt: skip
    return pipe(["ab ba", "once more"], **GREEDY)


@feature("pipeline with `batch_size`")
def batched_pipeline(way: Way):
    pipe = transformers.pipeline("text-generation", model=copy.deepcopy(TARGET), tokenizer=tokenizer(),
                                 **way.with_draft(DRAFT))  # fmt: skip
    return pipe(["ab ba", "once more"], batch_size=2, **GREEDY)


@feature("PEFT target and draft")
def peft(way: Way):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    target = get_peft_model(copy.deepcopy(TARGET), lora).eval()
    return text(way, target=target, draft=get_peft_model(copy.deepcopy(DRAFT), lora).eval())


@feature("`torch.compile`d target")
def compiled(way: Way):
    target = tiny(**{**SIZES, "num_hidden_layers": 1})
    draft = close_to(target)
    target.compile(backend="eager", dynamic=True)
    return text(way, target=target, draft=draft, max_new_tokens=8)


@feature("`torch.inference_mode`")
def inference_mode(way: Way):
    with torch.inference_mode():
        return text(way)


@feature("concurrent calls from threads")
def concurrent(way: Way):
    results: list[Any] = [None] * 3

    def run(index: int):
        try:
            results[index] = text(way, PROMPT + index)
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


@feature("saved and loaded `GenerationConfig`")
def saved_config(way: Way):
    speculated = way.with_draft(DRAFT)
    with tempfile.TemporaryDirectory() as folder:
        speculation = {"speculation": speculated["speculation"]} if "speculation" in speculated else {}
        GenerationConfig(**GREEDY, **speculation, pad_token_id=0).save_pretrained(folder)
        loaded = GenerationConfig.from_pretrained(folder)
    draft = {"assistant_model": DRAFT} if speculated else {}
    out = TARGET.generate(PROMPT, generation_config=loaded, **draft).tolist()
    if speculation and getattr(hf_saguaro.last_stats(TARGET), "new_tokens", None) != GREEDY["max_new_tokens"]:
        raise Different("ran without speculation")
    return out


# What happened


def cell(name: str, run: Callable[[Way], Any], plain: Any) -> tuple[str, Any]:
    """What a feature did in one way, in words, and its result."""
    way = Way(name)
    try:
        result = run(way)
    except Different as difference:
        return str(difference), None
    except (ValueError, NotImplementedError) as refusal:
        by_name = "refused by name" if isinstance(refusal, hf_saguaro.SaguaroError) else "refused"
        return f"{by_name}: {first_sentence(refusal)}", None
    except Exception as error:
        return f"error: {type(error).__name__}: {first_sentence(error)}", None
    finally:
        way.close()
    if name == "plain":
        return "works", result
    if plain is None or not equal(plain, result):
        return difference_of(plain, result), result
    return "identical" if way.drafted else "identical, without asking the draft", result


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and torch.allclose(a, b, atol=1e-4)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def difference_of(plain: Any, result: Any) -> str:
    if plain is None:
        return "works (plain does not)"
    parts = zip(plain, result) if isinstance(plain, tuple) else [(plain, result)]
    first, (a, b) = next((place, pair) for place, pair in enumerate(parts) if not equal(*pair))
    if isinstance(a, torch.Tensor) and a.shape == b.shape:
        return f"same text, record off by up to {float((a - b).abs().max()):.0e}"
    if first:
        return "same text, different record beside it"
    if isinstance(a, list) and isinstance(a[0], list) and len(a) == 1 == len(b) and len(a[0]) != len(b[0]):
        return f"wrong text: {len(b[0])} tokens instead of {len(a[0])}"
    return "wrong text"


def first_sentence(error: BaseException) -> str:
    words = " ".join(str(error).replace("|", "\\|").split())
    sentence = words.split(". ")[0].rstrip(".")
    return sentence if len(sentence) <= 160 else sentence[:157] + "..."


def versions() -> str:
    names = ("transformers", "torch", "peft", "accelerate", "tokenizers")
    found = [f"hf_saguaro {importlib.metadata.version('hf-saguaro')}"]
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join([*found, f"Python {platform.python_version()}", f"{platform.system()} {platform.machine()}"])


HEAD = """# What works with what

Written by `python examples/compatibility.py`; every cell is what happened in that run, on tiny random models in float32.
*identical*: the result of plain `generate`, token for token (scores within 1e-4). Stock assisted is `assistant_model=`
alone, Saguaro the same with `speculation=`.

Run with {versions}.

| feature | plain | stock assisted | Saguaro |
|---|---|---|---|
"""


def main(output: Path) -> int:
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows, broken = [], []
    for name, run in FEATURES.items():
        cells, plain = [], None
        for way in WAYS:
            words, result = cell(way, run, plain)
            cells.append(words)
            if way == "plain":
                plain = result
        if not cells[-1].startswith(("identical", "refused", "works")):
            broken.append(name)
        rows.append(f"| {name} | {' | '.join(cells)} |\n")
        print(rows[-1], end="", flush=True)
    output.write_text(HEAD.format(versions=versions()) + "".join(rows))
    print(f"{output}: {len(rows)} features; Saguaro differs from plain in {broken or 'none'}")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_suffix(".md"))))
