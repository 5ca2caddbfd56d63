# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Whatever happens to the trainer, the text goes on, the memory is freed and the user is told once."""

from __future__ import annotations

import logging
import threading
import time

import pytest
import torch
from toy_serving import MarkovTarget, plain_text, random_prompts, serve, teach

from hf_saguaro.adaptation import trainer as trainer_module
from hf_saguaro.adaptation.gate import ShadowGate
from hf_saguaro.adaptation.learner import Learner
from hf_saguaro.adaptation.publisher import Publisher
from hf_saguaro.adaptation.student import Student
from hf_saguaro.adaptation.weights import DraftWeights


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(trainer_module, "PAUSE_AFTER_FAILURE_SECONDS", 0.01)


@pytest.fixture
def warnings():
    """The package's warnings, as text."""
    messages = []

    class Handler(logging.Handler):
        def emit(self, record):
            messages.append(record.getMessage())

    logger, handler = logging.getLogger("transformers.hf_saguaro.adaptation"), Handler(logging.WARNING)
    logger.addHandler(handler)
    yield lambda: messages
    logger.removeHandler(handler)


STAGES = {
    "forward": (Student, "logits"),
    "backward": (Learner, "_accumulate"),
    "snapshot": (Student, "snapshot"),
    "gate": (ShadowGate, "examine"),
    "merge": (DraftWeights, "merge"),
    "stage": (Publisher, "stage_candidate"),
}
ERRORS = {"error": RuntimeError("broken"), "memory": torch.OutOfMemoryError("no memory left")}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_trainer_that_fails_never_stops_generation(make_adapter, monkeypatch, warnings, stage, error):
    target = MarkovTarget()
    adapter = make_adapter(validate=stage == "gate", train_every_tokens=16, max_train_fraction=1.0)

    def fail(*args, **kwargs):
        raise ERRORS[error]

    monkeypatch.setattr(*STAGES[stage], fail)
    adapter.resume()
    deadline = time.monotonic() + 30
    seed = 0
    while adapter.metrics()["trainer"] != "off" and time.monotonic() < deadline:
        prompts = random_prompts(3, seed=seed)
        texts = serve(adapter, adapter.draft, target, prompts, new_tokens=8).texts
        assert texts == [plain_text(target, prompt, len(text)) for prompt, text in zip(prompts, texts)]
        if stage == "gate":  # it asks for held-out text
            teach(adapter, target, random_prompts(40, seed=seed))
        seed += 1

    assert adapter.metrics()["trainer"] == "off", adapter.history()
    failed = [event for event in adapter.history() if event["event"] == "trainer failed"]
    assert len(failed) == 3 and str(ERRORS[error]) in failed[0]["reason"]
    assert len([message for message in warnings() if "trainer failed" in message]) == 1
    teach(adapter, target, random_prompts(3))
    assert adapter.metrics()["buffer_rows"] == 0 and adapter.metrics()["buffer_bytes"] == 0
    adapter._trainer.stop(30)
    assert adapter._trainer.loop is None and adapter.version == 0
    assert not adapter.flush(1)


def test_one_failure_is_forgiven(make_adapter, monkeypatch, warnings):
    adapter, target = make_adapter(validate=False), MarkovTarget()
    with monkeypatch.context() as patch:
        patch.setattr(Student, "logits", lambda *args: 1 / 0)
        teach(adapter, target, random_prompts(4))
        assert not adapter.flush(60)
        assert adapter.metrics()["buffer_rows"] == 0
    teach(adapter, target, random_prompts(4))
    assert adapter.flush(60) and adapter.version == 1
    assert len(warnings()) == 1


def test_a_trainer_off_for_good_takes_its_adapter_along(make_adapter, monkeypatch):
    """Nobody would notice any more if the adapter became worse than the bare draft."""
    adapter, target = make_adapter(validate=False), MarkovTarget()
    teach(adapter, target, random_prompts(4))
    assert adapter.flush(60) and adapter.version == 1
    monkeypatch.setattr(Student, "logits", lambda *args: 1 / 0)
    for _ in range(3):
        teach(adapter, target, random_prompts(4))
        adapter.flush(60)
    serve(adapter, adapter.draft, target, random_prompts(1))
    assert adapter.version == 0
    assert all(torch.equal(now, own) for now, own in zip(adapter._weights.serving, adapter._weights.pristine))


