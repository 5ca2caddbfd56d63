# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Which kernels run, what says so, and what is refused before anything is launched."""

import importlib
import sys

import pytest
import torch

from hf_saguaro import kernels
from hf_saguaro.errors import SaguaroError
from hf_saguaro.kernels import reference


NONE = torch.empty(1, 0, dtype=torch.int64)
ZERO = torch.zeros(1, dtype=torch.int64)


@pytest.fixture
def setting(monkeypatch):
    return lambda value: monkeypatch.setenv("HF_SAGUARO_KERNELS", value)


@pytest.fixture
def without_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def without_triton(monkeypatch):
    """A Python in which `import triton` fails."""
    for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    kernels._triton.cache_clear()
    yield
    kernels._triton.cache_clear()


def choose_one():
    return kernels.coupled_verification(torch.tensor([[[1.0, 2.0]]]), NONE, ZERO)[1].item()


def test_torch_serves_the_cpu_by_default(monkeypatch, without_interpreter, without_triton):
    monkeypatch.delenv("HF_SAGUARO_KERNELS", raising=False)
    assert choose_one() == 1
    if not torch.cuda.is_available():
        assert kernels.describe() == "torch (HF_SAGUARO_KERNELS=auto, no CUDA device)"


def test_the_interpreter_is_used_only_where_triton_is_asked_for(setting, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for name in ("noise", "coupled"):
        monkeypatch.setitem(sys.modules, f"hf_saguaro.kernels.{name}", None)
    setting("auto")
    assert choose_one() == 1


def test_torch_can_be_asked_for(setting):
    setting("torch")
    assert choose_one() == 1
    assert kernels.describe() == "torch (HF_SAGUARO_KERNELS=torch)"


def test_triton_can_be_asked_for(triton_device):
    assert choose_one() == 1 if triton_device == "cpu" else True
    assert kernels.describe().startswith("triton ") and f"on {triton_device}" in kernels.describe()


def test_a_word_that_names_no_kernels_is_refused(setting):
    setting("cuda")
    with pytest.raises(SaguaroError, match="HF_SAGUARO_KERNELS=cuda .* auto, triton or torch"):
        choose_one()
    assert "HF_SAGUARO_KERNELS=cuda" in kernels.describe()


def test_triton_on_the_cpu_is_refused_without_its_interpreter(setting, without_interpreter):
    setting("triton")
    with pytest.raises(SaguaroError, match="tensors are on cpu.*TRITON_INTERPRET=1.*set it to auto or torch"):
        choose_one()
    if not torch.cuda.is_available():
        assert kernels.describe().startswith("none: HF_SAGUARO_KERNELS=triton, but the tensors are on cpu")


def test_triton_is_refused_where_it_is_not_installed(setting, without_triton, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    setting("triton")
    if not torch.cuda.is_available():
        with pytest.raises(SaguaroError, match="triton cannot be imported"):
            choose_one()
        assert "triton cannot be imported" in kernels.describe()


def test_float64_is_left_to_torch_or_refused(setting, triton_device):
    scores = torch.tensor([[[1.0, 2.0]]], dtype=torch.float64, device=triton_device)
    arguments = scores, NONE.to(triton_device), ZERO.to(triton_device)
    with pytest.raises(SaguaroError, match="float64"):
        kernels.coupled_verification(*arguments)
    setting("auto")
    assert kernels.coupled_verification(*arguments)[1].item() == 1


def test_the_package_can_be_imported_without_triton(without_triton, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("hf_saguaro.kernels.")]:
        if name.split(".")[-1] not in ("reference", "checks"):
            monkeypatch.delitem(sys.modules, name)
    importlib.reload(kernels)
    monkeypatch.setenv("HF_SAGUARO_KERNELS", "auto")
    assert choose_one() == 1


def test_arguments_may_be_named(any_device):
    scores = torch.tensor([[[1.0, 2.0]]], device=any_device)
    token = kernels.coupled_verification(scores=scores, proposals=NONE.to(any_device), lengths=ZERO.to(any_device))[1]
    assert token.item() == 1
    top = kernels.top_k_with_residual(k=1, scores=scores[0])
    assert top[1].item() == 1


def coupled(**changes):
    arguments = {"scores": torch.zeros(2, 3, 5), "proposals": torch.zeros(2, 2, dtype=torch.int64)}
    arguments |= {"lengths": torch.zeros(2, dtype=torch.int64)} | changes
    return kernels.coupled_verification(**arguments)


def rejection(**changes):
    arguments = {
        "target_scores": torch.zeros(2, 3, 5),
        "draft_scores": torch.zeros(2, 2, 5),
        "proposals": torch.zeros(2, 2, dtype=torch.int64),
        "lengths": torch.zeros(2, dtype=torch.int64),
        "point_mass": torch.zeros(2, dtype=torch.bool),
        "uniforms": torch.zeros(2, 2),
        "residual_seeds": torch.zeros(2, dtype=torch.int64),
    }
    return kernels.rejection_verification(**arguments | changes)


def forks(**changes):
    arguments = {"scores": torch.zeros(1, 2, 5), "sent": torch.zeros(1, 1, dtype=torch.int64), "lengths": ZERO}
    return kernels.select_forks(**arguments | {"fan_out": [1, 1]} | changes)


def bias(**changes):
    arguments = {"scores": torch.zeros(1, 5), "fan_out": 2, "bias": 0.5, "noise": torch.zeros(1, 5)}
    return kernels.biased_draw(**arguments | changes)


def slots(**changes):
    cache = torch.zeros(1, 2, 4, 3)
    arguments = {"keys": [cache], "values": [cache.clone()], "source": ZERO[None], "destination": ZERO[None]}
    return kernels.commit_slots(**arguments | {"lengths": ZERO} | changes)


INT = torch.int64
REFUSED = [
    (coupled, {"scores": torch.zeros(2, 5)}, r"`scores` has shape \[2, 5\].*\[B, K\+1, V\]"),
    (coupled, {"scores": torch.zeros(2, 3, 0)}, r"`scores` has shape \[2, 3, 0\]: nothing"),
    (coupled, {"scores": torch.zeros(2, 3, 5, dtype=INT)}, "`scores` is int64; convert it to float32"),
    (coupled, {"proposals": torch.zeros(2, 3, dtype=INT)}, r"`proposals` has shape \[2, 3\].*\[2, 2\]"),
    (coupled, {"proposals": torch.zeros(2, 2, dtype=torch.int32)}, "`proposals` is int32; convert it to int64"),
    (coupled, {"lengths": torch.zeros(3, dtype=INT)}, r"`lengths` has shape \[3\]"),
    (coupled, {"lengths": torch.zeros(2, dtype=INT, device="meta")}, "`lengths` is on meta.*cpu; move it"),
    (coupled, {"lengths": [0, 0]}, r"`lengths` is \[0, 0\].*needs a tensor"),
    (coupled, {"temperature": 0.0}, "`temperature` is 0.0.*above 0"),
    (coupled, {"temperature": float("nan")}, "`temperature` is nan"),
    (coupled, {"top_k": -1}, "`top_k` is -1"),
    (coupled, {"top_k": 2.0}, "`top_k` is 2.0.*pass an int"),
    (coupled, {"top_p": 1.5}, "`top_p` is 1.5.*from 0 to 1"),
    (coupled, {"min_p": float("nan")}, "`min_p` is nan"),
    (coupled, {"seed": 1}, "`rows` is None.*needs a tensor"),
    (coupled, {"seed": 1.5}, "`seed` is 1.5"),
    (coupled, {"seed": 1, "noise": torch.zeros(2, 3, 5)}, "both `seed` and `noise`"),
    (coupled, {"noise": torch.zeros(2, 1, 5)}, "`noise` has shape"),
    (rejection, {"draft_scores": torch.zeros(2, 3, 5)}, r"`draft_scores` has shape \[2, 3, 5\].*\[2, 2, 5\]"),
    (rejection, {"draft_scores": torch.zeros(2, 2, 6)}, "`draft_scores` has shape"),
    (rejection, {"point_mass": torch.zeros(2)}, "`point_mass` is float32; convert it to bool"),
    (rejection, {"uniforms": torch.zeros(2, 2, dtype=torch.float64)}, "`uniforms` is float64"),
    (rejection, {"residual_seeds": torch.zeros(2)}, "`residual_seeds` is float32; convert it to int64"),
    (forks, {"fan_out": [1]}, r"`fan_out` is \[1\], but the scores have 2 depths"),
    (forks, {"fan_out": [1, -1]}, "0 or more"),
    (bias, {"bias": 0.0}, r"`bias` is 0.0.*\(0, 1\]"),
    (bias, {"bias": 1.5}, "`bias` is 1.5"),
    (bias, {"fan_out": -1}, "`fan_out` is -1"),
    (bias, {"noise": torch.zeros(1, 5, dtype=torch.float16)}, "`noise` is float16"),
    (slots, {"values": []}, "1 `keys` came with 0 `values`"),
    (slots, {"values": [torch.zeros(1, 2, 4, 3, dtype=torch.float16)]}, r"`values\[0\]` is float16"),
    (slots, {"keys": [torch.zeros(2, 2, 4, 3)]}, r"`keys\[0\]` has shape"),
    (slots, {"keys": [torch.zeros(1, 2, 3, 4).transpose(2, 3)]}, r"`keys\[0\]` has strides"),
    (slots, {"destination": torch.zeros(1, 2, dtype=INT)}, "`destination` has shape"),
]


@pytest.mark.parametrize(("call", "changes", "message"), REFUSED)
def test_bad_arguments_are_refused(call, changes, message):
    call()
    with pytest.raises(SaguaroError, match=message):
        call(**changes)


@pytest.mark.parametrize("k", [0, 6, 1.0])
def test_k_must_fit_the_row(k):
    with pytest.raises(SaguaroError, match=f"`k` is {k}.*from 1 to 5"):
        kernels.top_k_with_residual(torch.zeros(1, 5), k)


@pytest.mark.parametrize(
    "arguments", [("a", ZERO, ZERO, 5), (1, ZERO[None], ZERO, 5), (1, ZERO, ZERO[:0], 5), (1, ZERO, ZERO, 0)]
)
def test_bad_keys_are_refused(arguments):
    with pytest.raises(SaguaroError):
        kernels.keyed_gumbel(*arguments)


def test_public_functions_are_those_of_the_reference():
    for name in kernels.__all__:
        if name not in ("describe", "describe_few_rows", "uses_triton", "wants_compiled"):
            assert getattr(kernels, name).__doc__ == getattr(reference, name).__doc__
