# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Saving and loading an adapter: PEFT's files for everyone, one more file to resume from."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..errors import SaguaroError
from .config import AdaptationConfig
from .feedback import Branch, FeedbackSequence
from .losses import TeacherRows
from .weights import Adapter


if TYPE_CHECKING:
    from .adapter import OnlineAdapter
    from .loop import TrainingLoop


ADAPTER_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
STATE_FILE = "adaptation_state.safetensors"
FEEDBACK_FILE = "feedback.safetensors"  # token ids of the traffic: never uploaded
HISTORY_FILE = "history.jsonl"
_PEFT_PREFIX = "base_model.model."


@dataclass
class Saved:
    """Everything that a save holds. `values` is JSON-safe."""

    config: AdaptationConfig
    base: str
    values: dict[str, Any]
    learner: dict[str, torch.Tensor]
    adapters: dict[int, Adapter]
    current: Adapter | None = None
    peft_config: Any = None
    feedback: dict[str, list[FeedbackSequence]] | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)


def snapshot(adapter: OnlineAdapter, loop: TrainingLoop, save_feedback: bool) -> Saved:
    """The state between two steps; runs on the trainer's thread."""
    publisher, buffer = loop.publisher, loop.buffer
    learner, learner_values = loop.learner.state()
    state = publisher.state()
    current = publisher.adapter_of(state["adapter_version"])
    if current is None:  # nothing published: an adapter that changes nothing
        current = {name: (a, torch.zeros_like(b)) for name, (a, b) in loop.learner.student.snapshot().items()}
    return Saved(
        config=adapter.config,
        base=loop.base(),
        values={
            "learner": learner_values,
            "loop": loop.state(),
            "buffer": buffer.state(),
            "publisher": state,
        },
        learner=learner,
        adapters={version: publisher.adapter_of(version) for version in state["kept_versions"]},
        current=current,
        peft_config=loop.learner.student.peft_config,
        feedback=buffer.contents() if save_feedback else None,
        metrics=adapter.metrics(),
        history=adapter.history(),
    )


def write(saved: Saved, directory: str | os.PathLike, name: str | None = None) -> None:
    """Writes a save, whose card calls it `name`. Each file is complete before it takes its own name; the state, which
    alone is read back, comes last."""
    from ..hub.model_card import adapter_card

    directory, save_id = Path(directory), uuid.uuid4().hex
    base_model = saved.peft_config.base_model_name_or_path
    card = adapter_card(name or str(directory), base_model, saved.history, saved.metrics)

    def fill(aside: Path) -> None:
        write_adapter(aside, saved.current, saved.peft_config, saved.base)
        (aside / HISTORY_FILE).write_text("".join(json.dumps(event) + "\n" for event in saved.history))
        (aside / "README.md").write_text(card)
        if saved.feedback is not None:
            _write_feedback(aside / FEEDBACK_FILE, saved.feedback, save_id)
        _write_state(aside / STATE_FILE, saved, save_id)

    write_files(directory, fill, last=STATE_FILE)
    if saved.feedback is None:
        (directory / FEEDBACK_FILE).unlink(missing_ok=True)


def write_files(directory: Path, fill: Callable[[Path], Any], last: str) -> None:
    """Lets `fill` write files into a folder aside, then renames each into `directory`; the one named `last` comes last."""
    directory.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".saving-", dir=directory))
    try:
        fill(aside)
        for name in sorted((path.name for path in aside.iterdir()), key=lambda name: (name == last, name)):
            _flush_to_disk(aside / name)
            os.replace(aside / name, directory / name)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_adapter(directory: Path, adapter: Adapter, peft_config: Any, base: str) -> None:
    """`adapter_config.json` and `adapter_model.safetensors`, as `PeftModel.from_pretrained` reads them; the weights also
    carry the fingerprint of the draft that they belong to."""
    tensors = {}
    for name, (a, b) in adapter.items():
        tensors[f"{_PEFT_PREFIX}{name}.lora_A.weight"] = a.cpu().contiguous()
        tensors[f"{_PEFT_PREFIX}{name}.lora_B.weight"] = b.cpu().contiguous()
    save_file(tensors, directory / ADAPTER_FILE, metadata={"format": "pt", "base_fingerprint": base})
    peft_config.save_pretrained(str(directory))


