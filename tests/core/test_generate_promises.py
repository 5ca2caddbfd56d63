# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Everything `generate` promises: each against plain `generate` on the same inputs."""

from __future__ import annotations

import asyncio
import copy
import threading

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

import hf_saguaro
from hf_saguaro import SaguaroConfig, compat
from hf_saguaro.generation import draft_worker

from ..conftest import VOCAB, perturbed, tiny_llama


K = 3
CONFIGS = {
    "async": SaguaroConfig(num_assistant_tokens=K, fan_out=2, execution="async", backup="draft"),
    "sync": SaguaroConfig(num_assistant_tokens=K, execution="sync"),
    "auto": SaguaroConfig(),
}


@pytest.fixture(params=CONFIGS)
def both(request, target, drafts):
    """Runs a call twice, plain and speculated, and returns both results."""

    def run(ids, draft=None, model=target, make=dict, **kwargs):
        kwargs = {"max_new_tokens": 24, "do_sample": False, **kwargs}
        plain = model.generate(ids, **kwargs, **make())
        ours = model.generate(
            ids, assistant_model=draft or drafts["good"], speculation=CONFIGS[request.param], **kwargs, **make()
        )
        return plain, ours

    return run


def ragged(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.randint(2, VOCAB, (length,), generator=generator)
        mask[row, width - length :] = 1
    return ids, mask


def same(plain, ours):
    assert ours.tolist() == plain.tolist()


# Batches


@pytest.mark.parametrize("lengths", [(5, 5), (4, 9, 6), (1, 12, 3, 8, 2, 7, 5, 4)])
@pytest.mark.parametrize("eos", [None, [5, 17, 33, 60, 71]])
def test_ragged_batches_with_rows_that_end_apart(both, lengths, eos):
    ids, mask = ragged(lengths)
    same(*both(ids, attention_mask=mask, **({"eos_token_id": eos} if eos else {})))


def test_a_batch_of_sixteen(both):
    ids, mask = ragged([3 + row % 5 for row in range(16)])
    same(*both(ids, attention_mask=mask, eos_token_id=[5, 17, 33]))


def test_a_rows_text_does_not_depend_on_its_neighbours(target, drafts):
    ids, mask = ragged((4, 9, 6))
    config = SaguaroConfig(num_assistant_tokens=K, execution="async", seed=4)
    kwargs = dict(max_new_tokens=20, do_sample=True, top_k=0, assistant_model=drafts["fair"], speculation=config)
    together = target.generate(ids, attention_mask=mask, **kwargs)
    alone = target.generate(ids[:1, 5:], **kwargs)
    assert together[0, 9:].tolist() == alone[0, 4:].tolist()
    assert together[0, 9:].tolist() != together[1, 9:].tolist()


def test_return_sequences_differ_and_each_is_exact(target, drafts, prompt):
    def sample(draft, **fields):
        return target.generate(prompt, max_new_tokens=16, do_sample=True, num_return_sequences=3, assistant_model=draft,
                               speculation=SaguaroConfig(seed=2, **fields))  # fmt: skip

    out = sample(drafts["good"], num_assistant_tokens=K, execution="async")
    assert out.tolist() == sample(None, execution="autoregressive").tolist()
    assert len({tuple(row) for row in out.tolist()}) == 3


def test_a_finished_row_costs_no_draft_work(target, drafts, monkeypatch):
    from hf_saguaro.generation.slot_model import SlotModel

    seen, stock = [], SlotModel._call

    def spy(self, tokens, *args):
        if self.model is drafts["good"]:
            seen.append(tokens.shape[0])
        return stock(self, tokens, *args)

    monkeypatch.setattr(SlotModel, "_call", spy)
    ids, mask = ragged((5, 6))
    plain = target.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False)
    ending = int(plain[0, 6 + 4])
    assert ending not in plain[1, 6:].tolist()
    out = target.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False, eos_token_id=ending,
                          assistant_model=drafts["good"], speculation=CONFIGS["async"])  # fmt: skip
    assert out[1].tolist() == plain[1].tolist() and seen[-1] == 1


# Stopping


@pytest.mark.parametrize("as_what", [int, list, torch.tensor])
@pytest.mark.parametrize("place", range(1, 9))
def test_eos_at_every_place_of_a_block(both, target, prompt, place, as_what):
    token = int(target.generate(prompt, max_new_tokens=place, do_sample=False)[0, -1])
    eos = as_what([token]) if as_what is not int else token
    plain, ours = both(prompt, eos_token_id=eos)
    same(plain, ours)


