"""Published measurements beside ours: read from `results/reference`, each with what is known to be wrong in it.

`make reference` writes that folder anew from `published.json` beside this file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raybench.report.text import known, plain
from raybench.results.store import Writer, load

if TYPE_CHECKING:
    from raybench.results.reader import Results

_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Published:
    """One row of another work."""

    track: str
    """Ours, whose question it belongs to."""
    case: str
    source: str
    device: str
    num_ranks: int | None
    tokens_per_s: float | None
    step_time_s: float | None
    state_bytes: int | None
    printed: str
    """What else was printed, as it was."""
    known_wrong: str | None


def reference_folder() -> Path:
    """The folder of published numbers: in an installed wheel's data, or in a checkout."""
    installed = _PACKAGE / "_data" / "reference"
    return installed if installed.is_dir() else _PACKAGE.parent / "results" / "reference"


def load_references() -> Results:
    """All published numbers.

    Raises:
        StoreError: they cannot be read.
    """
    return load(reference_folder())


def published(references: Results) -> tuple[Published, ...]:
    """Every row, in the order of the works."""
    held = {(r["suite_id"], r["track"], r["case"]): r for r in references.ranks.to_dict("records")}
    rows = []
    for run in references.runs.to_dict("records"):
        told = json.loads(run["environment"])
        holds = held.get((run["suite_id"], run["track"], run["case"]), {})
        parts: list[Any] = [holds.get(f"{name}_bytes") for name in ("parameter", "gradient", "optimizer")]
        state = sum(map(int, parts)) if all(map(known, parts)) else None
        seconds = float(run["window_ns"]) / 1e9 if known(run["window_ns"]) else None
        rows.append(
            Published(
                track=str(run["track"]),
                case=str(run["case"]),
                source=plain(told["source"]),
                device=plain(run["device"]),
                num_ranks=int(run["num_ranks"]) if known(run["num_ranks"]) else None,
                tokens_per_s=float(run["tokens"]) / seconds if seconds and known(run["tokens"]) else None,
                step_time_s=seconds / float(run["num_steps"]) if seconds else None,
                state_bytes=state,
                printed=", ".join(f"{plain(name)} {plain(value)}" for name, value in told.get("printed", {}).items()),
                known_wrong=plain(told["known_wrong"]) if told.get("known_wrong") else None,
            )
        )
    return tuple(rows)


def write_references(folder: Path) -> None:
    """Write the published numbers as a results folder."""
    for work in json.loads(files("raybench.report").joinpath("published.json").read_text(encoding="utf-8")):
        writer = Writer(folder, work["suite_id"])
        for row in work["rows"]:
            writer.write_round(row["track"], row["case"], 1, 1, _tables(work, row))


def _tables(work: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The rows of one published case in our tables; what our columns cannot hold stays in `environment`."""
    columns = work["columns"] | row.get("columns", {})
    told = {"source": work["source"], "printed": row.get("printed", {}), "known_wrong": row.get("known_wrong")}
    run = {"status": "ok", "gate": "not_run", "environment": json.dumps(told, sort_keys=True), **columns}
    if (speed := row.get("tokens_per_s")) is not None:
        run["tokens"] = columns["num_steps"] * columns["tokens_per_step"]
        run["window_ns"] = round(run["tokens"] / speed * 1e9)
    elif (step_s := row.get("step_time_s")) is not None:
        run |= {"num_steps": 1, "window_ns": round(step_s * 1e9)}
    mib = row.get("state_mib")
    names = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
    held = {} if mib is None else {name: value * 2**20 for name, value in zip(names, mib, strict=True)}
    if (peak := row.get("peak_bytes")) is not None:
        held["peak_device_bytes"] = peak
    return {"runs": [run], "ranks": [{"rank": 0, **held}] if held else []}
