"""The sweep's driver on a played cluster: every case has a row, settings alternate, nothing is tried for ever."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from raybench.comm.driver import Outcome, Sweep, SweepRun
from raybench.comm.sweep import CommJob, SweepCase
from raybench.results.folder import StoreError
from raybench.results.store import load
from raybench.results.sweep_writer import SweepWriter
from raybench.suite.placement import NodePlacement, NodeShare
from raybench.suite.progress import Progress
from raybench.worker.messages import RoundRows
from tests.comm.made import ABOUT, timed
from tests.suite.fakes import QUICK, World

CASES = tuple(SweepCase(group="node", kind=kind, dtype="fp32") for kind in ("all_reduce", "all_gather", "send"))
REDUCE, GATHER, SEND = (case.name for case in CASES)


@dataclass
class SweepWorld(World):
    """Plays jobs of a sweep."""

    num_wrong: int = 0

    def num_ranks(self, job: CommJob, case: str) -> int:  # type: ignore[override]
        return job.world_size

    def _rows(self, rank: int, case: str, round: int, num_ranks: int) -> RoundRows:
        measured = [timed(size, 1000 + size, num_wrong=self.num_wrong) for size in self.jobs[-1].sizes]
        return RoundRows(rank, case, round, num_ranks, ABOUT, collectives=measured)


def sweep(**changes: Any) -> Sweep:
    nodes = (NodeShare("10.0.0.1", 2),)
    options: dict[str, Any] = {
        "suite_id": "s1",
        "cases": CASES,
        "sizes": (8, 64),
        "settings": {"default": {}},
        "layout": None,
        "num_rounds": 2,
        "budget_s": 12.0,
        "timeout_s": 1,
        "overlap": True,
        "backend": "gloo",
        "placement": NodePlacement.of(nodes, cpus_per_rank=1, use_gpu=False),
    }
    return Sweep(**{**options, **changes})


def play(world: World, folder: Path, **changes: Any) -> tuple[Outcome, list[tuple[Any, ...]]]:
    """How it ended, and the rows in the store: case, round, status and size."""
    writer = SweepWriter(folder, "s1", {})
    writer.check()
    outcome = SweepRun(
        sweep=sweep(**changes),
        store=writer,
        launcher=world,
        make_sink=world.make_sink,
        progress=Progress(io.StringIO()),
        patience=QUICK,
    ).run()
    frame = load(folder, of="collectives").collectives
    found = zip(frame.case, frame["round"], frame.status, frame.payload_bytes, strict=True)
    return outcome, sorted(found, key=str)


def test_one_setting_is_one_job(tmp_path: Path) -> None:
    world = SweepWorld()
    outcome, found = play(world, tmp_path)
    assert (outcome.errors, outcome.num_measured, len(world.jobs)) == ([], 6, 1)
    assert len(found) == 12
    assert {(status, size) for _, _, status, size in found} == {("ok", 8), ("ok", 64)}
    assert world.jobs[0].budget_s == 12
    assert [(key.case, key.round) for key in world.jobs[0].rounds][:4] == [
        (REDUCE, 1),
        (GATHER, 1),
        (SEND, 1),
        (REDUCE, 2),
    ]


def test_settings_have_jobs_of_their_own_that_alternate(tmp_path: Path) -> None:
    world = SweepWorld()
    settings = {"none": {}, "ll": {"NCCL_PROTO": "LL"}}
    outcome, found = play(world, tmp_path, settings=settings, num_rounds=3)
    assert outcome.errors == []
    told = [(job.environment.get("NCCL_PROTO"), {key.round for key in job.rounds}) for job in world.jobs]
    assert told == [(None, {1}), ("LL", {1}), ("LL", {2}), (None, {2}), (None, {3}), ("LL", {3})]
    assert sum(job.budget_s for job in world.jobs) == pytest.approx(12)
    assert {case for case, *_ in found} == {f"{s}-{c.name}" for s in settings for c in CASES}
    assert len(found) == 2 * 3 * 3 * 2


def test_who_breaks_a_job_is_left_out_and_the_rest_goes_on(tmp_path: Path) -> None:
    world = SweepWorld({(GATHER, 1): "late"})
    outcome, found = play(world, tmp_path)
    assert (GATHER, 1, "timeout") in [row[:3] for row in found]
    assert not [row for row in found if row[0] == GATHER and row[2] == "ok"]
    assert {row[:3] for row in found if row[0] == SEND} == {(SEND, 1, "ok"), (SEND, 2, "ok")}
    assert len(world.jobs) == 2
    assert [error.split(":")[0] for error in outcome.errors] == [GATHER]
    assert "late" in outcome.errors[0]


def test_what_the_backend_lacks_is_no_error(tmp_path: Path) -> None:
    world = SweepWorld({(SEND, 1): "refuse"})
    outcome, found = play(world, tmp_path)
    assert outcome.errors == []
    assert outcome.refused == [f"{SEND}: gate failed: x"]
    assert len(world.jobs) == 1
    assert [row[:3] for row in found if row[0] == SEND] == [(SEND, 1, "failed")]


@pytest.mark.parametrize("before", ["cannot start", "nobody comes", "no resources", "dies at once"])
def test_a_setting_under_which_nothing_starts_is_said_once(before: str, tmp_path: Path) -> None:
    world = SweepWorld(before=before)
    outcome, found = play(world, tmp_path)
    assert len(world.jobs) == 1
    assert outcome.num_measured == 0
    assert len(outcome.errors) == 1
    assert {(case, status in ("crashed", "timeout")) for case, _, status, _ in found} == {(c.name, True) for c in CASES}


def test_wrong_values_are_an_error(tmp_path: Path) -> None:
    outcome, found = play(SweepWorld(num_wrong=2), tmp_path, num_rounds=1)
    assert {row[2] for row in found} == {"failed"}
    assert outcome.errors[0] == f"{REDUCE} round 1: 8 bytes: 4 of 4 values are wrong"


def test_an_interrupt_keeps_what_is_there(tmp_path: Path) -> None:
    world = SweepWorld({(GATHER, 1): "interrupt"})
    outcome, found = play(world, tmp_path)
    assert outcome.interrupted
    assert [row[:3] for row in found if row[0] == REDUCE] == [(REDUCE, 1, "ok")] * 2
    assert {row[:3] for row in found if row[0] != REDUCE} == {(GATHER, 0, "skipped"), (SEND, 0, "skipped")}
    assert world.stopped == [True]


def test_a_full_disk_ends_it_with_one_message(tmp_path: Path) -> None:
    class Full(SweepWriter):
        def write(self, *_: Any) -> None:
            raise StoreError("results r: cannot be written (No space left on device)")

    world = SweepWorld()
    run = SweepRun(
        sweep=sweep(),
        store=Full(tmp_path, "s1", {}),
        launcher=world,
        make_sink=world.make_sink,
        progress=Progress(io.StringIO()),
        patience=QUICK,
    )
    assert run.run().errors == ["results r: cannot be written (No space left on device)"]
    assert world.stopped == [True]