def test_eos_from_the_models_generation_config(both, target, prompt):
    model = copy.deepcopy(target)
    model.generation_config.eos_token_id = [int(target.generate(prompt, max_new_tokens=7, do_sample=False)[0, -1]), 96]
    same(*both(prompt, model=model))


@pytest.mark.parametrize(
    "limit", [{"max_new_tokens": n} for n in range(1, K + 3)] + [{"max_length": 20, "max_new_tokens": None}]
)
def test_length_limits(both, prompt, limit):
    same(*both(prompt, **limit))


def test_min_new_tokens(both, target, prompt):
    eos = target.generate(prompt, max_new_tokens=4, do_sample=False)[0, 9:].tolist()
    same(*both(prompt, eos_token_id=eos, min_new_tokens=8))


class StopsAt(StoppingCriteria):
    """Stops a row at its n-th token and remembers every length it was asked about."""

    def __init__(self, length):
        self.length, self.asked = length, []

    def __call__(self, input_ids, scores, **kwargs):
        self.asked.append(input_ids.shape[1])
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


@pytest.mark.parametrize("length", range(11, 18))
def test_a_users_stopping_criteria_cuts_where_plain_generate_stops(both, prompt, length):
    made = []

    def make():
        made.append(StopsAt(length))
        return {"stopping_criteria": StoppingCriteriaList([made[-1]])}

    same(*both(prompt, make=make))
    assert made[0].asked == made[1].asked


class StopsOnToken(StoppingCriteria):
    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


@pytest.mark.parametrize("eos", [None, 96])
def test_a_users_criteria_stops_rows_apart(both, target, eos):
    ids, mask = ragged((5, 8, 6))
    plain = target.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False)
    criteria = StoppingCriteriaList([StopsOnToken(int(plain[1, 8 + 5]))])
    extra = {} if eos is None else {"eos_token_id": eos}
    same(*both(ids, attention_mask=mask, stopping_criteria=criteria, **extra))


class StopsAtAQuorum(StoppingCriteria):
    """Ends every row once `count` of them have shown an even token in the last two; counts its calls."""

    def __init__(self, count):
        self.count, self.asked = count, []

    def __call__(self, input_ids, scores, **kwargs):
        self.asked.append(input_ids.view(-1).tolist())  # contiguous, as plain `generate` gives it
        votes = (input_ids[:, -2:] % 2 == 0).any(dim=1)
        return (votes.sum() >= self.count).expand(len(votes)) if len(self.asked) > 3 else torch.zeros_like(votes)


@pytest.mark.parametrize("eos", [None, 96, 26])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_users_criteria_sees_the_whole_batch(both, target, eos, count):
    ids, mask = ragged((5, 8, 6, 7))
    made = []

    def make():
        made.append(StopsAtAQuorum(count))
        return {"stopping_criteria": StoppingCriteriaList([made[-1]])}

    extra = {} if eos is None else {"eos_token_id": eos}
    plain, ours = both(ids, attention_mask=mask, make=make, **extra)
    same(plain, ours)
    assert made[0].asked == made[1].asked
    stats = hf_saguaro.last_stats(target)
    assert stats.tokens_in_rounds == stats.new_tokens - len(ids)


def test_max_time_stops(target, drafts, prompt):
    out = target.generate(prompt, max_new_tokens=900, max_time=0.3, do_sample=False, assistant_model=drafts["good"],
                          speculation="saguaro")  # fmt: skip
    assert 9 < out.shape[1] < 909


# Processors


class Recorder(LogitsProcessor):
    """A user's processor with a state: it bans the token that it saw chosen three steps ago."""

    def __init__(self):
        self.prefixes = []

    def __call__(self, input_ids, scores):
        self.prefixes.append(input_ids[0].tolist())
        scores = scores.clone()
        scores[:, (7 * len(self.prefixes)) % VOCAB] = -torch.inf
        if len(self.prefixes) > 3:
            scores[0, self.prefixes[-3][-1]] = -torch.inf
        return scores


def test_a_users_processor_sees_true_prefixes_once_each_and_in_order(both, prompt):
    made = []

    def make():
        made.append(Recorder())
        return {"logits_processor": LogitsProcessorList([made[-1]])}

    same(*both(prompt, make=make))
    assert made[0].prefixes == made[1].prefixes


