# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""`hf-saguaro bench`: what it prints, what it writes, and what it refuses."""

from __future__ import annotations

import json
import sys

import pytest

from hf_saguaro.cli.main import main


ARM_KEYS = {
    "tokens_per_second", "spread", "ratio_to_plain", "accepted_per_round", "hit_rate", "time", "identical", "prompts",
    "largest_gap",
}  # fmt: skip


@pytest.fixture(scope="module")
def result(folders, prompts_file, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "sub" / "result.json"
    code = main(
        ["bench", *folders, "--prompts", prompts_file, "--arms", "stock,stock-k3,saguaro,sync-k2,async-k3-f2",
         "--tokens", "12", "--repeats", "2", "--threads", "async-k3-f2=2,1", "--json", str(out)]
    )  # fmt: skip
    assert code == 0
    return json.loads(out.read_text())


def test_result_has_the_shape_of_the_contract(result):
    assert {"environment", "models", "settings", "arms"} <= set(result)
    assert list(result["arms"]) == ["plain", "stock", "stock-k3", "saguaro", "sync-k2", "async-k3-f2"]
    for arm in result["arms"].values():
        assert set(arm) >= ARM_KEYS
        low, high = arm["spread"]
        assert 0 < low <= arm["tokens_per_second"] <= high
    assert {"torch", "transformers", "hf-saguaro", "device", "threads", "commit"} <= set(result["environment"])
    assert all(len(result["models"][who]["sha256"]) == 64 for who in ("target", "draft"))
    assert result["models"]["target"]["sha256"] != result["models"]["draft"]["sha256"]


def test_plain_is_the_mark(result):
    plain = result["arms"]["plain"]
    assert plain["ratio_to_plain"] == 1.0
    assert plain["accepted_per_round"] is plain["hit_rate"] is plain["time"] is plain["largest_gap"] is None


def test_every_arm_wrote_plain_text(result):
    for arm in result["arms"].values():
        assert (arm["identical"], arm["prompts"], arm["largest_gap"]) == (3, 3, None)


def test_speculation_is_counted(result):
    arms = result["arms"]
    assert all(0 < arms[name]["accepted_per_round"] <= 3 for name in ("stock-k3", "sync-k2", "async-k3-f2"))
    assert arms["sync-k2"]["accepted_per_round"] <= 2 and arms["sync-k2"]["hit_rate"] == 0
    assert 0 < arms["async-k3-f2"]["hit_rate"] <= 1
    assert set(arms["async-k3-f2"]["time"]) == {"verify", "draft", "wait", "other"}
    assert all(seconds >= 0 for seconds in arms["sync-k2"]["time"].values())


def test_settings_say_what_ran(result):
    settings = {name: arm["settings"] for name, arm in result["arms"].items()}
    assert settings["stock"]["num_assistant_tokens"] == 20 and settings["stock-k3"]["num_assistant_tokens"] == 3
    assert settings["async-k3-f2"]["execution"] == "async" and settings["async-k3-f2"]["fan_out"] == 2
    assert settings["async-k3-f2"]["threads"] == 2 and settings["plain"]["threads"] == 1


def test_columns_are_those_of_spec_bench(folders, prompts_file, capsys):
    assert (
        main(["bench", *folders, "--prompts", prompts_file, "--arms", "sync-k2", "--tokens", "6", "--repeats", "1"])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    header = next(line for line in lines if "mt_bench" in line)
    columns = [
        "mt_bench",
        "translation",
        "summarization",
        "qa",
        "math_reasoning",
        "rag",
        "overall",
        "mean accepted tokens",
    ]
    positions = [header.index(column) for column in columns]
    assert positions == sorted(positions)
    row = lines[lines.index(header) + 2].split()
    assert row[0] == "sync-k2" and row[2] == "-" and float(row[1]) > 0 and float(row[-1]) > 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--arms", "fast"], "there is no arm 'fast'"),
        (["--arms", "stock-k3-f2"], "there is no arm 'stock-k3-f2'"),
        (["--arms", "sync-k0"], "num_assistant_tokens"),
        (["--config", '{"fanout": 3}'], "fanout"),
        (["--config", "nowhere.json"], "--config"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--tokens", "0"], "--tokens is 0"),
        (["--threads", "sync=0"], "--threads"),
        (["--threads", "async=1", "--arms", "sync"], "--threads names async"),
        (["--simulate", "soon"], "--simulate soon"),
        (["--device", "toaster"], "--device toaster"),
        (["--limit", "many"], "--limit"),
    ],
)
def test_what_the_user_gave_wrong_is_one_line_and_exit_code_2(folders, prompts_file, capsys, arguments, says):
    assert main(["bench", *folders, "--prompts", prompts_file, "--tokens", "4", "--repeats", "1", *arguments]) == 2
    captured = capsys.readouterr()
    assert says in captured.err and captured.err.count("\n") == 1 and "Traceback" not in captured.err


def test_a_peer_that_is_not_installed_is_refused_by_name(folders, monkeypatch, capsys):
    for module in ("economize", "economize.distributed", "flashspec"):
        monkeypatch.setitem(sys.modules, module, None)
    for peer in ("economize", "flashspec-k3"):
        assert main(["bench", *folders, "--arms", peer]) == 2
        assert f"pip install {peer.split('-')[0]}" in capsys.readouterr().err


def test_a_missing_model_is_named(prompts_file, folders, tmp_path, capsys):
    assert main(["bench", str(tmp_path / "none"), folders[1], "--prompts", prompts_file]) == 2
    assert f"cannot load the target {tmp_path / 'none'}" in capsys.readouterr().err


def test_models_that_do_not_fit_are_refused_before_anything_runs(folders, prompts_file, tmp_path, capsys):
    from transformers import LlamaConfig, LlamaForCausalLM

    other = LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                         num_attention_heads=1))  # fmt: skip
    other.save_pretrained(tmp_path)
    assert main(["bench", folders[0], str(tmp_path), "--prompts", prompts_file, "--arms", "stock"]) == 2
    assert "different vocabularies" in capsys.readouterr().err


def test_a_bad_line_of_the_prompts_is_named(folders, tmp_path, capsys):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"question_id": 1, "category": "qa", "turns": ["Who?"]}\n{"turns": "no list"}\n')
    assert main(["bench", *folders, "--prompts", str(path)]) == 2
    assert "line 2" in capsys.readouterr().err


def test_a_failure_of_ours_is_exit_code_1_with_its_traceback(folders, prompts_file, monkeypatch, capsys):
    monkeypatch.setattr("hf_saguaro.cli.bench.summarize", lambda *_: 1 / 0)
    assert (
        main(["bench", *folders, "--prompts", prompts_file, "--arms", "sync", "--tokens", "2", "--repeats", "1"]) == 1
    )
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_help_and_no_command(capsys):
    assert main(["bench", "--help"]) == 0
    assert "replica:SIZE" in capsys.readouterr().out
    assert main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1
