# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles for a GPU on a machine that has none.

The interpreter runs Python and takes what the compiler refuses: a name that changes its type in a branch, for one. Run
as a script, in a Python where Triton does not interpret, this file compiles: `types` stops after the first stage, which
settles the types; `code` goes down to machine code.
"""

import importlib.util
import os
import subprocess
import sys
import types

import pytest


INT64 = (
    "rows positions proposals lengths best accepted next_token choices seeds token_ids tokens_out sent source "
    "destination lists table highest cuts"
)
FLOAT32 = "output noise uniforms peaks totals log_probs log_residual log_q log_q_token draft log_sums"
TYPES = dict.fromkeys(INT64.split(), "*i64") | dict.fromkeys(FLOAT32.split(), "*fp32")
TYPES |= {"arrived": "*i32", "widths": "*i32", "starts": "*i32", "point_mass": "*u8"}
TYPES |= {"scores": "*bf16", "target": "*bf16", "element": "*bf16", "temperature": "fp32", "log_bias": "fp32"}
TYPES |= {"top_p": "fp32", "log_min_p": "fp32", "lines_done": "*i32"}


def constants_of(**changes):
    switches = {"TEMPERED": True, "FILTERED": False, "TOP_K": False, "TOP_P": False}
    return switches | {"DEPTHS": 8, "WIDTH": 1, "SHARES": 32, "BLOCKS": 1024} | changes


class TypesAreRight(Exception):
    """Ends a compilation after its first stage."""


def stop_after_types(monkeypatch):
    from triton.backends.nvidia.compiler import CUDABackend

    add_stages = CUDABackend.add_stages

    def stop(*arguments):
        raise TypesAreRight

    def add_first_stage(self, stages, *arguments):
        add_stages(self, stages, *arguments)
        stages["ttgir"] = stop

    monkeypatch.setattr(CUDABackend, "add_stages", add_first_stage)


def compile_all(types_only):
    # The kernels without the package around them, whose imports take longer than the compilation.
    package = types.ModuleType("hf_saguaro")
    package.__path__ = list(importlib.util.find_spec("hf_saguaro").submodule_search_locations)
    sys.modules["hf_saguaro"] = package

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hf_saguaro.kernels import cache_bias, coupled, forks, noise, rejection, slots, tiles, top_k

    with pytest.MonkeyPatch.context() as monkeypatch:
        if types_only:
            stop_after_types(monkeypatch)
        for kernel, constants in [
            (noise.keyed_noise_kernel, {"GUMBEL": True, "BLOCKS": 1024}),
            (coupled.coupled_kernel, constants_of(NOISE=0, TEMPERED=False)),
            (coupled.coupled_kernel, constants_of(NOISE=1)),
            (coupled.coupled_kernel, constants_of(NOISE=2, DEPTHS=1)),
            (coupled.coupled_kernel, constants_of(NOISE=1, FILTERED=True, TOP_K=True, TOP_P=True, WIDTH=64)),
            (coupled.coupled_kernel, constants_of(NOISE=0, FILTERED=True, TOP_P=True)),
            (rejection.rejection_kernel, constants_of(HAS_DRAFT=True, TEMPERED=False)),
            (rejection.rejection_kernel, constants_of(HAS_DRAFT=False, DEPTHS=1)),
            (rejection.rejection_kernel, constants_of(HAS_DRAFT=True, FILTERED=True, TOP_K=True, TOP_P=True, WIDTH=64)),
            (rejection.rejection_kernel, constants_of(HAS_DRAFT=False, FILTERED=True)),
            (forks.fork_kernel, {"WIDTH": 4, "SHARES": 32, "TILE": 4096}),
            (top_k.top_k_kernel, {"WIDTH": 64, "SHARES": 32, "TILE": 4096}),
            (cache_bias.biased_draw_kernel, {"WIDTH": 4, "SHARES": 32, "TILE": 4096}),
            (slots.commit_kernel, {"MOVES": 8, "WIDTH": 128}),
        ]:
            names = kernel.arg_names
            constants |= {name: 1 for name in names if name.endswith("stride_token")}  # as a launch makes of it
            signature = {name: "constexpr" if name in constants else TYPES.get(name, "i32") for name in names}
            constexprs = {(names.index(name),): value for name, value in constants.items()}
            source = ASTSource(kernel, signature=signature, constexprs=constexprs)
            try:
                compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=tiles.LAUNCH_OPTIONS)
            except TypesAreRight:
                pass
            else:
                assert "cubin" in compiled.asm and not types_only
                # The approximate logarithm would be wrong where it counts in the noise, next to u = 1.
                assert "lg2.approx" not in compiled.asm["ptx"]
            print("compiled", kernel.__name__)


def compile_in_another_python(what, cache):
    pytest.importorskip("triton.backends.nvidia")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run([sys.executable, __file__, what], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("compiled") == 14


def test_kernels_have_the_types_of_a_compiled_program(tmp_path):
    compile_in_another_python("types", tmp_path)


@pytest.mark.slow
def test_kernels_compile_to_machine_code(tmp_path):
    compile_in_another_python("code", tmp_path)


if __name__ == "__main__":
    compile_all(types_only=sys.argv[1] == "types")