class Crowd(LogitsProcessor):
    """A user's processor that looks across the batch and counts: no row may repeat what another wrote a step before."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids.tolist())
        scores = scores.clone()
        scores[:, (11 * len(self.seen)) % VOCAB] = -torch.inf
        scores[:, input_ids[:, -1]] -= 3.0
        return scores


@pytest.mark.parametrize("with_criteria", [False, True])
@pytest.mark.parametrize("eos", [None, [5, 17, 33, 60]])
def test_a_users_processor_sees_a_batch_as_plain_generate_shows_it(both, eos, with_criteria):
    ids, mask = ragged((5, 8, 6, 7))
    made = []

    def make():
        made.append((Crowd(), StopsAtAQuorum(2)))
        kwargs = {"logits_processor": LogitsProcessorList([made[-1][0]])}
        return kwargs | ({"stopping_criteria": StoppingCriteriaList([made[-1][1]])} if with_criteria else {})

    same(*both(ids, attention_mask=mask, make=make, repetition_penalty=1.2, **({"eos_token_id": eos} if eos else {})))
    assert made[0][0].seen == made[1][0].seen
    assert made[0][1].asked == made[1][1].asked


def test_allowed_tokens_of_a_batch_are_asked_for_in_plain_order(both):
    ids, mask = ragged((5, 8, 6))
    asked = []

    def make():
        asked.append([])

        def allowed(row, tokens):
            asked[-1].append((row, tokens.tolist()))
            return [token for token in range(VOCAB) if token % 4 != (row + len(asked[-1])) % 4]

        return {"prefix_allowed_tokens_fn": allowed}

    same(*both(ids, attention_mask=mask, make=make, eos_token_id=[5, 17, 33]))
    assert asked[0] == asked[1]


def test_rows_held_in_step_sample_what_they_sample_without_a_draft(target, drafts):
    ids, mask = ragged((5, 8, 6))

    def sample(draft, execution):
        config = SaguaroConfig(num_assistant_tokens=K, execution=execution, seed=3)
        return target.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=True, top_k=20, speculation=config,
                               logits_processor=LogitsProcessorList([Crowd()]), assistant_model=draft).tolist()  # fmt: skip

    assert sample(drafts["good"], "async") == sample(drafts["good"], "sync") == sample(None, "autoregressive")


def test_rows_held_in_step_go_on_drafting_from_their_text(target):
    class Contradicts(LogitsProcessor):
        """Takes from the first row, at every second step, the token that the target would write."""

        def __init__(self):
            self.calls = 0

        def __call__(self, input_ids, scores):
            self.calls += 1
            scores = scores.clone()
            if self.calls % 2 == 0:
                scores[0, scores[0].argmax()] = -torch.inf
            return scores

    ids, mask = ragged((5, 8, 6))
    target.generate(ids, attention_mask=mask, max_new_tokens=22, do_sample=False, assistant_model=target,
                    logits_processor=LogitsProcessorList([Contradicts()]), speculation=CONFIGS["sync"])  # fmt: skip
    # A round of one token, nine of two, a last one with room for a chain of one. The others' chains are right throughout.
    assert hf_saguaro.last_stats(target).accepted_by_depth[:3] == [1, 2 + 9 + 3, 2 * 9]


PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 1.4},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[5], [6, 7]]},
    "sequence_bias": {"sequence_bias": [[[8], 4.0], [[9, 10], -3.0]]},
    "forced_eos": {"forced_eos_token_id": 4, "eos_token_id": 4},
    "suppress": {"suppress_tokens": [11, 12], "begin_suppress_tokens": [13]},
    "encoder": {"encoder_repetition_penalty": 1.3, "encoder_no_repeat_ngram_size": 2},
    "min_length": {"min_length": 20, "eos_token_id": 5},
    "decay": {"exponential_decay_length_penalty": (4, 1.2), "eos_token_id": 5},
    "renormalize": {"renormalize_logits": True, "remove_invalid_values": True},
    "all": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "bad_words_ids": [[5]], "min_new_tokens": 6,
            "eos_token_id": 9, "suppress_tokens": [11]},
}  # fmt: skip


@pytest.mark.parametrize("name", PROCESSORS)
def test_stock_processors(both, prompt, name):
    same(*both(prompt, **PROCESSORS[name]))
    ids, mask = ragged((4, 7))
    same(*both(ids, attention_mask=mask, max_new_tokens=14, **PROCESSORS[name]))


def test_prefix_allowed_tokens_know_their_row(both):
    ids, mask = ragged((4, 7))
    same(*both(ids, attention_mask=mask, max_new_tokens=12,
               prefix_allowed_tokens_fn=lambda batch_id, ids: list(range(2 + 40 * batch_id, 42 + 40 * batch_id))))  # fmt: skip


# Caches


def test_five_turns_of_chat_equal_a_fresh_run(both, target, drafts, prompt, request):
    config = CONFIGS[request.node.callspec.params["both"]]
    ids, cache = prompt, DynamicCache(config=target.config)
    for turn in range(5):
        out = target.generate(ids, max_new_tokens=7, do_sample=False, assistant_model=drafts["good"], speculation=config,
                              **{compat.CACHE_KEY: cache})  # fmt: skip
        assert out.tolist() == target.generate(ids, max_new_tokens=7, do_sample=False).tolist()
        assert cache.get_seq_length() == out.shape[1] - 1
        ids = torch.cat([out, torch.randint(2, VOCAB, (1, 3), generator=torch.Generator().manual_seed(turn))], dim=1)
    # and plain generate goes on from what was handed back
    plain = target.generate(ids, max_new_tokens=7, do_sample=False, **{compat.CACHE_KEY: cache})
    assert plain.tolist() == target.generate(ids, max_new_tokens=7, do_sample=False).tolist()


def test_only_the_new_ids_with_the_full_mask(target, drafts, prompt):
    first = target.generate(prompt, max_new_tokens=6, do_sample=False)
    whole = torch.cat([first, torch.tensor([[7, 8]])], dim=1)
    cache = DynamicCache(config=target.config)
    target.generate(prompt, max_new_tokens=6, do_sample=False, assistant_model=drafts["good"], speculation="saguaro",
                    **{compat.CACHE_KEY: cache})  # fmt: skip
    new = whole[:, cache.get_seq_length() :]
    out = target.generate(new, attention_mask=torch.ones_like(whole), max_new_tokens=8, do_sample=False,
                          assistant_model=drafts["good"], speculation=CONFIGS["async"], **{compat.CACHE_KEY: cache})  # fmt: skip
    expected = target.generate(whole, max_new_tokens=8, do_sample=False)
    assert out[0, new.shape[1] :].tolist() == expected[0, whole.shape[1] :].tolist()


def test_a_ragged_batch_hands_its_cache_back(target, drafts):
    ids, mask = ragged((4, 7))
    ours = target.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, return_dict_in_generate=True,
                           assistant_model=drafts["good"], speculation=CONFIGS["async"])  # fmt: skip
    plain = target.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
    theirs, mine = getattr(plain, compat.CACHE_KEY), getattr(ours, compat.CACHE_KEY)
    assert type(theirs) is type(mine) and mine.get_seq_length() == theirs.get_seq_length()
    real = torch.cat([mask, torch.ones(2, 5, dtype=torch.long)], dim=1).bool()
    for a, b in zip(theirs.layers, mine.layers):
        for x, y in ((a.keys, b.keys), (a.values, b.values)):
            assert torch.allclose(x.transpose(1, 2)[real], y.transpose(1, 2)[real], atol=1e-5)


def test_a_static_cache_asked_for_by_name_or_handed_in(both, target, drafts, prompt):
    same(*both(prompt, cache_implementation="static"))
    made = []

    def make():
        made.append(StaticCache(config=target.config, max_cache_len=64))
        return {compat.CACHE_KEY: made[-1]}

    same(*both(prompt, make=make))
    assert int(made[0].get_seq_length()) == int(made[1].get_seq_length())


def test_a_users_cache_is_untouched_when_the_call_fails(target, drafts, prompt, monkeypatch):
    from hf_saguaro.generation.verifier import Verifier

    cache = DynamicCache(config=target.config)
    target.generate(prompt, max_new_tokens=4, do_sample=False, **{compat.CACHE_KEY: cache})
    before = [layer.keys.clone() for layer in cache.layers]

    def failing(self, *args):
        raise RuntimeError("no memory")

    monkeypatch.setattr(Verifier, "forward", failing)
    longer = torch.cat([prompt, torch.randint(2, VOCAB, (1, 8))], dim=1)
    with pytest.raises(RuntimeError, match="no memory"):
        target.generate(longer, max_new_tokens=9, do_sample=False, assistant_model=drafts["good"], speculation="saguaro",
                        **{compat.CACHE_KEY: cache})  # fmt: skip
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, before))


# Outputs and streaming


def test_scores_and_logits_one_entry_per_token(both, prompt):
    plain, ours = both(
        prompt, return_dict_in_generate=True, output_scores=True, output_logits=True, repetition_penalty=1.2
    )
    same(plain.sequences, ours.sequences)
    for name in ("scores", "logits"):
        assert len(getattr(ours, name)) == len(getattr(plain, name)) == 24
        for a, b in zip(getattr(plain, name), getattr(ours, name)):
            assert torch.allclose(a, b, atol=1e-5) and b.untyped_storage().nbytes() == b.nbytes
    assert isinstance(ours, hf_saguaro.SaguaroGenerateOutput) and ours.saguaro.new_tokens == 24


class Streamed(BaseStreamer):
    def __init__(self):
        self.puts, self.ended = [], 0

    def put(self, value):
        assert not self.ended
        self.puts.append(value.tolist())

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("lengths", [(6,), (5, 8, 3)])
def test_a_streamer_gets_every_token_once_and_in_order(both, lengths):
    made = []

    def make():
        made.append(Streamed())
        return {"streamer": made[-1]}

    ids, mask = ragged(lengths)
    same(*both(ids, attention_mask=mask, make=make, eos_token_id=[5, 17, 33]))
    assert made[0].puts == made[1].puts and made[0].ended == made[1].ended == 1


# Around it


def test_num_assistant_tokens_beside_speculation_is_k(target, drafts, prompt, tmp_path):
    def depth(**kwargs):
        target.generate(prompt, max_new_tokens=26, assistant_model=drafts["itself"], **kwargs)
        return len(hf_saguaro.last_stats(target).accepted_by_depth) - 1

    assert depth(speculation={"execution": "sync"}, do_sample=False, num_assistant_tokens=3) == 3
    config = GenerationConfig(speculation={"execution": "sync"}, num_assistant_tokens=5, do_sample=False)
    config.save_pretrained(tmp_path)
    assert depth(generation_config=GenerationConfig.from_pretrained(tmp_path)) == 5
    assert depth(speculation=SaguaroConfig(num_assistant_tokens=4, execution="sync"), do_sample=False) == 4
    with pytest.raises(hf_saguaro.SaguaroError, match="give it once"):
        depth(speculation=SaguaroConfig(num_assistant_tokens=4), num_assistant_tokens=3)
    with pytest.raises(hf_saguaro.SaguaroError, match="num_assistant_tokens.*99"):
        depth(speculation="saguaro", num_assistant_tokens=99)


def test_under_inference_mode_and_twice(both, prompt):
    with torch.inference_mode():
        same(*both(prompt))
        same(*both(prompt))


def test_concurrent_calls_from_threads(target, drafts, prompt):
    expected = target.generate(prompt, max_new_tokens=24, do_sample=False).tolist()
    results = []

    def run(config):
        results.append(target.generate(prompt, max_new_tokens=24, do_sample=False, assistant_model=drafts["good"],
                                       speculation=config).tolist())  # fmt: skip

    threads = [threading.Thread(target=run, args=(config,)) for config in [*CONFIGS.values(), CONFIGS["async"]]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4


def test_concurrent_calls_leave_the_count_that_new_threads_start_with(target, drafts, prompt):
    def inherited():
        seen = []
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        return seen[0]

    torch.set_num_threads(3)
    try:
        during, threads = [], []

        class Watch(StoppingCriteria):
            def __call__(self, input_ids, scores, **kwargs):
                with draft_worker._setting_threads:  # not in the instant in which another call sets its own count
                    during.append(inherited())
                return torch.zeros(input_ids.shape[0], dtype=torch.bool)

        for _ in range(3):
            threads.append(threading.Thread(target=target.generate, args=(prompt,), kwargs=dict(
                max_new_tokens=12, do_sample=False, assistant_model=drafts["good"], speculation=CONFIGS["async"],
                stopping_criteria=StoppingCriteriaList([Watch()]),
            )))  # fmt: skip
            threads[-1].start()
        for thread in threads:
            thread.join()
        assert len(during) == 36 and set(during) == {3}
        assert inherited() == 3 and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)


def test_nested_calls(target, drafts, prompt):
    inner = []

    class Nested(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            if not inner:
                inner.append(target.generate(prompt, max_new_tokens=8, do_sample=False, assistant_model=drafts["good"],
                                             speculation=CONFIGS["async"]))  # fmt: skip
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    out = target.generate(prompt, max_new_tokens=12, do_sample=False, assistant_model=drafts["good"],
                          speculation=CONFIGS["async"], stopping_criteria=StoppingCriteriaList([Nested()]))  # fmt: skip
    plain = target.generate(prompt, max_new_tokens=12, do_sample=False)
    assert out.tolist() == plain.tolist() and inner[0].tolist() == plain[:, :17].tolist()


def test_custom_generate_needs_no_patch(target, drafts, prompt):
    plain = target.generate(prompt, max_new_tokens=12, do_sample=False)
    recipe = hf_saguaro.custom_generate(drafts["good"], CONFIGS["async"])
    hf_saguaro.disable()
    try:
        out = target.generate(prompt, max_new_tokens=12, do_sample=False, custom_generate=recipe)
    finally:
        hf_saguaro.enable()
    assert out.tolist() == plain.tolist()


def test_padded_vocabularies(both):
    """As Qwen's: the target may emit ids that the draft does not know, and the other way round."""
    larger, smaller = tiny_llama(0, vocab_size=202), tiny_llama(3, vocab_size=201)
    ids = torch.randint(2, 200, (1, 8), generator=torch.Generator().manual_seed(0))
    same(*both(ids, model=larger, draft=smaller))
    same(*both(ids, model=smaller, draft=larger))


