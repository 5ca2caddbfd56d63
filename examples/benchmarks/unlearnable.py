# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""What adaptation costs where there is nothing to learn: one stream with adaptation off, on, and off again.

    python examples/benchmarks/unlearnable.py      # writes unlearnable.md and .json

The target answers at random: its scores are replaced by ones that a hash of the text so far draws, so no draft can
foresee them and no training helps. Both models sleep for as long as their passes should take (`sleeping.py`), so that
the engine, the feedback and the trainer on the host are what is timed, and not what else the machine does. All settings
are the defaults; the trainer runs in the background, as it does for a user.
"""

import argparse
import json
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


VOCAB, HIDDEN = 16384, 256


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--verify", type=float, default=0.03, help="seconds of the target's pass (default: 0.03)")
    parser.add_argument("--draft-pass", type=float, default=0.006, help="seconds of the draft's (default: 0.006)")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="tokens of a prompt (default: 32)")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a prompt (default: 64)")
    parser.add_argument("--count", type=int, default=60, help="prompts with adaptation on, and off (default: 60)")
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
    target, draft = sleeping(model(2, seed=0), arguments.verify), sleeping(model(1, seed=1), arguments.draft_pass)
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
        block(arguments.count // 2, "off")
        block(arguments.count, "on")
        adapter.pause()
        while adapter.metrics()["trainer"] == "training":  # its last step; belongs to no arm
            serve()
        block(arguments.count - arguments.count // 2, "off")
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
    first, last = (statistics.fmean(part) for part in blocks["off"])
    drift = last / first - 1
    lines = [
        "# Adaptation where there is nothing to learn",
        "",
        "A target that answers at random (a hash of the text draws its scores), on a simulated accelerator: a pass of the "
        f"target takes {settings['verify']:g} s, one of the draft {settings['draft_pass']:g} s, and neither a core. Training runs "
        f"on the host's ({VOCAB} tokens, hidden size {HIDDEN}). {settings['tokens']} new tokens a prompt, everything at its "
        f"defaults: {settings['count'] // 2} prompts with adaptation off, {settings['count']} with it on, and the rest off. Made by "
        "`examples/benchmarks/unlearnable.py`.",
        "",
        "| adaptation | prompts | seconds a prompt, mean | median |",
        "|---|---|---|---|",
        *(
            f"| {arm} | {len(seconds[arm])} | {mean[arm]:.3f} | {statistics.median(seconds[arm]):.3f} |"
            for arm in ("off", "on")
        ),
        "",
        f"On against off: {mean['on'] / mean['off'] - 1:+.1%}; the last off block against the first: {drift:+.1%}. "
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
