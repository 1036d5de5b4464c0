"""torch's flight recorder on request: what a rank that hangs had begun in every process group, and what never ended.

The recorder keeps the last collectives of every group (2000 by default; `TORCH_FR_BUFFER_SIZE`) at no cost that can
be measured. A rank that hangs in a collective has let go of the interpreter's lock, so a thread of it can still answer
its witness. gloo's recorder leaves three things out, which readers have to know: an entry's state stays `scheduled`
(whether it ended is in `retired`), sends and receives are not recorded, and no group tells its ranks: they are added.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

MOST_ENTRIES = 300
"""Of the entries that ended, as many of the last are kept; of the others all."""
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""torch's functions: the first for gloo, the second for NCCL and only in builds that have it."""


class FlightThread:
    """Answers a rank's witness: for every byte that comes, the recorder's content and a line's end."""

    def __init__(self, requests_fd: int, answers_fd: int) -> None:
        """Takes both over: a pipe, at whose end the thread ends, and a file opened to append."""
        thread = threading.Thread(target=_answer, args=(requests_fd, answers_fd), name="flight-recorder", daemon=True)
        thread.start()


def _answer(requests_fd: int, answers_fd: int) -> None:
    try:
        while os.read(requests_fd, 1):
            left = json.dumps(dump()).encode() + b"\n"
            while left:
                left = left[os.write(answers_fd, left) :]
    except OSError:
        return
    finally:
        os.close(requests_fd)
        os.close(answers_fd)


def dump() -> dict[str, Any]:
    """What the recorder of this process holds, as torch tells it; `{}` without torch, or where it has no recorder."""
    if "torch.distributed" not in sys.modules:
        return {}
    from torch import _C

    found: dict[str, Any] = {}
    for name in _DUMPS:
        function = getattr(getattr(_C, "_distributed_c10d", None), name, None)
        if function is None:
            continue
        try:
            told = json.loads(function())
        except (RuntimeError, TypeError, ValueError):
            continue
        found = {**told, **found, "entries": [*found.get("entries", ()), *told.get("entries", ())]}
        for key in ("pg_status", "pg_config"):
            found[key] = {**found.get(key, {}), **(told.get(key) or {})}
    if found:
        found["entries"] = _last(found["entries"])
        found["pg_config"] = {name: told for name, told in found["pg_config"].items() if name} | _groups()
    return found


def _last(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ended = [place for place, entry in enumerate(entries) if entry.get("retired")]
    dropped = set(ended[:-MOST_ENTRIES])
    return [entry for place, entry in enumerate(entries) if place not in dropped]


def _groups() -> dict[str, Any]:
    """The ranks of every process group, in the shape in which NCCL's recorder tells them."""
    from torch.distributed import distributed_c10d

    try:
        world = distributed_c10d._world
        return {
            str(world.pg_names[group]): {
                "name": str(world.pg_names[group]),
                "desc": str(getattr(group, "group_desc", "")),
                "ranks": json.dumps(sorted(ranks, key=ranks.__getitem__)),
            }
            for group, ranks in list(world.pg_group_ranks.items())
        }
    except (AttributeError, KeyError, RuntimeError):  # torch's own bookkeeping, which may change
        return {}
