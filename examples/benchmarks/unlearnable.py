# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""What adaptation costs where there is nothing to learn: the same stream with adaptation off and on, in turns.

    python examples/benchmarks/unlearnable.py      # writes unlearnable.md and .json

Needs an otherwise idle machine. The target answers at random: its scores are replaced by ones that a hash of the text so
far draws, so no draft can foresee them and no training helps. The models only have a size: their weights are random,
and so are the prompts. All settings are the defaults; the trainer runs in the background, as it does for a user.
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
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

from hf_saguaro import OnlineAdapter, SaguaroConfig
from hf_saguaro.cli.environment import environment


VOCAB, HIDDEN = 16384, 512


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", default="6,2", help="of target and draft (default: 6,2)")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="tokens of a prompt (default: 32)")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a prompt (default: 64)")
    parser.add_argument("--block", type=int, default=8, help="prompts between two changes of arm (default: 8)")
    parser.add_argument("--blocks", type=int, default=14, help="blocks with adaptation on (default: 14)")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".md"))
    return parser.parse_args()


class AnswersAtRandom(LogitsProcessor):
    """Scores that depend on the text so far, without any pattern."""

    def __call__(self, input_ids, scores):
        seed = zlib.crc32(input_ids.numpy().tobytes())
        return torch.randn(scores.shape, generator=torch.Generator().manual_seed(seed)) * 4


def model(layers, seed):
    torch.manual_seed(seed)
    sizes = dict(hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_attention_heads=8, num_key_value_heads=4)
    config = LlamaConfig(vocab_size=VOCAB, num_hidden_layers=layers, bos_token_id=None, eos_token_id=None, **sizes)
    return LlamaForCausalLM(config).eval()


def run(arguments):
    target, draft = (model(int(layers), seed) for seed, layers in enumerate(arguments.layers.split(",")))
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

    blocks = []
    with OnlineAdapter(draft) as adapter:

        def block(count, arm):
            seconds = [serve(adapter if arm == "on" else None) for _ in range(count)]
            blocks.append({"arm": arm, "seconds": seconds})
            print(f"{arm:3s}: {count} prompts, {statistics.fmean(seconds):.3f} s each", file=sys.stderr, flush=True)

        for _ in range(5):  # warm-up
            serve()
        # Half a block off at both ends: what drifts evenly hits both arms alike.
        block(arguments.block // 2, "off")
        for turn in range(arguments.blocks):
            block(arguments.block, "on")
            adapter.pause()
            while adapter.metrics()["trainer"] == "training":  # its last step; belongs to no arm
                serve()
            block(arguments.block if turn + 1 < arguments.blocks else arguments.block - arguments.block // 2, "off")
            adapter.resume()
        return {
            "environment": environment(target.device),
            "settings": {name: value for name, value in vars(arguments).items() if name != "output"},
            "blocks": blocks,
            "history": adapter.history(),
            "metrics": adapter.metrics(),
        }  # fmt: skip


def page(result):
    settings, metrics = result["settings"], result["metrics"]
    blocks = {arm: [block["seconds"] for block in result["blocks"] if block["arm"] == arm] for arm in ("off", "on")}
    seconds = {arm: [value for block in parts for value in block] for arm, parts in blocks.items()}
    mean = {arm: statistics.fmean(values) for arm, values in seconds.items()}
    # How far means of blocks scatter says how far the two means may be off.
    error = math.hypot(
        *(statistics.stdev(map(statistics.fmean, parts)) / len(parts) ** 0.5 for parts in blocks.values())
    )
    lines = [
        "# Adaptation where there is nothing to learn",
        "",
        f"A target that answers at random (a hash of the text draws its scores); target and draft of {settings['layers']} layers, "
        f"hidden size {HIDDEN}, {VOCAB} tokens, random weights, float32, {settings['tokens']} new tokens a prompt, everything at its "
        f"defaults. Blocks of {settings['block']} prompts with adaptation on and off take turns. Made by "
        "`examples/benchmarks/unlearnable.py`.",
        "",
        "| adaptation | prompts | seconds a prompt, mean | median |",
        "|---|---|---|---|",
        *(
            f"| {arm} | {len(seconds[arm])} | {mean[arm]:.3f} | {statistics.median(seconds[arm]):.3f} |"
            for arm in ("off", "on")
        ),
        "",
        f"On is {mean['on'] / mean['off'] - 1:+.1%} against off, with a standard error of {error / mean['off']:.1%}. "
        f"{metrics['published']} publications, {metrics['refused']} candidates refused, {metrics['steps']} optimizer steps in "
        f"{metrics['train_seconds']:.1f} s of the trainer's own thread, {metrics['rows']} rows of feedback.",
        "",
        "Environment: " + ", ".join(f"{name} {value}" for name, value in result["environment"].items()) + ".",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def main():
    arguments = parse_arguments()
    result = run(arguments)
    arguments.output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    arguments.output.write_text(page(result))
    print(f"written: {arguments.output}")


if __name__ == "__main__":
    main()