def read_adapter(directory: str | os.PathLike, names: list[str], config: AdaptationConfig) -> tuple[Adapter, str]:
    """The LoRA matrices of a folder written by `write_adapter`, for `config.scale`, and the draft's fingerprint.

    Args:
        names (`list[str]`): the modules that the adapter must have; the result is in their order.

    Raises:
        SaguaroError: where a file is missing or torn, or the adapter has other modules, another rank, or does not say
            which draft it belongs to.
    """
    path = Path(directory) / ADAPTER_FILE
    tensors, metadata = _read(path)
    base = metadata.get("base_fingerprint")
    if base is None:
        raise SaguaroError(f"{path} does not say which draft it was trained for; save it with `OnlineAdapter`.")
    keys = {name: [f"{_PEFT_PREFIX}{name}.lora_{letter}.weight" for letter in "AB"] for name in names}
    if {key for pair in keys.values() for key in pair} != set(tensors):
        raise SaguaroError(
            f"{path} adapts other modules than this adapter; use the same `layers` and `target_modules`."
        )
    try:
        written = json.loads((Path(directory) / CONFIG_FILE).read_text())
        rank, scale = written["r"], written["lora_alpha"] / written["r"]
    except (OSError, ValueError, KeyError) as error:
        raise SaguaroError(f"{Path(directory) / CONFIG_FILE} cannot be read: {error!r}.") from error
    if rank != config.r:
        raise SaguaroError(f"{path} has rank {rank}, this adapter has {config.r}; use the same `r`.")
    return {name: (tensors[a], tensors[b] * (scale / config.scale)) for name, (a, b) in keys.items()}, base


def read(directory: str | os.PathLike) -> Saved:
    """Reads a save from a folder or a Hub repository.

    Raises:
        SaguaroError: where there is none.
    """
    folder = Path(directory)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(str(directory)))
        except Exception as error:
            raise SaguaroError(
                f"{directory} is neither a folder nor a repository that can be downloaded: {error}"
            ) from error
    tensors, metadata = _read(folder / STATE_FILE)
    values = json.loads(metadata["values"])
    adapters: dict[int, Adapter] = {}
    for version in values["publisher"]["kept_versions"]:
        names = values["modules"]
        adapters[version] = {
            name: (tensors[f"adapter.{version}.{name}.A"], tensors[f"adapter.{version}.{name}.B"]) for name in names
        }
    prefix = "learner."
    return Saved(
        config=AdaptationConfig.from_dict(values["config"]),
        base=values["base"],
        values=values,
        learner={key[len(prefix) :]: tensor for key, tensor in tensors.items() if key.startswith(prefix)},
        adapters=adapters,
        feedback=_read_feedback(folder / FEEDBACK_FILE, values["save_id"]),
        history=values["history"],
    )


def restore(adapter: OnlineAdapter, loop: TrainingLoop, saved: Saved) -> None:
    """Puts a save into a new adapter, before any of its threads runs.

    Raises:
        SaguaroError: where it was saved for another draft.
    """
    base = loop.base()
    if saved.base != base or saved.values["modules"] != loop.publisher.weights.names:
        raise SaguaroError(
            f"the saved adapter belongs to another draft (fingerprint {saved.base}, this one has {base}): the weights, "
            "their dtype or their names differ. Load the draft that it was trained for, in the same dtype and unadapted."
        )
    device = loop.learner.student.device
    adapters = {
        version: {name: (a.to(device), b.to(device)) for name, (a, b) in one.items()}
        for version, one in saved.adapters.items()
    }
    loop.learner.load_state(saved.learner, saved.values["learner"])
    loop.load_state(saved.values["loop"])
    loop.buffer.load_state(saved.values["buffer"])
    if saved.feedback is not None:
        loop.buffer.load_contents(saved.feedback)
    loop.history.extend(saved.history)
    loop.publisher.load_state(saved.values["publisher"], adapters)
    loop.history.add("loaded", "resumed from a save", version=loop.publisher.version)


