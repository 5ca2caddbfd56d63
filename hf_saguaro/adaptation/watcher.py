# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""Adapters from elsewhere: a running server looks for new ones and serves what passes its own gate."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from . import persistence
from .gate import Verdict


if TYPE_CHECKING:
    from .adapter import OnlineAdapter


class AdapterWatcher:
    """Polls a folder or a Hub repository for new adapters of an open [`OnlineAdapter`]'s draft.

        with AdapterWatcher(adapter, "me/my-draft-lora", seconds=300):
            ...

    What is found goes through the server's own gates on its own held-out traffic, and is then treated like any candidate:
    swapped in between two rounds, watched by the canary, recorded in `adapter.history()` with `origin`. A torn or foreign
    one is refused there, by name; one that comes before there is held-out text is tried again.

    Args:
        adapter (`OnlineAdapter`)
        source (`str` or `PathLike`): a folder that exists, or a Hub repository.
        seconds (`float`, *optional*, defaults to 60): between two looks.
    """

    def __init__(self, adapter: OnlineAdapter, source: str | os.PathLike, seconds: float = 60.0):
        self.adapter, self.source, self.seconds = adapter, source, seconds
        self._seen: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hf_saguaro-watcher", daemon=True)

    def poll(self) -> Verdict | None:
        """Looks once. The verdict on a new adapter, or `None` where there is none yet."""
        try:
            mark, folder = self._newest()
        except Exception as error:
            self.adapter.report("watcher cannot look", f"{self.source}: {type(error).__name__}: {error}")
            return None
        if mark is None or mark == self._seen:
            return None
        verdict = self.adapter.propose(folder, origin=f"{self.source}@{mark}")
        if verdict is not None:
            self._seen = mark
        return verdict

    def start(self) -> AdapterWatcher:
        """Looks from now on, on a thread of its own."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def __enter__(self) -> AdapterWatcher:
        return self.start()

    def __exit__(self, *exception) -> None:
        self.close()

    def _run(self) -> None:
        while not self._stop.wait(self.seconds):
            self.poll()

    def _newest(self) -> tuple[str | None, Path]:
        """What tells one adapter from another (a commit, or a hash of the file), and where its files are."""
        folder = Path(self.source)
        if folder.is_dir():
            file = folder / persistence.ADAPTER_FILE
            return (hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest() if file.exists() else None), folder
        from huggingface_hub import HfApi, snapshot_download

        commit = HfApi().repo_info(str(self.source)).sha
        if commit == self._seen:
            return commit, folder
        files = [persistence.ADAPTER_FILE, persistence.CONFIG_FILE]
        return commit, Path(snapshot_download(str(self.source), revision=commit, allow_patterns=files))
