# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Records hold what an online adapter would have learned from; what is trained on them serves after the server's own gate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from toy_serving import MarkovTarget, random_prompts, teach, tiny_draft

from hf_saguaro import SaguaroError
from hf_saguaro.adaptation import (
    AdaptationConfig,
    AdapterWatcher,
    FeedbackRecorder,
    load_records,
    persistence,
    resolve,
    train_on_records,
)
from hf_saguaro.adaptation.learner import Learner
from hf_saguaro.adaptation.recorder import sequence_of


CONFIG = AdaptationConfig(layers="all", learning_rate=1e-2, publish_every_rounds=1, buffer_tokens=4096)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    with FeedbackRecorder(folder, shard_rows=400) as recorder:
        assert resolve(recorder, tiny_draft()) is recorder
        teach(recorder, MarkovTarget(), random_prompts(100), new_tokens=12)
    return folder


def test_records_are_the_feedback(records, make_adapter):
    assert len(list(records.glob("feedback-*.parquet"))) == 3
    adapter = make_adapter(buffer_tokens=100_000)
    teach(adapter, MarkovTarget(), random_prompts(100), new_tokens=12)
    online = {tuple(sequence.tokens.tolist()): sequence for sequence in sum(adapter._buffer.contents().values(), [])}
    dataset = load_records(records)
    assert dataset.num_rows == len(online) == 100
    for record in dataset:
        recorded = sequence_of(record)
        sequence = online[tuple(recorded.tokens.tolist())]
        assert (recorded.first, recorded.start, recorded.temperature) == (sequence.first, sequence.start, 0.0)
        assert all(torch.equal(one, other) for one, other in zip(recorded.teacher, sequence.teacher))
    assert 12 <= sum(dataset["held_out"]) <= 13


def test_training_on_records_writes_an_adapter_that_beats_the_bare_draft(records, tmp_path):
    draft = tiny_draft()
    before = [parameter.clone() for parameter in draft.parameters()]
    outcome = train_on_records(draft, records, tmp_path / "out", CONFIG, epochs=4)
    assert outcome["published"], outcome
    assert outcome["accepted_candidate"] > outcome["accepted_bare"] and outcome["steps"] == 4 * 11
    assert all(torch.equal(now, then) for now, then in zip(draft.parameters(), before))
    with torch.no_grad():
        tokens = torch.tensor([[1, 2, 3]])
        adapted = PeftModel.from_pretrained(tiny_draft(), tmp_path / "out")(tokens).logits
        assert not torch.allclose(adapted, draft(tokens).logits)
    assert (tmp_path / "out" / "README.md").exists()


def test_a_runs_rate_falls_to_its_end(records, tmp_path, monkeypatch):
    rates, step = [], Learner.step

    def seen(learner, *args, **kwargs):
        loss = step(learner, *args, **kwargs)
        rates.append(learner._optimizer.param_groups[0]["lr"])
        return loss

    monkeypatch.setattr(Learner, "step", seen)
    train_on_records(tiny_draft(), records, tmp_path / "out", CONFIG, epochs=4)
    assert max(rates) > 0.7 * CONFIG.learning_rate and rates[-1] < 0.05 * CONFIG.learning_rate
    assert rates[12:] == sorted(rates[12:], reverse=True)


def test_training_that_does_not_help_writes_nothing(records, tmp_path):
    config = AdaptationConfig(layers="all", learning_rate=0.0)
    outcome = train_on_records(tiny_draft(), records, tmp_path / "out", config)
    assert not outcome["published"] and outcome["reason"] == "no better than what serves"
    assert not (tmp_path / "out").exists()


def test_records_that_do_not_fit_are_refused(records, tmp_path):
    with pytest.raises(SaguaroError, match="vocab_size"):
        draft = tiny_draft()
        draft.resize_token_embeddings(32)
        train_on_records(draft, records, tmp_path / "out", CONFIG)
    with pytest.raises(SaguaroError, match="no feedback"):
        load_records(tmp_path)
    with pytest.raises(SaguaroError, match="discard_weight"):
        train_on_records(tiny_draft(), records, tmp_path, AdaptationConfig(discard_weight=0.1))


SCRIPT = """
import json
import sys
sys.path.insert(0, sys.argv[1])
import torch
from accelerate import Accelerator
from hf_saguaro.adaptation import AdaptationConfig, train_on_records
from toy_serving import tiny_draft
torch.set_num_threads(1)
accelerator = Accelerator(cpu=True)
config = AdaptationConfig(layers="all", learning_rate=1e-2)
size = int(sys.argv[4])
outcome = train_on_records(tiny_draft(), sys.argv[2], sys.argv[3], config, epochs=2, batch_size=size, accelerator=accelerator)
with open(f"{sys.argv[3]}.{accelerator.process_index}", "w") as file:
    json.dump([accelerator.num_processes, outcome["published"], outcome["steps"]], file)
"""