def test_a_hung_trainer_never_stops_generation_or_close(make_adapter, monkeypatch, warnings):
    target, release = MarkovTarget(), threading.Event()
    adapter = make_adapter(train_every_tokens=16)
    monkeypatch.setattr(trainer_module, "HANG_SECONDS", 0.2)
    monkeypatch.setattr("hf_saguaro.adaptation.adapter.CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(Student, "logits", lambda *args: release.wait(30))
    try:
        adapter.resume()
        prompts = random_prompts(4)
        assert len(serve(adapter, adapter.draft, target, prompts).texts) == 4
        assert not adapter.flush(0.1)
        time.sleep(0.3)
        assert len(serve(adapter, adapter.draft, target, prompts).texts) == 4
        assert adapter.metrics()["trainer"] == "off" and adapter.metrics()["buffer_rows"] == 0
        assert "trainer hung" in [event["event"] for event in adapter.history()]
        began = time.monotonic()
        adapter.close()
        assert time.monotonic() - began < 5
    finally:
        release.set()
    assert [message for message in warnings() if "trainer hung" in message]


def test_a_publication_that_fails_gives_the_bare_draft_back(make_adapter, monkeypatch):
    adapter, target = make_adapter(validate=False), MarkovTarget()
    real_write = DraftWeights.write

    def torn(self, tensors):
        if tensors is not self.pristine:
            self.serving[0].data.copy_(tensors[0])
            raise RuntimeError("torn")
        real_write(self, tensors)

    monkeypatch.setattr(DraftWeights, "write", torn)
    teach(adapter, target, random_prompts(4))
    adapter.flush(60)
    serve(adapter, adapter.draft, target, random_prompts(1))
    assert "torn" in next(e["reason"] for e in adapter.history() if e["event"] == "publication failed")
    assert adapter.version == 0
    assert all(torch.equal(now, own) for now, own in zip(adapter._weights.serving, adapter._weights.pristine))


def test_feedback_that_cannot_be_read_never_stops_generation(make_adapter, warnings):
    adapter = make_adapter()
    session = adapter.begin([torch.tensor([1, 2])])
    for _ in range(3):
        session.observe(0, torch.tensor([4]), 1, 5, None)
    session.end()
    session.end()
    assert len(warnings()) == 1 and adapter.history()[-1]["event"] == "collecting failed"


@pytest.fixture
def two_torch_threads():
    """More than the trainer's one, so that a count it leaves behind shows."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def test_close_leaves_no_thread(make_adapter, two_torch_threads):
    adapter = make_adapter(train_every_tokens=16, max_train_fraction=1.0)
    adapter.resume()
    teach(adapter, MarkovTarget(), random_prompts(20))
    assert "hf_saguaro-trainer" in [thread.name for thread in threading.enumerate()]
    counts = []
    fresh = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
    fresh.start(), fresh.join()
    assert torch.get_num_threads() == 2 and counts == [2]  # the trainer's single thread is its own affair
    adapter.close()
    assert "hf_saguaro-trainer" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.timed
def test_training_takes_no_more_than_its_share_of_time(make_adapter, monkeypatch):
    adapter = make_adapter(train_every_tokens=8, max_train_fraction=0.1)
    monkeypatch.setattr(Learner, "step", lambda *args: time.sleep(0.02))
    adapter.resume()
    began = time.monotonic()
    while time.monotonic() - began < 2:
        teach(adapter, MarkovTarget(), random_prompts(2), new_tokens=8)
        time.sleep(0.02)
    spent = adapter.metrics()["train_seconds"]
    # A quarter of its share, since nothing was published; one step may have begun just before the end.
    assert 0.02 <= spent <= 0.25 * 0.1 * (time.monotonic() - began) + 0.02 + 0.05


def test_pause_stops_training_but_not_collecting(make_adapter):
    adapter = make_adapter(train_every_tokens=8, max_train_fraction=1.0)
    teach(adapter, MarkovTarget(), random_prompts(4))
    time.sleep(0.2)
    assert adapter.metrics()["steps"] == 0 and adapter.metrics()["rows"] == 64
    assert adapter.metrics()["trainer"] == "paused"
    adapter.resume()
    deadline = time.monotonic() + 30
    while not adapter.metrics()["steps"] and time.monotonic() < deadline:
        time.sleep(0.02)
    assert adapter.metrics()["steps"] >= 1


def test_two_calls_at_once_swap_only_when_one_is_alone(make_adapter):
    adapter, target = make_adapter(validate=False), MarkovTarget()
    teach(adapter, target, random_prompts(4))
    one, two = adapter.begin([torch.tensor([1])]), adapter.begin([torch.tensor([2])])
    assert adapter.flush(60)
    adapter.before_round()
    assert adapter.version == 0
    two.end()
    adapter.before_round()
    assert adapter.version == 1
    one.end()


def test_many_threads_may_serve_while_it_learns(make_adapter):
    target = MarkovTarget()
    adapter = make_adapter(train_every_tokens=16, max_train_fraction=1.0, validate=False)
    adapter.resume()
    failures = []

    def work(seed):
        prompts = random_prompts(5, seed=seed)
        texts = serve(adapter, adapter.draft, target, prompts, new_tokens=8).texts
        if texts != [plain_text(target, prompt, len(text)) for prompt, text in zip(prompts, texts)]:
            failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads) and not failures
