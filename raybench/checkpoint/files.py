"""Saves a strategy's states to a folder that all ranks share, and brings them back under another layout.

A checkpoint is written beside its place and renamed when every byte is on the disk: a save that is killed leaves the
last good one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as load_pieces
from torch.distributed.checkpoint.state_dict_saver import save as save_pieces

from raybench.checkpoint.planner import PARAMETER, ShardLoadPlanner, ShardSavePlanner, optimizer_rows, pieces
from raybench.errors import RequestError
from raybench.parallel.strategy import Held, Strategy
from raybench.worker.communication import Axis

COUNTERS = "counters.json"
"""What is not a tensor: the step, and by name what the optimizer counts and which rows it keeps."""


def save(strategy: Strategy, folder: Path, *, step: int, axis: Axis) -> Path:
    """Write the parameters and the optimizer's state after `step` steps to `folder/step-…`; all ranks of `axis` call.

    Returns:
        Where the checkpoint is.

    Raises:
        RequestError: the strategy's states cannot be told apart by parameter.
    """
    held = list(strategy.held_states())
    final, unfinished = folder / f"step-{step:09d}", folder / f".step-{step:09d}.unfinished"
    if axis.index == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    axis.barrier("checkpoint begins")
    save_pieces(
        {},
        storage_writer=FileSystemWriter(unfinished),
        planner=ShardSavePlanner(pieces(one for one in held if one.is_first_copy)),
        process_group=axis.group,
        no_dist=axis.size == 1,
    )
    axis.barrier("checkpoint written")
    if axis.index == 0:
        counters = _counters(held)
        (unfinished / COUNTERS).write_text(json.dumps({"step": step, **counters}))
        for path in (unfinished / COUNTERS, unfinished):
            _sync(path)
        if final.exists():
            shutil.rmtree(final)
        unfinished.rename(final)
        _sync(folder)
    axis.barrier("checkpoint in place")
    return final


def load(strategy: Strategy, folder: Path, *, axis: Axis) -> int:
    """Bring the newest checkpoint of `folder` (or `folder` itself, if it is one) into a new strategy.

    Returns:
        The number of steps after which it was saved.

    Raises:
        RequestError: there is none, it is of another model, or a file of it is missing or cut short.
    """
    checkpoint = newest(folder)
    metadata, counters = _read_index(checkpoint)
    held = list(strategy.held_states())
    _check_model(checkpoint, metadata, held)
    _check_files(checkpoint, metadata)
    for one in held:
        state = one.optimizer.state[one.trained]
        state.update({kind: torch.zeros_like(one.trained, requires_grad=False) for kind in counters["rows"]})
        device = one.trained.device
        state.update({kind: torch.tensor(float(value), device=device) for kind, value in counters["counts"].items()})
    load_pieces(
        {},
        storage_reader=FileSystemReader(checkpoint),
        planner=ShardLoadPlanner(pieces(held)),
        process_group=axis.group,
        no_dist=axis.size == 1,
    )
    strategy.states_loaded(counters["step"])
    return int(counters["step"])


def newest(folder: Path) -> Path:
    """The complete checkpoint of `folder` with the most steps."""
    if (folder / COUNTERS).exists():
        return folder
    complete = sorted(p for p in folder.glob("step-*") if re.fullmatch(r"step-\d+", p.name))
    if not complete:
        raise RequestError(f"checkpoint: {str(folder)!r} holds no complete one (allowed: a folder with step-… in it)")
    return complete[-1]


def _counters(held: Sequence[Held]) -> dict[str, Any]:
    first = held[0]
    state = first.optimizer.state.get(first.trained, {})
    rows = list(optimizer_rows(first.optimizer, first.trained))
    return {"rows": rows, "counts": {key: float(value) for key, value in state.items() if key not in rows}}


def _read_index(checkpoint: Path) -> tuple[Metadata, dict[str, Any]]:
    try:
        metadata = FileSystemReader(checkpoint).read_metadata()
        return metadata, json.loads((checkpoint / COUNTERS).read_text())
    except (OSError, ValueError, EOFError, UnpicklingError) as error:
        raise RequestError(f"checkpoint: {str(checkpoint)!r} cannot be read ({error})") from None


def _check_model(checkpoint: Path, metadata: Metadata, held: Sequence[Held]) -> None:
    prefix = f"{PARAMETER}/"
    rows = metadata.state_dict_metadata
    there = {key.removeprefix(prefix): row.size[0] for key, row in rows.items() if key.startswith(prefix)}  # type: ignore[union-attr]
    here = {name: length for one in held for name, length in one.parameters}
    for name in [*here, *there]:
        if here.get(name) != there.get(name):
            raise RequestError(
                f"checkpoint: {str(checkpoint)!r} is of another model: {name} has {there.get(name, 'no')} elements "
                f"there and {here.get(name, 'no')} in this workload"
            )


def _check_files(checkpoint: Path, metadata: Metadata) -> None:
    needed: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
    for name, size in sorted(needed.items()):
        path = checkpoint / name
        if not path.exists():
            raise RequestError(f"checkpoint: {str(path)!r} is missing")
        if path.stat().st_size < size:
            raise RequestError(
                f"checkpoint: {str(path)!r} is cut short: {path.stat().st_size} bytes, at least {size} were written"
            )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
