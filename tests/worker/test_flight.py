"""torch's flight recorder, as a rank hands it to its witness."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from raybench.worker import flight
from tests.pool import Rank


def _dump_after(rank: Rank, folder: str) -> tuple[dict, str]:
    """What the recorder holds once one operation of a group has ended and another, alone on rank 0, has not."""
    pair = dist.new_group([0, 1])
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=pair)
    hung = dist.broadcast(tensor, 1, group=pair, async_op=True) if rank.rank == 0 else None
    requests, request = os.pipe()
    file = Path(folder) / str(rank.rank)
    flight.FlightThread(requests, os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    end = time.monotonic() + 10
    told = _ask(request, file, end)
    while not _own(told, pair.group_name)[0]["retired"] and time.monotonic() < end:  # retired a moment after its end
        told = _ask(request, file, end)
    os.close(request)
    dist.barrier()
    if rank.rank == 1:
        dist.broadcast(tensor, 1, group=pair)
    if hung is not None:
        hung.wait()
    return told, pair.group_name


def _ask(request: int, file: Path, end: float) -> dict:
    """One more line of the recorder's content."""
    before = file.stat().st_size
    os.write(request, b"f")
    while file.stat().st_size == before or not file.read_bytes().endswith(b"\n"):
        assert time.monotonic() < end, "no answer"
        time.sleep(0.01)
    return json.loads(file.read_text().splitlines()[-1])


def _own(told: dict, group: str) -> list[dict]:
    return [entry for entry in told["entries"] if entry["process_group"][0] == group]


def test_a_rank_in_an_operation_tells_it_and_the_ranks_of_its_groups(pools, tmp_path):
    for rank, (told, group) in enumerate(pools(2).run(_dump_after, str(tmp_path))):
        entries = _own(told, group)
        expected = [("gloo:all_reduce", True), ("gloo:broadcast", False)][: 2 - rank]
        assert [(entry["profiling_name"], entry["retired"]) for entry in entries] == expected
        assert json.loads(told["pg_config"][group]["ranks"]) == [0, 1]
        assert "" not in told["pg_config"]


def test_of_what_has_ended_the_last_is_kept_and_of_the_rest_all():
    entries = [{"record_id": place, "retired": place % 100 != 0} for place in range(1000)]
    kept = [entry["record_id"] for entry in flight._last(entries)]
    ended = [place for place in range(1000) if place % 100]
    assert kept == sorted([*range(0, 1000, 100), *ended[-flight.MOST_ENTRIES :]])
