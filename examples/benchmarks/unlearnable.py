# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""What adaptation costs where there is nothing to learn: one stream with adaptation on, and off for a prompt now and then.

    python examples/benchmarks/unlearnable.py      # writes unlearnable.md and .json

The target answers at random: its scores are replaced by ones that a hash of the text so far draws, so no draft can
foresee them and no training helps. Two machines: on a simulated accelerator both models sleep for as long as their
passes should take (`sleeping.py`), so that the engine, the feedback and the trainer on the host are what is timed; on
the CPU target, draft and trainer share the cores, and it needs a quiet machine. All settings are the defaults; the
trainer runs in the background, as it does for a user, and is paused where adaptation is off. A machine drifts by more
within a minute than adaptation costs, so prompts without it lie among the others, a few seconds apart. The trainer may
use time that passes while it is paused, so it works a little more here than it would.
"""

import argparse
import json
import math
import statistics
import sys
import time
import zlib
from pathlib import Path

import torch
from sleeping import sleeping
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

from hf_saguaro import OnlineAdapter, SaguaroConfig
from hf_saguaro.cli.environment import environment


VOCAB = 16384
# Layers of target and draft, their width, and the seconds that their passes take where they sleep.
MACHINES = {
    "simulated accelerator": {"layers": (2, 1), "hidden": 256, "sleeps": (0.03, 0.006)},
    "CPU": {"layers": (16, 2), "hidden": 512, "sleeps": None},
}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machines", default=",".join(MACHINES), help="which of them (default: all)")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="tokens of a prompt (default: 32)")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a prompt (default: 64)")
    parser.add_argument("--cycles", type=int, default=60, help="prompts with adaptation off (default: 60)")
    parser.add_argument("--on", type=int, default=3, help="prompts with it on between two of them (default: 3)")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".md"))
    return parser.parse_args()


class AnswersAtRandom(LogitsProcessor):
    """Scores that depend on the text so far, without any pattern."""

    def __call__(self, input_ids, scores):
        seed = zlib.crc32(input_ids.numpy().tobytes())
        return torch.randn(scores.shape, generator=torch.Generator().manual_seed(seed)) * 4


def model(layers, hidden, seed):
    torch.manual_seed(seed)
    sizes = dict(hidden_size=hidden, intermediate_size=4 * hidden, num_attention_heads=8, num_key_value_heads=4)
    config = LlamaConfig(vocab_size=VOCAB, num_hidden_layers=layers, bos_token_id=None, eos_token_id=None, **sizes)
    return LlamaForCausalLM(config).eval()


def run(machine, arguments):
    pair = [model(layers, machine["hidden"], seed) for seed, layers in enumerate(machine["layers"])]
    if machine["sleeps"]:
        pair = [sleeping(*each) for each in zip(pair, machine["sleeps"])]
    target, draft = pair
    generator = torch.Generator().manual_seed(0)

    def serve(adaptation=None):
        prompt = torch.randint(VOCAB, (1, arguments.prompt_tokens), generator=generator)
        began = time.perf_counter()
        target.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=arguments.tokens, pad_token_id=0,
            assistant_model=draft, logits_processor=LogitsProcessorList([AnswersAtRandom()]),
            speculation=SaguaroConfig(adaptation=adaptation),
        )  # fmt: skip
        return time.perf_counter() - began

    cycles = []
    with OnlineAdapter(draft) as adapter:
        for _ in range(5):  # warm-up
            serve()
        for number in range(arguments.cycles):
            adapter.resume()
            on = [serve(adapter) for _ in range(arguments.on)]
            adapter.pause()
            while adapter.metrics()["trainer"] == "training":  # a step that has begun
                on.append(serve(adapter))
            cycles.append({"on": on, "off": serve()})
            if number % 10 == 9:
                print(f"{number + 1} of {arguments.cycles} cycles", file=sys.stderr, flush=True)
        return {"machine": machine, "cycles": cycles, "history": adapter.history(), "metrics": adapter.metrics()}


def table(name, result):
    machine, cycles, metrics = result["machine"], result["cycles"], result["metrics"]
    on = [seconds for cycle in cycles for seconds in cycle["on"]]
    off = [cycle["off"] for cycle in cycles]
    # Prompts with adaptation on, each beside the ones without it before and after.
    costs = [
        seconds / statistics.fmean([before["off"], after["off"]]) - 1
        for before, after in zip(cycles, cycles[1:])
        for seconds in after["on"]
    ]
    error = statistics.stdev(costs) / math.sqrt(len(costs))
    passes = "computes with all threads; the trainer takes its time from one of them"
    if machine["sleeps"]:
        passes = "takes {:g} s, one of the draft {:g} s, and neither a core; training runs on the host's".format(
            *machine["sleeps"]
        )
    return [
        f"## {name}",
        "",
        f"A pass of the target {passes} ({' and '.join(map(str, machine['layers']))} layers, hidden size {machine['hidden']}, "
        f"{VOCAB} tokens). A prompt takes {statistics.fmean(off):.3f} s with adaptation off ({len(off)} of them, from "
        f"{min(off):.3f} to {max(off):.3f} s) and {statistics.fmean(on):.3f} s with it on ({len(on)}). Each beside the ones without "
        f"adaptation before and after it: **{statistics.fmean(costs):+.1%}** (standard error {error:.1%}). {metrics['published']} "
        f"publications, {metrics['refused']} refused candidates, {metrics['steps']} optimizer steps in "
        f"{metrics['train_seconds']:.1f} s of the trainer's own thread, {metrics['rows']} rows of feedback.",
        "",
    ]  # fmt: skip


def page(result):
    settings = result["settings"]
    lines = [
        "# Adaptation where there is nothing to learn",
        "",
        f"A target that answers at random (a hash of the text draws its scores), {settings['tokens']} new tokens a prompt, everything "
        f"at its defaults. Adaptation is on, but for one prompt after every {settings['on']}. Made by "
        "`examples/benchmarks/unlearnable.py`.",
        "",
    ]  # fmt: skip
    for name, part in result["machines"].items():
        lines += table(name, part)
    lines.append("Environment: " + ", ".join(f"{name} {value}" for name, value in result["environment"].items()) + ".")
    return "\n".join(lines) + "\n"


def main():
    arguments = parse_arguments()
    result = {
        "environment": environment(torch.device("cpu")),
        "settings": {name: value for name, value in vars(arguments).items() if name != "output"},
        "machines": {name: run(MACHINES[name], arguments) for name in arguments.machines.split(",")},
    }
    arguments.output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    arguments.output.write_text(page(result))
    print(f"written: {arguments.output}")


if __name__ == "__main__":
    main()
