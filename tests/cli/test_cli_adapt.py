# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""`hf-saguaro adapt` and `hf-saguaro card`: what they leave behind."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_saguaro.cli.main import main


pytest.importorskip("peft", reason="adaptation is an extra")


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    path = tmp_path_factory.mktemp("stream") / "stream.jsonl"
    lines = [{"question_id": i, "category": "qa", "turns": [f"Tell me about number {i}."]} for i in range(10)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture(scope="module")
def adapted(folders, stream, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapted")
    config = {"num_assistant_tokens": 3}
    learning = {"r": 4, "layers": "all", "train_every_tokens": 64, "publish_every_rounds": 8}
    arguments = ["--tokens", "24", "--held-out", "3", "--passes", "2", "--config", json.dumps(config),
                 "--adaptation", json.dumps(learning)]  # fmt: skip
    assert main(["adapt", *folders, "--prompts", stream, "--output", str(folder), *arguments]) == 0
    return folder


def test_it_leaves_adapter_card_history_run_and_plot(adapted):
    names = {path.name for path in adapted.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md", "history.jsonl", "run.json"} <= names
    assert (adapted / "acceptance.png").read_bytes()[:4] == b"\x89PNG"


def test_the_run_has_one_record_a_prompt_of_the_stream(adapted):
    result = json.loads((adapted / "run.json").read_text())
    assert len(result["stream"]) == 2 * 7 and result["held_out"]["prompts"] == 3
    assert all(0 <= record["accepted"] <= 3 * record["rounds"] for record in result["stream"])
    held_out = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9} - {record["question_id"] for record in result["stream"]}
    assert len(held_out) == 3
    assert 0 <= result["held_out"]["accepted_before"] <= 3 and 0 <= result["held_out"]["accepted_after"] <= 3
    assert result["settings"]["adaptation"]["r"] == 4


def test_the_adapter_loads_in_plain_peft(adapted, folders):
    from peft import PeftModel

    draft = AutoModelForCausalLM.from_pretrained(folders[1])
    assert PeftModel.from_pretrained(draft, adapted)(torch.tensor([[5, 6]])).logits.shape == (1, 2, 97)


def test_card_is_written_anew_from_the_run_beside_it(adapted):
    card = adapted / "README.md"
    before = card.read_text()
    result = json.loads((adapted / "run.json").read_text())
    assert f"| {result['held_out']['accepted_after']:.2f} |" in before
    result["held_out"]["accepted_after"] = 2.345
    (adapted / "run.json").write_text(json.dumps(result))
    assert main(["card", str(adapted)]) == 0
    assert "| 2.34 |" in card.read_text() or "| 2.35 |" in card.read_text()
    assert card.read_text().startswith("---\n") and "acceptance.png" in card.read_text()


def test_resume_goes_on_from_the_folder(adapted, folders, stream, capsys):
    before = [json.loads(line) for line in (adapted / "history.jsonl").read_text().splitlines()]
    arguments = ["--tokens", "8", "--held-out", "0", "--limit", "2", "--resume"]
    assert main(["adapt", *folders, "--prompts", stream, "--output", str(adapted), *arguments]) == 0
    after = [json.loads(line) for line in (adapted / "history.jsonl").read_text().splitlines()]
    assert after[: len(before)] == before and "loaded" in [event["event"] for event in after[len(before) :]]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--adaptation", '{"rank": 4}'], "rank"),
        (["--adaptation", '{"r": 0}'], "`r` is 0"),
        (["--held-out", "10"], "--held-out is 10"),
        (["--passes", "0"], "--passes is 0"),
        (["--resume"], "neither a folder"),
    ],
)
def test_what_the_user_gave_wrong(folders, stream, tmp_path, capsys, arguments, says):
    code = main(
        ["adapt", *folders, "--prompts", stream, "--tokens", "2", "--output", str(tmp_path / "out"), *arguments]
    )
    error = capsys.readouterr().err
    assert code == 2 and says in error and error.count("\n") == 1


def test_card_without_a_run_is_refused(tmp_path, capsys):
    assert main(["card", str(tmp_path)]) == 2
    assert "holds no measured run" in capsys.readouterr().err
