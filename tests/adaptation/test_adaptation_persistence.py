# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""What is saved loads in plain PEFT, goes on where it stopped, and never serves a draft it does not belong to."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from toy_serving import MarkovTarget, random_prompts, teach, tiny_draft

from hf_saguaro import SaguaroError
from hf_saguaro.adaptation import OnlineAdapter, persistence


TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9]])


def learn(adapter, parts, target=None):
    for part in parts:
        teach(adapter, target or MarkovTarget(), random_prompts(20, seed=part), new_tokens=12)
        assert adapter.flush(60)


def resumed(directory, draft=None):
    draft = tiny_draft() if draft is None else draft
    adapter = OnlineAdapter.from_pretrained(draft, directory)
    adapter.keeps_alive = draft
    adapter.pause()
    return adapter


def assert_same_files(one, other):
    names = {path.name for path in one.iterdir()}
    assert names == {path.name for path in other.iterdir()}
    tensors = persistence._read(one / persistence.STATE_FILE)[0], persistence._read(other / persistence.STATE_FILE)[0]
    assert tensors[0].keys() == tensors[1].keys()
    for key in tensors[0]:
        assert torch.equal(tensors[0][key], tensors[1][key]), key
    adapters = (
        persistence._read(one / persistence.ADAPTER_FILE)[0],
        persistence._read(other / persistence.ADAPTER_FILE)[0],
    )
    assert all(torch.equal(adapters[0][key], adapters[1][key]) for key in adapters[0])


@pytest.fixture
def saved(make_adapter, tmp_path):
    adapter = make_adapter(r=4, lora_alpha=8)
    learn(adapter, range(3))
    assert adapter.version >= 1
    adapter.save_pretrained(tmp_path / "adapter")
    return adapter, tmp_path / "adapter"


def test_plain_peft_serves_the_same(saved):
    adapter, directory = saved
    with torch.no_grad():
        expected = adapter.draft(TOKENS).logits
        model = PeftModel.from_pretrained(tiny_draft(), directory)
        torch.testing.assert_close(model(TOKENS).logits, expected, atol=1e-4, rtol=1e-4)
    config = json.loads((directory / "adapter_config.json").read_text())
    assert config["r"] == 4 and config["lora_alpha"] == 8 and config["peft_type"] == "LORA"


def test_before_any_publication_the_saved_adapter_changes_nothing(make_adapter, tmp_path):
    make_adapter().save_pretrained(tmp_path)
    with torch.no_grad():
        model = PeftModel.from_pretrained(tiny_draft(), tmp_path)
        assert torch.equal(model(TOKENS).logits, tiny_draft()(TOKENS).logits)


def test_a_resumed_adapter_serves_what_was_saved_at_once(saved):
    adapter, directory = saved
    with resumed(directory) as again:
        assert again.version == adapter.version and again.config == adapter.config
        for now, then in zip(again._weights.serving, adapter._weights.serving):
            assert torch.equal(now, then)
        events = again.history()
        assert events[-1]["event"] == "loaded"
        assert [event["event"] for event in events[:-1]] == [event["event"] for event in adapter.history()]
    assert all(torch.equal(tensor, own) for tensor, own in zip(tiny_draft().parameters(), again.draft.parameters()))


def test_resuming_with_the_feedback_is_bit_identical_to_never_stopping(saved, tmp_path):
    adapter, _ = saved
    adapter.save_pretrained(tmp_path / "half", save_feedback=True)
    learn(adapter, range(3, 6))
    adapter.save_pretrained(tmp_path / "whole", save_feedback=True)
    with resumed(tmp_path / "half") as again:
        learn(again, range(3, 6))
        again.save_pretrained(tmp_path / "again", save_feedback=True)
    assert again.metrics()["rounds"] == adapter.metrics()["rounds"]
    assert_same_files(tmp_path / "whole", tmp_path / "again")


def test_resuming_without_the_feedback_keeps_weights_moments_and_counters(saved, tmp_path):
    adapter, directory = saved
    with resumed(directory) as again:
        again.save_pretrained(tmp_path / "again")
    assert_same_files(directory, tmp_path / "again")


