# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""How long the verification kernels take, beside the bandwidth of a copy.

    python examples/benchmarks/kernels.py                      # the GPU if there is one, else the CPU
    python examples/benchmarks/kernels.py --batch 16 --output kernels.md

Arms run in turn, a few calls each, until every one had `--repeats` turns; the median turn is shown. A turn on a GPU is
timed by events around back-to-back calls, so it has the launches in it, as a loop without CUDA graphs has. The Triton
arm is checked against torch before anything is timed.
"""

import argparse
import os
import platform
import statistics
import time

import torch

from hf_saguaro import kernels
from hf_saguaro.kernels import reference


# Kernels that decoding does not call, and why.
OFF_THE_PATH = {"commit_slots": "no: the next glue pass reads the accepted tokens anyway, so nothing has to move"}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default=None, help="of the scores; bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--vocab-size", type=int, default=128_256)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--depth", type=int, default=5, help="K, proposals of a round")
    parser.add_argument("--layers", type=int, default=32, help="of the cache whose slots move")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--no-compile", action="store_true", help="leave out the torch.compile arm")
    parser.add_argument("--output", help="write the table to this Markdown file as well")
    arguments = parser.parse_args()
    if arguments.dtype is None:
        arguments.dtype = "bfloat16" if arguments.device.startswith("cuda") else "float32"
    return arguments


def make_cases(arguments):
    """Name -> (function of the reference, positional arguments, keyword arguments, bytes that have to move)."""
    device, V, B, K = arguments.device, arguments.vocab_size, arguments.batch, arguments.depth
    dtype = getattr(torch, arguments.dtype)
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    target, draft = random(B, K + 1, V).mul_(3).to(dtype), random(B, K, V).mul_(3).to(dtype)
    proposals, lengths = draft.argmax(-1), torch.full((B,), K, device=device)
    rows = torch.arange(B, device=device)
    noise = random(B, V)
    rejection = {
        "point_mass": torch.zeros(B, dtype=torch.bool, device=device),
        "uniforms": torch.rand(B, K, generator=generator, device=device),
        "residual_seeds": rows,
    }
    half = [random(B, 8, 256, 128).to(dtype) for _ in range(2 * arguments.layers)]
    keys, values = half[: arguments.layers], half[arguments.layers :]
    source = torch.arange(100, 100 + K, device=device).repeat(B, 1)
    row_bytes = B * V * dtype.itemsize
    keyed = {"seed": 1, "rows": rows, "positions": rows}
    return {
        "keyed Gumbel noise": (kernels.keyed_gumbel, (1, rows, rows, V), {}, B * V * 4),
        "coupled verification, greedy": (
            kernels.coupled_verification,
            (target, proposals, lengths),
            {},
            (K + 1) * row_bytes,
        ),
        "coupled verification, keyed noise": (
            kernels.coupled_verification,
            (target, proposals, lengths),
            keyed,
            (K + 1) * row_bytes,
        ),
        "the same, top-k 50, top-p 0.9, min-p 0.05": (
            kernels.coupled_verification,
            (target, proposals, lengths),
            keyed | {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.05},
            (K + 1) * row_bytes,
        ),
        "rejection verification": (
            kernels.rejection_verification,
            (target, draft, proposals, lengths),
            rejection,
            (2 * K + 1) * row_bytes,
        ),
        "the same, temperature 0.8, top-p 0.9": (
            kernels.rejection_verification,
            (target, draft, proposals, lengths),
            rejection | {"temperature": 0.8, "top_p": 0.9},
            (2 * K + 1) * row_bytes,
        ),
        "fork selection, F = 3": (
            kernels.select_forks,
            (target, proposals, lengths, [3] * (K + 1)),
            {},
            (K + 1) * row_bytes,
        ),
        "cache bias, F = 4": (kernels.biased_draw, (draft[:, 0], 4, 0.5, noise), {}, row_bytes + B * V * 8),
        "top 32 with residual": (kernels.top_k_with_residual, (target.flatten(0, 1), 32), {}, (K + 1) * row_bytes),
        f"slot commit, {arguments.layers} layers": (
            kernels.commit_slots,
            (keys, values, source, source - 50, lengths),
            {},
            2 * len(half) * B * 8 * K * 128 * dtype.itemsize,
        ),
    }


def with_setting(function, setting):
    def call(*args, **kwargs):
        os.environ["HF_SAGUARO_KERNELS"] = setting
        return function(*args, **kwargs)

    return call


def check_equal(name, result, expected):
    result, expected = (r if isinstance(r, tuple) else (r,) for r in (result, expected))
    for one, other in zip(result, expected):
        if one is None:
            continue
        if one.is_floating_point():
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5, msg=lambda text: f"{name}: {text}")
        elif not one.equal(other):
            raise SystemExit(f"{name}: Triton and torch do not give the same tokens")


def seconds(device, call):
    """Of one call, from enough calls in a row to fill a few milliseconds."""
    calls = 1
    while True:
        if device.startswith("cuda"):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(calls):
                call()
            end.record()
            end.synchronize()
            took = start.elapsed_time(end) / 1000
        else:
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            took = time.perf_counter() - begin
        if took > 0.005:
            return took / calls
        calls *= 4


def measure(device, arms, repeats):
    """Medians of interleaved turns, after one turn that warms up (and compiles)."""
    turns = {name: [] for name in arms}
    for turn in range(repeats + 1):
        for name, call in arms.items():
            took = seconds(device, call)
            if turn > 0:
                turns[name].append(took)
    return {name: statistics.median(took) for name, took in turns.items()}


def copy_bandwidth(device, repeats):
    """Bytes read and written in a second by a copy that no cache holds."""
    source = torch.empty((1 << 30) if device.startswith("cuda") else (1 << 27), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / measure(device, {"copy": lambda: target.copy_(source)}, repeats)["copy"]


def machine(device):
    if device.startswith("cuda"):
        name = torch.cuda.get_device_name(device)
    else:
        name = platform.processor() or platform.machine()
        if os.path.exists("/proc/cpuinfo"):
            with open("/proc/cpuinfo") as lines:
                name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), name)
        name += f", {torch.get_num_threads()} thread(s)"
    versions = f"torch {torch.__version__}"
    if device.startswith("cuda"):
        versions += f", triton {__import__('triton').__version__}, CUDA {torch.version.cuda}"
    return f"{name}; {versions}; Python {platform.python_version()}; {time.strftime('%Y-%m-%d')}"


def run(arguments):
    device = arguments.device
    on_gpu = device.startswith("cuda")
    bandwidth = copy_bandwidth(device, arguments.repeats)
    arm_names = ["torch eager"] + ([] if arguments.no_compile else ["torch.compile"]) + (["triton"] if on_gpu else [])
    judged = "triton" if on_gpu else "torch eager"
    titles = [
        "kernel",
        *(f"{name}, µs" for name in arm_names),
        "moved, MB",
        f"{judged}: share of copy bandwidth",
        "on the path",
    ]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name, (function, args, kwargs, moved) in make_cases(arguments).items():
        arms = {"torch eager": with_setting(function, "torch")}
        if "torch.compile" in arm_names:
            torch.compiler.reset()
            arms["torch.compile"] = torch.compile(getattr(reference, function.__name__), dynamic=False)
        if on_gpu:
            arms["triton"] = with_setting(function, "triton")
            if function is not kernels.commit_slots:  # which returns nothing, and whose tests compare caches
                check_equal(name, arms["triton"](*args, **kwargs), arms["torch eager"](*args, **kwargs))
        bound = {arm: lambda call=call, a=args, k=kwargs: call(*a, **k) for arm, call in arms.items()}
        took = measure(device, bound, arguments.repeats)
        cells = " | ".join(f"{took[arm] * 1e6:,.0f}" for arm in arm_names)
        lines.append(
            f"| {name} | {cells} | {moved / 1e6:.1f} | {moved / took[judged] / bandwidth:.0%} "
            f"| {OFF_THE_PATH.get(function.__name__, 'yes')} |"
        )
    about = (
        f"V = {arguments.vocab_size:,}, B = {arguments.batch}, K = {arguments.depth}, scores in {arguments.dtype}; "
        f"copy bandwidth {bandwidth / 1e9:,.0f} GB/s; medians of {arguments.repeats} turns.\n\n{machine(device)}"
    )
    if not on_gpu:
        about += "\n\nThere was no GPU: what ran is the torch code beside the Triton kernels, which is what a CPU gets."
    return about + "\n\n" + "\n".join(lines) + "\n"


def main():
    arguments = parse_arguments()
    with torch.inference_mode():
        table = run(arguments)
    print(table)
    if arguments.output:
        with open(arguments.output, "w") as file:
            file.write(f"# Verification kernels\n\nWritten by `examples/benchmarks/kernels.py`. {table}")


if __name__ == "__main__":
    main()