@pytest.mark.slow
def test_two_processes_learn_what_one_learns(records, tmp_path):
    """The same batches, halved between two processes: the same adapter up to rounding of the averaged gradients."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {
        **os.environ,
        "HF_DATASETS_CACHE": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    adapters = []
    for processes, size in ((1, 8), (2, 4)):
        output = tmp_path / f"out-{processes}"
        # What `accelerate launch` starts on GPUs; on CPUs it would need MPI for more than one process.
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        arguments = [str(script), str(Path(__file__).parent), str(records), str(output), str(size)]
        run = subprocess.run([*launch, *arguments], capture_output=True, text=True, timeout=300, env=environment)
        assert run.returncode == 0, run.stderr[-3000:]
        for index in range(processes):
            assert json.loads((tmp_path / f"out-{processes}.{index}").read_text()) == [processes, True, 22]
        adapters.append(persistence._read(output / persistence.ADAPTER_FILE)[0])
    for key in adapters[0]:
        torch.testing.assert_close(adapters[0][key], adapters[1][key], atol=2e-3, rtol=2e-2)


@pytest.fixture
def trained(records, tmp_path):
    assert train_on_records(tiny_draft(), records, tmp_path / "fleet", CONFIG, epochs=4)["published"]
    return tmp_path / "fleet"


def test_a_server_serves_what_passes_its_own_gate(make_adapter, trained):
    adapter = make_adapter()
    watcher = AdapterWatcher(adapter, trained)
    assert watcher.poll() is None and adapter.version == 0  # no held-out text yet: it is tried again
    teach(adapter, MarkovTarget(), random_prompts(40, seed=9))
    verdict = watcher.poll()
    assert verdict.passed and adapter.version == 1
    event = adapter.history()[-1]
    assert event["event"] == "published" and event["origin"].startswith(str(trained))
    assert event["accepted_candidate"] > event["accepted_bare"]
    assert watcher.poll() is None  # seen
    assert adapter.flush(60)  # its own learning goes on from there
    assert adapter.metrics()["steps"] > 0


def test_a_server_refuses_what_does_not_help_its_traffic(make_adapter, trained):
    adapter = make_adapter()
    teach(adapter, MarkovTarget(seed=5), random_prompts(40))
    verdict = AdapterWatcher(adapter, trained).poll()
    assert not verdict.passed and adapter.version == 0
    assert adapter.history()[-1]["event"] == "refused"


@pytest.mark.parametrize("fault", ["another draft", "other modules", "another rank", "torn"])
def test_a_server_refuses_strangers_by_name(make_adapter, trained, fault):
    config = {"another draft": {}, "other modules": {"layers": [0]}, "another rank": {"r": 2}, "torn": {}}[fault]
    adapter = make_adapter(tiny_draft(seed=4) if fault == "another draft" else None, **config)
    teach(adapter, MarkovTarget(), random_prompts(40))
    if fault == "torn":
        file = trained / persistence.ADAPTER_FILE
        file.write_bytes(file.read_bytes()[:-100])
    verdict = AdapterWatcher(adapter, trained).poll()
    expected = {"another draft": "wrong base", "other modules": "other modules", "another rank": "rank", "torn": "torn"}
    assert not verdict.passed and expected[fault] in verdict.reason
    assert adapter.version == 0 and adapter.history()[-1]["reason"] == verdict.reason


def test_another_scale_serves_the_same_weights(make_adapter, trained):
    one, two = make_adapter(), make_adapter(lora_alpha=32)
    for adapter in (one, two):
        teach(adapter, MarkovTarget(), random_prompts(40, seed=9))
        assert AdapterWatcher(adapter, trained).poll().passed
    for a, b in zip(one._weights.serving, two._weights.serving):
        torch.testing.assert_close(a, b)


def test_watching_thread_finds_a_new_adapter_and_ends(make_adapter, trained, tmp_path):
    adapter = make_adapter()
    teach(adapter, MarkovTarget(), random_prompts(40, seed=9))
    folder = tmp_path / "delivered"
    folder.mkdir()
    with AdapterWatcher(adapter, folder, seconds=0.05) as watcher:
        time.sleep(0.2)
        assert adapter.version == 0
        persistence.write_files(
            folder,
            lambda aside: [(aside / f.name).write_bytes(f.read_bytes()) for f in trained.iterdir()],
            persistence.ADAPTER_FILE,
        )
        deadline = time.monotonic() + 30
        while adapter.version == 0 and time.monotonic() < deadline:
            time.sleep(0.05)
    assert adapter.version == 1 and not watcher._thread.is_alive()


def test_a_hub_that_cannot_be_reached_is_reported_once_and_asked_again(make_adapter, monkeypatch):
    adapter = make_adapter()
    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", lambda *args, **kwargs: 1 / 0)
    watcher = AdapterWatcher(adapter, "me/nowhere")
    assert watcher.poll() is None and watcher.poll() is None
    assert adapter.history()[-1]["event"] == "watcher cannot look"


def test_a_shard_that_cannot_be_written_is_written_at_the_next_chance(tmp_path, monkeypatch):
    from hf_saguaro.adaptation import recorder as module

    stock, full = module._write_shard, [OSError("no space left")]

    def failing(directory, sequences):
        if full:
            raise full.pop()
        stock(directory, sequences)

    monkeypatch.setattr(module, "_write_shard", failing)
    with FeedbackRecorder(tmp_path, shard_rows=4) as recorder, pytest.raises(OSError, match="no space"):
        teach(recorder, MarkovTarget(), random_prompts(1), new_tokens=12)
    assert len(load_records(tmp_path)) == 1