def test_no_text_is_saved_unless_asked(saved, tmp_path):
    adapter, directory = saved
    assert adapter.metrics()["buffer_rows"] > 0
    assert not (directory / persistence.FEEDBACK_FILE).exists()
    adapter.save_pretrained(directory, save_feedback=True)
    assert (directory / persistence.FEEDBACK_FILE).exists()
    adapter.save_pretrained(directory)
    assert not (directory / persistence.FEEDBACK_FILE).exists()
    assert (directory / "README.md").exists() and len((directory / "history.jsonl").read_text().splitlines()) >= 1


def other_weights():
    return tiny_draft(seed=2)


def other_dtype():
    return tiny_draft().to(torch.bfloat16)


def one_changed_weight():
    draft = tiny_draft()
    with torch.no_grad():
        draft.model.norm.weight[0] += 1e-3
    return draft


@pytest.mark.parametrize("stranger", [other_weights, other_dtype, one_changed_weight])
def test_another_draft_is_refused_and_left_as_it_was(saved, stranger):
    _, directory = saved
    draft = stranger()
    before = [parameter.clone() for parameter in draft.parameters()]
    with pytest.raises(SaguaroError, match="another draft"):
        OnlineAdapter.from_pretrained(draft, directory)
    assert all(torch.equal(now, then) for now, then in zip(draft.parameters(), before))
    OnlineAdapter(draft).close()  # nothing is left open


@pytest.mark.parametrize("torn", [persistence.ADAPTER_FILE, persistence.STATE_FILE, "README.md"])
def test_a_crash_while_saving_leaves_the_previous_save_whole(saved, monkeypatch, torn):
    adapter, directory = saved
    version = adapter.version
    learn(adapter, range(3, 6))
    real_replace = os.replace

    def crash(source, destination):
        if os.path.basename(destination) == torn:
            raise OSError("no space left")
        real_replace(source, destination)

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(OSError, match="no space"):
        adapter.save_pretrained(directory)
    monkeypatch.undo()
    with resumed(directory) as again:
        assert again.version == version
    PeftModel.from_pretrained(tiny_draft(), directory)
    assert not [path for path in directory.iterdir() if path.name.startswith(".saving")]


def test_what_is_no_save_is_refused(saved, tmp_path):
    _, directory = saved
    (tmp_path / "empty").mkdir()
    with pytest.raises(SaguaroError, match="does not exist"):
        OnlineAdapter.from_pretrained(tiny_draft(), tmp_path / "empty")
    shutil.copytree(directory, tmp_path / "torn")
    state = tmp_path / "torn" / persistence.STATE_FILE
    state.write_bytes(state.read_bytes()[:1000])
    with pytest.raises(SaguaroError, match="torn"):
        OnlineAdapter.from_pretrained(tiny_draft(), tmp_path / "torn")


def test_saving_while_it_learns_is_a_state_between_two_steps(make_adapter, tmp_path):
    adapter = make_adapter(train_every_tokens=16, max_train_fraction=1.0, validate=False)
    adapter.resume()
    for part in range(4):
        teach(adapter, MarkovTarget(), random_prompts(6, seed=part))
        adapter.save_pretrained(tmp_path)
        with resumed(tmp_path) as again:
            loop = again._trainer.loop
            steps = {float(state["step"]) for state in loop.learner._optimizer.state.values()}
            assert steps <= {float(loop.learner.steps)}


def test_push_uploads_the_save_without_feedback(saved, monkeypatch):
    adapter, _ = saved
    uploaded = {}

    class Api:
        def __init__(self, token=None):
            pass

        def create_repo(self, repo_id, private=None, exist_ok=False):
            return type("Repo", (), {"repo_id": repo_id})

        def upload_folder(self, repo_id, folder_path, commit_message):
            uploaded.update({path.name: path.read_bytes() for path in Path(folder_path).iterdir()})
            return repo_id

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    assert adapter.push_to_hub("me/my-draft-lora") == "me/my-draft-lora"
    assert persistence.FEEDBACK_FILE not in uploaded and persistence.ADAPTER_FILE in uploaded
    card = uploaded["README.md"].decode()
    assert "me/my-draft-lora" in card and "library_name: peft" in card and "accepted tokens a round" in card
