# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""What a person and a machine read of a measured run: the table, the JSON, and the speculation report."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from ..errors import SaguaroError
from .prompts import COLUMNS


def table(arms: dict[str, dict[str, Any]]) -> str:
    """The arms side by side."""
    header = ["arm", "tok/s", "low..high", "ratio", "accepted/round", "hit rate", "prefill s", "identical", "gap"]
    rows = []
    for name, arm in arms.items():
        low, high = arm["spread"]
        rows.append(
            [
                name,
                f"{arm['tokens_per_second']:.2f}",
                f"{low:.2f}..{high:.2f}",
                f"{arm['ratio_to_plain']:.2f}",
                _number(arm["accepted_per_round"]),
                _number(arm["hit_rate"]),
                f"{arm['prefill_seconds']:.2f}",
                f"{arm['identical']}/{arm['prompts']}",
                _number(arm["largest_gap"], 3),
            ]
        )
    return _aligned(header, rows)


def time_table(arms: dict[str, dict[str, Any]]) -> str:
    """Where the seconds of one repeat went; empty when no arm tells."""
    parts = ("verify", "wait", "other", "draft")
    rows = [[name, *(f"{arm['time'][part]:.2f}" for part in parts)] for name, arm in arms.items() if arm["time"]]
    if not rows:
        return ""
    return _aligned(["seconds", "verify", "wait", "other", "draft worked"], rows)


def column_table(arms: dict[str, dict[str, Any]]) -> str:
    """Spec-Bench's view: the ratio to plain in each of its six columns, over all, and mean accepted tokens."""
    found = list(next(iter(arms.values()))["columns"])
    columns = [*COLUMNS, *(column for column in found if column not in COLUMNS)]
    rows = []
    for name, arm in arms.items():
        cells = [arm["columns"].get(column) for column in columns]
        ratios = [_number(cell and cell["ratio_to_plain"]) for cell in cells]
        rows.append([name, *ratios, f"{arm['ratio_to_plain']:.2f}", f"{arm['mean_accepted_tokens']:.2f}"])
    return _aligned(["ratio", *columns, "overall", "mean accepted tokens"], rows)


def write_json(result: dict[str, Any], path: str | Path) -> None:
    """Writes a result; a folder that is missing is made."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise SaguaroError(f"cannot write {path}: {error}. Name a file in a folder that can be written.") from None


def check_report(folder: str | None) -> None:
    """Says before a long run, not after it, that a report cannot be drawn."""
    if folder is not None:
        pyplot("--report")
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SaguaroError(f"cannot make the folder {folder}: {error}. Name another with --report.") from None


def speculation_report(arms: dict[str, dict[str, Any]], folder: str | Path) -> tuple[Path, Path]:
    """Draws what speculation did: accept lengths, hits by accept length, and the time split.

    Args:
        arms (`dict`): the `"arms"` of a result; those without figures of their own rounds are left out.
        folder (`str`): gets `speculation.png` and `speculation.md`.

    Raises:
        SaguaroError: when no arm has such figures, or matplotlib is missing.
    """
    told = {name: arm for name, arm in arms.items() if arm["stats"] and "accepted_by_depth" in arm["stats"]}
    if not told:
        raise SaguaroError(
            "no arm of this run speculated with figures to show; a report needs one of saguaro, sync, async."
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    picture, page = folder / "speculation.png", folder / "speculation.md"
    _draw(told, picture)
    page.write_text(_page(told, picture.name), encoding="utf-8")
    return picture, page


def _draw(arms: dict[str, dict[str, Any]], path: Path) -> None:
    plot = pyplot("--report")
    figure, (lengths, hits, time) = plot.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    width = 0.8 / len(arms)
    for i, (name, arm) in enumerate(arms.items()):
        stats = arm["stats"]
        counts = stats["accepted_by_depth"]
        places = [depth + (i - (len(arms) - 1) / 2) * width for depth in range(len(counts))]
        lengths.bar(places, [count / max(sum(counts), 1) for count in counts], width, color=f"C{i}", label=name)
        if stats["cache_hits"]:
            by_depth = stats.get("hits_by_depth", [])
            seen = [hit / count if count else 0.0 for hit, count in zip(by_depth, counts)]
            hits.bar(places[: len(seen)], seen, width, color=f"C{i}")
            hits.axhline(arm["hit_rate"], color=f"C{i}", linestyle="--", label=f"{name}, all rounds")
    lengths.set(title="Accept lengths", xlabel="draft tokens accepted in a round", ylabel="share of rounds")
    hits.set(
        title="Outcomes that were prepared", xlabel="draft tokens accepted in a round", ylabel="hit rate", ylim=(0, 1)
    )
    for axes in (lengths, hits):
        axes.xaxis.set_major_locator(plot.MaxNLocator(integer=True))
    left = [0.0] * len(arms)
    for part in ("verify", "wait", "other"):
        seconds = [arm["time"][part] for arm in arms.values()]
        time.barh(list(arms), seconds, left=left, label=part)
        left = [so_far + more for so_far, more in zip(left, seconds)]
    worked = [arm["time"]["draft"] for arm in arms.values()]
    time.barh(list(arms), worked, height=0.15, color="black", label="draft worked")
    time.invert_yaxis()
    time.set(title="Time of the decoding", xlabel="seconds")
    for axes in (lengths, hits, time):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    plot.close(figure)


def _page(arms: dict[str, dict[str, Any]], picture: str) -> str:
    depths = max(len(arm["stats"]["accepted_by_depth"]) for arm in arms.values())
    header = ["arm", "rounds", "hit rate", "tokens/round", "on hit", "on miss", "predicted", "measured",
              *(f"accepted {depth}" for depth in range(depths))]  # fmt: skip
    rows = []
    for name, arm in arms.items():
        stats = arm["stats"]
        missed = stats["tokens_in_rounds"] - stats["tokens_on_hit"]
        counts = stats["accepted_by_depth"]
        rows.append(
            [
                name,
                str(stats["rounds"]),
                _number(arm["hit_rate"]),
                f"{arm['mean_accepted_tokens']:.2f}",
                _number(stats["tokens_on_hit"] / stats["cache_hits"] if stats["cache_hits"] else None),
                _number(missed / stats["cache_misses"] if stats["cache_misses"] else None),
                _number(stats.get("predicted_speedup")),
                f"{arm['ratio_to_plain']:.2f}",
                *(str(count) for count in counts),
                *("0" for _ in range(depths - len(counts))),
            ]
        )
    lines = [header, ["---"] * len(header), *rows]
    body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return (
        f"# Speculation report\n\n![accept lengths, hits, time]({picture})\n\n{body}\n\n"
        "`predicted` is Theorem 7 of arXiv 2603.03251 on what the run measured, `measured` the ratio to plain "
        "generate.\n"
    )


def pyplot(what: str):
    """matplotlib's pyplot, drawing into files.

    Raises:
        SaguaroError: where it is not installed; `what` says what needs it.
    """
    try:
        import matplotlib
    except ImportError:
        raise SaguaroError(f"{what} needs matplotlib; run `pip install 'hf-saguaro[bench]'`.") from None
    matplotlib.use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _aligned(header: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    lines = []
    for line in (header, *rows):
        first, *others = (cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths)))
        lines.append("  ".join((first, *others)))
    return "\n".join(lines)
