# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Logits processors on both sides of speculation.

The target calls every processor as plain `generate` does. Stock processors that look at one row of scores and nothing
else are applied to a whole block at once; those that look at the text before it, too, position by position, as if all that
was proposed were accepted. Where a processor remembers its calls, each must see a true prefix, so the block is walked
only as far as tokens are accepted; with code of the user's among them, all rows of a batch are walked in step, since that
code may count its calls or look across rows. The draft works with copies of the stock ones, once each (Transformers' own
assisted generation warps the draft twice).
"""

from __future__ import annotations

import copy

import torch
from torch.utils._pytree import tree_map_only
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper
from transformers.generation import logits_process as stock


def _stock(*names: str) -> tuple[type, ...]:
    """Stock processors by name: not every supported Transformers version has all of them."""
    return tuple(getattr(stock, name) for name in names if hasattr(stock, name))


# Functions of one row of scores alone.
_ROW_WISE = _stock(
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TopHLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "LogitNormalization",
    "InfNanRemoveLogitsProcessor",
    "SuppressTokensLogitsProcessor",
)
# Functions of one row of scores and the text before it.
_TEXT_WISE = _stock(
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "ExponentialDecayLengthPenalty",
    "SuppressTokensAtBeginLogitsProcessor",
)


# What a verification kernel does itself, in this order: its arguments, and the processors that they stand for.
_FILTERS = (
    ("temperature", TemperatureLogitsWarper),
    ("top_k", stock.TopKLogitsWarper),
    ("top_p", stock.TopPLogitsWarper),
    ("min_p", stock.MinPLogitsWarper),
)


def is_row_wise(processor: LogitsProcessor) -> bool:
    return type(processor) in _ROW_WISE


def is_stock(processor: LogitsProcessor) -> bool:
    return type(processor).__module__.startswith("transformers.")


class TargetProcessors:
    """The target's processors, callable for a block or for one position of one row.

    Args:
        processors (`LogitsProcessorList`): as `generate` prepared them.
        batch_size (`int`): rows; with several, a stock processor that knows rows by their index is bound to its row.

    Attributes:
        row_wise (`bool`): a whole block can be processed at once.
        may_suppose (`bool`): they may be asked about a text that is only proposed.
        filters (`dict[str, float]` or `None`): all of them as arguments of a verification kernel, where nothing else is
            among them.
        in_step (`bool`): all rows must be processed together, at the same step of the text.
    """

    def __init__(self, processors: LogitsProcessorList, batch_size: int):
        self.row_wise = all(is_row_wise(processor) for processor in processors)
        self.may_suppose = all(type(processor) in _ROW_WISE + _TEXT_WISE for processor in processors)
        self.filters = _filters(processors)
        self.in_step = batch_size > 1 and any(_is_users_code(processor) for processor in processors)
        self._processors = processors
        self._of_row = [processors] * batch_size
        if batch_size > 1 and not self.row_wise and not self.in_step:
            self._of_row = [
                LogitsProcessorList(_bound_to_row(p, row, batch_size) for p in processors) for row in range(batch_size)
            ]

    def block(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """`[B, n, V]` -> `[B, n, V]`, where all processors are row-wise."""
        if not self._processors:
            return logits
        return _process_rows(self._processors, ids, logits.flatten(0, 1)).view_as(logits)

    def position(self, rows: list[int], prefix: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Scores of one position of one row, or of all rows together: `[R, L]` and `[R, V]` -> `[R, V]`."""
        return (self._processors if self.in_step else self._of_row[rows[0]])(prefix, logits)


class DraftProcessors:
    """Copies of the stock processors for the draft. The user's own are left out: their state belongs to the target.

    Args:
        processors (`LogitsProcessorList`): the target's.
        temperature (`float`, *optional*): replaces the target's temperature.
        batch_size (`int`): rows.
        device (`torch.device`): where the draft's scores are.
    """

    def __init__(
        self, processors: LogitsProcessorList, temperature: float | None, batch_size: int, device: torch.device
    ):
        kept = [
            _copied_to(device, p) for p in processors if not _is_users_code(p) and not _stays_with_target(p, device)
        ]
        if temperature is not None:
            kept = [p for p in kept if not isinstance(p, TemperatureLogitsWarper)]
            kept.insert(0, TemperatureLogitsWarper(float(temperature)))
        self.row_wise = all(map(is_row_wise, kept))
        self._processors = LogitsProcessorList(kept)
        self._of_row = [
            LogitsProcessorList(_bound_to_row(p, row, batch_size) for p in kept) for row in range(batch_size)
        ]

    def __call__(self, scores: torch.Tensor, rows: list[int], prefix) -> torch.Tensor:
        """Scores of `R` hypothetical positions.

        Args:
            scores (`Tensor` of shape `[R, V]`, float32).
            rows (`list[int]`): the batch row of each.
            prefix (`Callable[[int], Tensor]`): index into `R` -> its ids, `[1, L]`; only called when needed.
        """
        if not self._processors:
            return scores
        if self.row_wise:
            return _process_rows(self._processors, None, scores)
        return torch.cat([self._of_row[row](prefix(i), scores[i : i + 1]) for i, row in enumerate(rows)])