def test_compiled_and_peft_models(both, target, drafts, prompt):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    draft = peft.get_peft_model(copy.deepcopy(drafts["good"]), lora).eval()
    same(*both(prompt, draft=draft))
    model = peft.get_peft_model(copy.deepcopy(target), lora).eval()
    plain, ours = both(prompt, model=model)
    same(plain, ours)
    assert hf_saguaro.last_stats(model).new_tokens == 24
    same(*both(prompt, model=torch.compile(copy.deepcopy(target))))


def test_async_streamer(target, drafts, prompt):
    transformers = pytest.importorskip("transformers")

    class Words:
        """A tokenizer as streamers need one: one word an id."""

        def decode(self, ids, **kwargs):
            return "".join(f"{int(i)} " for i in ids)

    streamer = transformers.TextIteratorStreamer(Words(), skip_prompt=True)
    thread = threading.Thread(target=target.generate, args=(prompt,), kwargs=dict(
        max_new_tokens=12, do_sample=False, assistant_model=drafts["good"], speculation=CONFIGS["async"], streamer=streamer))  # fmt: skip
    thread.start()
    text = "".join(streamer)
    thread.join()
    plain = target.generate(prompt, max_new_tokens=12, do_sample=False)
    assert [int(word) for word in text.split()] == plain[0, 9:].tolist()

    async def collect():
        streamer = transformers.AsyncTextIteratorStreamer(Words(), skip_prompt=True)
        worker = threading.Thread(target=target.generate, args=(prompt,), kwargs=dict(
            max_new_tokens=12, do_sample=False, assistant_model=drafts["good"], speculation="saguaro", streamer=streamer))  # fmt: skip
        worker.start()
        pieces = [piece async for piece in streamer]
        worker.join()
        return "".join(pieces)

    assert [int(word) for word in asyncio.run(collect()).split()] == plain[0, 9:].tolist()


def test_a_perturbed_draft_in_bfloat16_differs_at_near_ties_only(prompt):
    target = tiny_llama(0).to(torch.bfloat16)
    draft = perturbed(target, 0.05)
    plain = target.generate(prompt, max_new_tokens=40, do_sample=False)
    out = target.generate(
        prompt, max_new_tokens=40, do_sample=False, assistant_model=draft, speculation=CONFIGS["async"]
    )
    if out.tolist() != plain.tolist():
        first = int((out != plain)[0].nonzero()[0])
        top = target(plain[:, :first]).logits[0, -1].float().topk(2).values
        assert float(top[0] - top[1]) < 0.25
