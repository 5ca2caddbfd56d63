# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""The generation mode itself: from what `generate` prepared to what it returns."""

from __future__ import annotations

import os
import time
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .. import compat
from ..config import SaguaroConfig
from ..errors import SaguaroError
from ..stats import SaguaroStats
from .acceptance import CoupledVerification, RejectionVerification
from .decoding import RoundLoop, leave_draft_out
from .draft_worker import DraftWorker
from .drafter import Drafter
from .estimates import estimates_of
from .policy import AUTO_FAN_OUT, Policy
from .processors import DraftProcessors, TargetProcessors
from .prompt import Prompt
from .reencoding import ReencodingSpeculator
from .self_check import check_reads_slots
from .slot_model import SlotModel
from .speculator import Speculator
from .transcript import Transcript
from .validation import check_inputs, same_vocabulary
from .verifier import Verifier


@dataclass
class SaguaroGenerateOutput(GenerateDecoderOnlyOutput):
    """What `generate(..., return_dict_in_generate=True)` returns: the stock fields, and the run's figures.

    Args:
        saguaro (`SaguaroStats`): figures of the run.
    """

    saguaro: SaguaroStats | None = None


_LAST_STATS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def last_stats(model: nn.Module) -> SaguaroStats | None:
    """Figures of the last Saguaro run of `model`, or `None`. A PEFT or compiled wrapper answers for its base."""
    return _LAST_STATS.get(compat.unwrap(model))


def saguaro_decoding(
    self,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer=None,
    assistant_model: nn.Module | None = None,
    tokenizer=None,
    assistant_tokenizer=None,
    **model_kwargs: Any,
) -> SaguaroGenerateOutput | torch.LongTensor:
    """The decoding method that `generate` calls for `speculation=`; the arguments are those of its other modes."""
    began = time.perf_counter()
    config = SaguaroConfig.of(generation_config)
    draft = None if config.execution == "autoregressive" else assistant_model
    tokenizers = (tokenizer, assistant_tokenizer)
    check_inputs(self, generation_config, logits_processor, model_kwargs, synced_gpus)
    sink = None if assistant_model is None else _adapter(config, assistant_model, self, tokenizers)
    check_reads_slots(self)
    prompt = Prompt.of(input_ids, model_kwargs, generation_config)
    returns_dict = generation_config.return_dict_in_generate
    cache = compat.prepared_cache(self, model_kwargs, generation_config)
    # A cache that `generate` made for this call is only filled if the caller gets to see it.
    hands_back = cache is not None and (returns_dict or compat.is_users_cache(cache))

    batch_size = input_ids.shape[0]
    vocab_size = self.config.get_text_config(decoder=True).vocab_size
    pad = generation_config._pad_token_tensor
    transcript = Transcript(
        input_ids,
        stopping_criteria,
        0 if pad is None else int(pad),
        streamer,
        keep_scores=returns_dict and generation_config.output_scores,
        keep_logits=returns_dict and generation_config.output_logits,
    )
    acceptance = _acceptance(config, generation_config, vocab_size)
    # The very last token is emitted and never read.
    last_position = prompt.column_slots.shape[1] + transcript.remaining(0) - 2
    slots = SlotModel(self, batch_size, last_position=last_position)
    if prompt.cached:
        slots.cache.import_columns(cache, prompt.column_slots[:, : prompt.cached])
    if slots.kinds.shortest_span <= last_position + 1:
        prompt.refuse_holes()
    verifier = Verifier(
        slots, acceptance, TargetProcessors(logits_processor, batch_size), transcript, prompt,
        shows_scores=config.adaptation is not None or bool(returns_dict and (generation_config.output_scores or generation_config.output_logits)),
    )  # fmt: skip

    stats = _LAST_STATS[compat.unwrap(self)] = SaguaroStats()
    shared = _cores() if draft is not None and _both_on_cpu(self, draft) else None
    policy = Policy(config, estimates_of(self, draft, batch_size), _can_overlap(self, draft), shared)
    speculator, worker = None, None
    if draft is not None:
        devices = [compat.execution_device(model) for model in (self, draft)]
        worker = DraftWorker(_draft_threads(self, draft), devices) if policy.may_overlap else None
        try:
            speculator = _speculator(
                self, draft, config, policy, acceptance, logits_processor, prompt, transcript, tokenizers, last_position
            )
        except Exception as error:
            leave_draft_out(stats, error)
    temperature = generation_config.temperature if generation_config.do_sample else 0.0
    loop = RoundLoop(verifier, speculator, policy, transcript, stats, worker, sink, temperature)
    try:
        loop.run()
    finally:
        loop.close()

    stats.new_tokens = transcript.new_tokens
    # Without what rows had ahead of the batch's end. A row's first token comes with the prefill.
    stats.tokens_in_rounds = stats.new_tokens - batch_size
    stats.close(time.perf_counter() - began)
    transcript.end()
    if hands_back:
        slots.cache.export_columns(cache, _new_columns(prompt, transcript))
    slots.close()
    if loop.speculator is not None:
        loop.speculator.close()
    if not returns_dict:
        return transcript.sequences()
    return SaguaroGenerateOutput(
        sequences=transcript.sequences(),
        scores=transcript.scores(),
        logits=transcript.logits(),
        saguaro=stats,
        **{compat.CACHE_KEY: cache},
    )