def _filters(processors: LogitsProcessorList) -> dict[str, float] | None:
    filters, later = {}, iter(_FILTERS)
    for processor in processors:
        name = next((name for name, kind in later if type(processor) is kind), None)
        changed = getattr(processor, "filter_value", -torch.inf) != -torch.inf
        if name is None or changed or getattr(processor, "min_tokens_to_keep", 1) != 1:
            return None
        filters[name] = getattr(processor, name)
    return filters


def _process_rows(processors: LogitsProcessorList, ids: torch.Tensor | None, scores: torch.Tensor) -> torch.Tensor:
    """Row-wise processors on `[R, V]`.

    Where a top-k filter comes before top-p and min-p, those are given what it kept: they sort k numbers a row, not V. On
    another device the look for ties would be one more read by the host, so all is left as it is.
    """
    for index, processor in enumerate(processors):
        if scores.device.type == "cpu" and _narrows_first(processors[index:]):
            processed = _process_narrowed(processor, LogitsProcessorList(processors[index + 1 :]), ids, scores)
            if processed is not None:
                return processed
        scores = processor(ids, scores)
    return scores


def _narrows_first(chain: list[LogitsProcessor]) -> bool:
    """Whether a top-k filter begins the chain, and the others take no notice of what it removes."""
    return (
        type(chain[0]) is stock.TopKLogitsWarper
        and len(chain) > 1
        and all(type(processor) in (stock.TopPLogitsWarper, stock.MinPLogitsWarper) for processor in chain[1:])
        and all(processor.filter_value == -torch.inf for processor in chain)
    )


def _process_narrowed(top_k: stock.TopKLogitsWarper, others: LogitsProcessorList, ids: torch.Tensor | None,
                      scores: torch.Tensor) -> torch.Tensor | None:  # fmt: skip
    """What the chain leaves of `[R, V]`; `None` where equal scores lie on both sides of a cut.

    A top-k filter keeps all that tie for the k-th place, and which of equal scores top-p removes is up to its sort.
    """
    count = top_k.top_k
    if count >= scores.shape[1]:
        return None
    values, tokens = scores.topk(count + 1)
    values, tokens, next_value = values[:, :count], tokens[:, :count], values[:, count]
    processed = others(ids, values)
    removed = processed == -torch.inf
    lowest_kept = values.masked_fill(removed, torch.inf).amin(dim=1)
    highest_removed = values.masked_fill(~removed, -torch.inf).amax(dim=1)
    if not bool(((values[:, -1] > next_value) & (lowest_kept > highest_removed)).all()):
        return None
    return torch.full_like(scores, -torch.inf).scatter_(1, tokens, processed)


def _is_users_code(processor: LogitsProcessor) -> bool:
    return not is_stock(processor) or isinstance(processor, stock.PrefixConstrainedLogitsProcessor)


def _stays_with_target(processor: LogitsProcessor, draft: torch.device) -> bool:
    """Whether a stock processor cannot be copied for the draft: what it does hangs on every call so far, or on random
    numbers of the target's device."""
    generators = [value for value in vars(processor).values() if isinstance(value, torch.Generator)]
    return hasattr(processor, "state") or any(generator.device != draft for generator in generators)


def _copied_to(device: torch.device, processor: LogitsProcessor) -> LogitsProcessor:
    copied = copy.deepcopy(processor)
    vars(copied).update(tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), vars(copied)))
    return copied


def _bound_to_row(processor: LogitsProcessor, row: int, batch_size: int) -> LogitsProcessor:
    """A stock processor that works on row `row` alone as it would on that row of the batch."""
    bound = copy.deepcopy(processor) if hasattr(processor, "state") else copy.copy(processor)
    for name in ("encoder_input_ids", "prompt_ignore_length"):  # one entry a prompt
        value = getattr(processor, name, None)
        if isinstance(value, torch.Tensor):
            prompt = row * value.shape[0] // batch_size
            setattr(bound, name, value[prompt : prompt + 1])
    if isinstance(processor, stock.EncoderNoRepeatNGramLogitsProcessor):
        prompt = row * processor.batch_size // batch_size
        bound.generated_ngrams, bound.batch_size = processor.generated_ngrams[prompt : prompt + 1], 1
    return bound
