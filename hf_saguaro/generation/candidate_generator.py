# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""The same drafter and worker behind Transformers' own `CandidateGenerator` interface."""

from __future__ import annotations

import weakref
from concurrent.futures import CancelledError, Future

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.candidate_generator import CandidateGenerator

from .. import compat
from ..config import SaguaroConfig
from .acceptance import CoupledVerification, Proposal, RejectionVerification
from .draft_worker import DraftWorker
from .drafter import Drafter
from .estimates import Estimates
from .policy import Policy
from .processors import DraftProcessors
from .prompt import Prompt
from .slot_model import SlotModel
from .speculation_cache import Outcome
from .speculator import Speculator
from .validation import check_draft


class SaguaroCandidateGenerator(CandidateGenerator):
    """Proposes for the stock assisted loop: while that loop verifies, the draft prepares the likely outcomes.

    The stock loop verifies by rejection sampling, so sampled candidates come with the scores they were drawn from. It
    runs one sequence. Exceptions of the draft reach the caller, as they do with any stock candidate generator.

    Args:
        assistant_model (`PreTrainedModel`): the draft, decoder-only.
        generation_config (`GenerationConfig`): of the target's run; says whether to sample.
        logits_processor (`LogitsProcessorList`, *optional*): the target's; the draft works with copies of the stock ones.
        config (`SaguaroConfig`, *optional*): K, fan-out and backup are used.
        vocab_size (`int`, *optional*): the target's, if it differs from the draft's.
    """

    def __init__(self, assistant_model: nn.Module, generation_config: GenerationConfig,
                 logits_processor: LogitsProcessorList | None = None, config: SaguaroConfig | None = None,
                 vocab_size: int | None = None):  # fmt: skip
        config = config or SaguaroConfig()
        check_draft(assistant_model)
        self._draft, self._processors = assistant_model, logits_processor or LogitsProcessorList()
        self._vocab_size = vocab_size or assistant_model.config.get_text_config(decoder=True).vocab_size
        seed = int(torch.randint(1 << 62, ())) if config.seed is None else config.seed
        if generation_config.do_sample:
            self._acceptance = RejectionVerification(seed, self._vocab_size)
        else:
            self._acceptance = CoupledVerification(None, self._vocab_size)
        self._temperature = config.draft_temperature
        # The stock loop keeps its timings to itself, so there is nothing for the policy to weigh: every round overlaps.
        fixed = {**config.to_dict(), "adaptation": None, "execution": "async"}
        self._policy = Policy(SaguaroConfig(**fixed), Estimates(), can_overlap=True)
        self._max_length = generation_config.max_length
        self._worker = DraftWorker(None, [compat.execution_device(assistant_model)])
        self._closer = weakref.finalize(self, self._worker.close)
        self._speculator: Speculator | None = None
        self._proposal: Proposal | None = None
        self._pending: tuple[Future, Future] | None = None
        self._length = 0

    def get_candidates(self, input_ids: torch.LongTensor, *args, **kwargs):
        """The text with draft tokens behind it.

        Args:
            input_ids (`Tensor` of shape `[1, L]`)

        Returns:
            `Tensor` of shape `[1, L + k]` and the draft's scores `[1, k, V]` (`None` when greedy).
        """
        if self._speculator is None:
            self._proposal = self._begin(input_ids)
        else:
            verdict, prepared = self._pending
            new = input_ids[0, self._length :].tolist()
            verdict.set_result(Outcome([0], {0: new}, self._room(input_ids)))
            self._proposal = prepared.result()
        self._length = input_ids.shape[1]
        plan = self._policy.plan([0], self._room(input_ids))
        verdict = Future()
        prepared = self._worker.submit(self._speculator.prepare, self._proposal, plan, verdict)
        self._pending = verdict, prepared
        # The generator may be dropped while the draft waits for a verdict that will not come.
        self._closer.detach()
        self._closer = weakref.finalize(self, _end, self._worker, verdict)
        tokens = self._proposal.tokens[:, : self._proposal.lengths[0]].to(input_ids.device)
        scores = self._proposal.scores
        return torch.cat([input_ids, tokens], dim=1), None if scores is None else scores.to(input_ids.device)

    def update_candidate_strategy(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, num_matches: int
    ) -> None:
        """Nothing to update: the next `get_candidates` sees in the ids what became of the proposal."""

    def close(self) -> None:
        """Ends the draft's thread. Dropping the generator does the same."""
        self._closer()

    def _begin(self, input_ids: torch.Tensor) -> Proposal:
        prompt = Prompt.of(input_ids, {}, GenerationConfig())
        slots = SlotModel(self._draft, 1)
        processors = DraftProcessors(self._processors, self._temperature, 1, slots.device)
        drafter = Drafter(slots, self._acceptance, processors, prompt, self._vocab_size, input_ids)
        self._speculator = Speculator(drafter, self._policy, input_ids.device)
        self._worker.submit(drafter.prefill).result()
        return self._worker.submit(self._speculator.open, self._policy.plan([0], self._room(input_ids))).result()

    def _room(self, input_ids: torch.Tensor) -> int:
        return (self._max_length or 1 << 30) - input_ids.shape[1]


def _end(worker: DraftWorker, verdict: Future) -> None:
    if not verdict.done():
        verdict.set_exception(CancelledError())
    worker.close()