def _speculator(target, draft, config, policy, acceptance, processors, prompt, transcript, tokenizers, last_position):
    batch_size, device = transcript.batch_size, transcript.prompts.device
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    if not same_vocabulary(target, draft, tokenizers):
        return ReencodingSpeculator(draft, *tokenizers, policy, transcript.prefix, batch_size, device, vocab_size)
    slots = SlotModel(draft, batch_size, config.compile is True, last_position)
    drafter = Drafter(
        slots,
        acceptance,
        DraftProcessors(processors, config.draft_temperature, batch_size, slots.device),
        prompt,
        vocab_size,
        transcript.prompts,
    )
    return Speculator(drafter, policy, device)


def _acceptance(config: SaguaroConfig, generation_config: GenerationConfig, vocab_size: int):
    if not generation_config.do_sample:
        return CoupledVerification(None, vocab_size)
    # One draw from the global generator: `set_seed` makes a run repeatable, and the generator moves on between runs.
    seed = int(torch.randint(1 << 62, ())) if config.seed is None else config.seed
    if config.verification == "coupled":
        return CoupledVerification(seed, vocab_size)
    forks = config.fan_out
    if isinstance(forks, list):
        forks = max(1, sum(forks) // len(forks))
    return RejectionVerification(seed, vocab_size, config.cache_bias, AUTO_FAN_OUT if forks == "auto" else forks)


def _new_columns(prompt: Prompt, transcript: Transcript) -> torch.Tensor:
    """Slots of the columns that plain `generate` would have added to a cache: all but the last token's. `[B, n]`."""
    given = prompt.column_slots
    count = transcript.new_length - 1
    ahead = torch.arange(1, count + 1, device=given.device)
    lengths = torch.tensor(prompt.lengths, device=given.device)[:, None]
    emitted = torch.tensor([len(tokens) for tokens in transcript.generated], device=given.device)[:, None]
    generated = (lengths + ahead).where(ahead < emitted, 0)
    return torch.cat([given[:, prompt.cached :], generated], dim=1)


def _can_overlap(target: nn.Module, draft: nn.Module | None) -> bool:
    """Whether the draft finds hardware to run on while the target runs."""
    if draft is None:
        return False
    return not _both_on_cpu(target, draft) or torch.get_num_threads() > 1


def _draft_threads(target: nn.Module, draft: nn.Module) -> int | None:
    return max(1, torch.get_num_threads() // 4) if _both_on_cpu(target, draft) else None


def _cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _both_on_cpu(target: nn.Module, draft: nn.Module) -> bool:
    return all(compat.execution_device(model).type == "cpu" for model in (target, draft))


def _adapter(config: SaguaroConfig, draft: nn.Module, target: nn.Module, tokenizers: tuple[Any, Any]):
    if config.adaptation is None:
        return None
    from .. import adaptation  # peft is optional: only who adapts needs it

    records = isinstance(config.adaptation, adaptation.FeedbackRecorder)
    if not records and not same_vocabulary(target, draft, tokenizers):
        raise SaguaroError(
            "`adaptation` teaches the draft the target's token ids, which mean other text to a draft with another tokenizer. "
            "Leave it out, or use a draft with the target's tokenizer."
        )
    adapter = adaptation.resolve(config.adaptation, draft)
    adapter.attach(target)
    return adapter