def push(saved: Saved, repo_id: str, *, private: bool | None, token: str | None, commit_message: str) -> Any:
    """Uploads a save without feedback."""
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    with tempfile.TemporaryDirectory() as folder:
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        write(saved, folder, name=repo_id)
        return api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=commit_message)


def _write_state(path: Path, saved: Saved, save_id: str) -> None:
    tensors = {f"learner.{key}": tensor.contiguous() for key, tensor in saved.learner.items()}
    for version, one in saved.adapters.items():
        for name, (a, b) in one.items():
            tensors[f"adapter.{version}.{name}.A"], tensors[f"adapter.{version}.{name}.B"] = a.cpu(), b.cpu()
    values = saved.values | {
        "config": saved.config.to_dict(),
        "base": saved.base,
        "modules": list(saved.current),
        "history": saved.history,
        "save_id": save_id,
    }
    save_file(tensors, path, metadata={"values": json.dumps(values)})


def _write_feedback(path: Path, feedback: dict[str, list[FeedbackSequence]], save_id: str) -> None:
    tensors, values = {}, {}
    for shelf, sequences in feedback.items():
        values[shelf] = []
        for index, sequence in enumerate(sequences):
            key = f"{shelf}.{index}"
            _put_text(tensors, key, sequence.tokens, sequence.teacher)
            for number, branch in enumerate(sequence.branches):
                _put_text(tensors, f"{key}.{number}", branch.tokens, branch.teacher)
            plain = ("start", "first", "temperature", "version", "held_out", "outside_vocabulary", "number")
            values[shelf].append(
                {name: getattr(sequence, name) for name in plain}
                | {"branches": [branch.row for branch in sequence.branches], "rounds": list(sequence.rounds.items())}
            )
    save_file(tensors, path, metadata={"values": json.dumps(values), "save_id": save_id})


def _read_feedback(path: Path, save_id: str) -> dict[str, list[FeedbackSequence]] | None:
    if not path.exists():
        return None
    tensors, metadata = _read(path)
    if metadata["save_id"] != save_id:  # of a save that a crash cut short
        return None
    feedback: dict[str, list[FeedbackSequence]] = {}
    for shelf, entries in json.loads(metadata["values"]).items():
        feedback[shelf] = []
        for index, values in enumerate(entries):
            key = f"{shelf}.{index}"
            rows, rounds = values.pop("branches"), values.pop("rounds")
            tokens, teacher = _get_text(tensors, key)
            branches = [Branch(row, *_get_text(tensors, f"{key}.{number}")) for number, row in enumerate(rows)]
            sequence = FeedbackSequence(tokens=tokens, teacher=teacher, branches=branches, **values)
            sequence.rounds = dict(map(tuple, rounds))
            feedback[shelf].append(sequence)
    return feedback


def _put_text(tensors: dict[str, torch.Tensor], key: str, tokens: torch.Tensor, teacher: TeacherRows) -> None:
    tensors[f"{key}.tokens"] = tokens
    for name, tensor in teacher._asdict().items():
        tensors[f"{key}.{name}"] = tensor.contiguous()


def _get_text(tensors: dict[str, torch.Tensor], key: str) -> tuple[torch.Tensor, TeacherRows]:
    return tensors[f"{key}.tokens"], TeacherRows(*(tensors[f"{key}.{name}"] for name in TeacherRows._fields))


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    if not path.exists():
        raise SaguaroError(f"{path} does not exist; save one with `OnlineAdapter.save_pretrained`.")
    try:
        with safe_open(path, framework="pt") as file:
            keys = file.keys()
            return {key: file.get_tensor(key) for key in keys}, file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise SaguaroError(f"{path} cannot be read ({error}); it is torn or no safetensors file.") from error


def _flush_to_disk(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
