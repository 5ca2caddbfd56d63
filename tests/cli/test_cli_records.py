# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""`hf-saguaro record` and `hf-saguaro train`: from prompts to records to an adapter."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_saguaro.adaptation import load_records
from hf_saguaro.cli.main import main


pytest.importorskip("peft", reason="adaptation is an extra")

LEARNING = json.dumps({"r": 8, "layers": "all", "learning_rate": 3e-3})


@pytest.fixture(scope="module")
def poor_draft(drafts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("poor")
    drafts["fair"].save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def records(folders, poor_draft, tmp_path_factory):
    root = tmp_path_factory.mktemp("records")
    lines = [{"question_id": i, "category": "qa", "turns": [f"Tell me about {i}."]} for i in range(48)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["--prompts", str(root / "prompts.jsonl"), "--output", str(root / "shards"), "--tokens", "24",
                 "--config", '{"num_assistant_tokens": 1}']  # fmt: skip
    assert main(["record", folders[0], poor_draft, *arguments]) == 0
    return root / "shards"


def test_records_hold_the_targets_own_texts(records, folders):
    dataset = load_records(records)
    assert len(dataset) == 48 and 0 < sum(dataset["held_out"]) < 24
    target = AutoModelForCausalLM.from_pretrained(folders[0])
    record = dataset[0]
    tokens = torch.tensor(record["tokens"])[None]
    with torch.no_grad():
        expected = target(tokens).logits[0].log_softmax(-1)
    rows = torch.tensor(record["log_probs"])
    first = record["first"]
    assert rows.shape == (24, 64)
    ids = torch.tensor(record["token_ids"])
    torch.testing.assert_close(rows, expected[first - 1 : first - 1 + len(rows)].gather(1, ids), atol=1e-3, rtol=1e-3)


def test_training_beats_the_bare_draft_and_leaves_an_adapter(records, poor_draft, tmp_path, capsys):
    arguments = ["--output", str(tmp_path / "out"), "--epochs", "6", "--batch-size", "4", "--adaptation", LEARNING]
    assert main(["train", poor_draft, str(records), *arguments]) == 0
    assert "written" in capsys.readouterr().out
    from peft import PeftModel

    draft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(poor_draft), tmp_path / "out")
    assert draft(torch.tensor([[5, 6]])).logits.shape == (1, 2, 97)


def test_what_does_not_beat_the_bare_draft_is_not_written(records, poor_draft, tmp_path, capsys):
    wild = json.dumps({"layers": "all", "learning_rate": 5.0})
    arguments = ["--output", str(tmp_path / "out"), "--epochs", "2", "--adaptation", wild]
    assert main(["train", poor_draft, str(records), *arguments]) == 0
    assert "nothing written" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "config, said", [('{"adaptation": true}', "adaptation"), ('{"execution": "autoregressive"}', "draft")]
)
def test_a_config_that_leaves_nothing_to_record_is_refused(
    folders, poor_draft, prompts_file, tmp_path, capsys, config, said
):
    arguments = ["--prompts", prompts_file, "--output", str(tmp_path), "--config", config]
    assert main(["record", folders[0], poor_draft, *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_without_records_is_refused_by_name(poor_draft, tmp_path, capsys):
    assert main(["train", poor_draft, str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    assert "feedback-*.parquet" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_under_accelerate_launch(records, poor_draft, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1",
               "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", port, "--module", "hf_saguaro.cli.main", "train", poor_draft, str(records),
               "--output", str(tmp_path / "out"), "--epochs", "6", "--batch-size", "2", "--adaptation", LEARNING]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("written") == 1
