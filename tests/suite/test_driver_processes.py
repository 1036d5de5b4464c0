"""The driver with real ranks and a real store: what is left when it, or a rank, is ended from outside."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

import raybench
from raybench import Results
from raybench.cli import main

ROOT = Path(__file__).resolve().parents[2]
TRACK = """
title: Mine
question: Which?
workload: {sequence_length: 16}
measure: {num_rounds: 3, timeout_s: 6}
cases:
  - {name: one, layout: {data: 2}, strategy: {data: naive}}
  - {name: two, layout: {data: 2}, strategy: {data: bucketed}}
  - {name: three, layout: {data: 2}, strategy: {data: bucketed}}
"""
HANGS = """
title: Mine
question: Which?
workload: {sequence_length: 16}
measure: {num_rounds: 1, timeout_s: 4}
cases:
  - {name: skip, layout: {data: 2}, strategy: {data: naive}}
  - {name: send, layout: {pipeline: 2}, strategy: {pipeline: gpipe}}
  - {name: after, layout: {data: 2}, strategy: {data: bucketed}}
"""
SLOW = {"PLAY_ROUND_S": "1"}


# Resumed with --force, so that an edit of the source while the tests run does not matter.


class Run:
    """One `raybench run` of the track above, in a process group of its own, as under a shell."""

    def __init__(
        self, folder: Path, *arguments: str, launcher: str = "torchrun", track: str = TRACK, **parts: str
    ) -> None:
        (folder / "mine.yaml").write_text(track)
        self.mark = uuid.uuid4().hex
        self.folder = folder
        environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.suite.play",
                "run",
                "mine.yaml",
                "--launcher",
                launcher,
                "--json",
                *arguments,
            ],
            cwd=folder,
            env={**environment, "PYTHONPATH": str(ROOT), "RAYBENCH_TEST_MARK": self.mark, **parts},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.errors = ""

    def wait_for(self, text: str, timeout_s: float = 120) -> None:
        assert self.process.stderr is not None
        end = time.monotonic() + timeout_s
        while text not in self.errors:
            line = self.process.stderr.readline()
            assert line, self.errors
            assert time.monotonic() < end, self.errors
            self.errors += line

    def finish(self, timeout_s: float = 120) -> tuple[int, dict]:
        out, err = self.process.communicate(timeout=timeout_s)
        self.errors += err
        return self.process.returncode, json.loads(out) if out else {}

    def left(self) -> list[int]:
        """Processes that the run has started and that are still there."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    environment = (entry / "environ").read_bytes()
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                except (OSError, IndexError):
                    continue
                if self.mark.encode() in environment and state != "Z":
                    found.append(int(entry.name))
        return found

    def nothing_left(self, timeout_s: float = 20) -> bool:
        end = time.monotonic() + timeout_s
        while self.left() and time.monotonic() < end:
            time.sleep(0.2)
        return not self.left()


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    runs: list[Run] = []

    def begin(*arguments: str, **more: str) -> Run:
        runs.append(Run(tmp_path, *arguments, **more))
        return runs[-1]

    yield begin
    for run in runs:
        for pid in run.left():
            os.kill(pid, signal.SIGKILL)
        run.process.wait()


def statuses(folder: Path) -> dict[str, list[str]]:
    runs = raybench.load(folder / "results").runs.sort_values("round")
    return {str(case): list(group.status) for case, group in runs.groupby("case", observed=True)}


LAUNCHERS = ["torchrun", pytest.param("ray", marks=pytest.mark.slow)]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_control_c_keeps_rows_and_leaves_no_worker(start, tmp_path: Path, launcher: str):
    run = start(launcher=launcher, **SLOW)
    run.wait_for("mine:one round 2:")
    os.killpg(run.process.pid, signal.SIGINT)
    time.sleep(0.3)
    os.killpg(run.process.pid, signal.SIGINT)
    code, body = run.finish()
    assert (code, body["exit_code"], body["errors"]) == (130, 130, ["interrupted"])
    assert run.nothing_left()
    found = statuses(tmp_path)
    assert found["one"].count("ok") >= 2
    assert all(case[0] in ("ok", "skipped") and "skipped" in case for case in found.values())
    assert {row["reason"] for row in body["rows"]} == {"interrupted"}
    assert all(bool(row["tokens_per_s"]) == (row["rounds"] > 0) for row in body["rows"])

    temporary = tmp_path / "temporary"
    temporary.mkdir()
    again = start("--resume", "--force", launcher=launcher, TMPDIR=str(temporary))
    code, body = again.finish()
    assert (code, body["errors"]) == (0, [])
    assert statuses(tmp_path) == {case: ["ok"] * 3 for case in ("one", "two", "three")}
    assert again.nothing_left()
    assert launcher == "ray" or not list(temporary.iterdir())


@pytest.mark.slow
def test_a_terminated_driver_ends_in_order(start):
    run = start(**SLOW)
    run.wait_for("mine:one round 1:")
    run.process.terminate()
    code, body = run.finish()
    assert (code, body["errors"]) == (130, ["interrupted"])
    assert run.nothing_left()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_driver_loses_no_reported_round_and_its_workers_end(start, tmp_path: Path, launcher: str):
    run = start(launcher=launcher, **SLOW)
    run.wait_for("mine:two round 1:")
    run.process.kill()
    run.process.wait()
    assert run.nothing_left(60)
    found = statuses(tmp_path)
    assert found["one"][0] == found["two"][0] == "ok"
    code, body = start("--resume", "--force", launcher=launcher).finish()
    assert code == 0
    assert {row["case"]: (row["status"], row["rounds"]) for row in body["rows"]} == dict.fromkeys(
        ("one", "two", "three"), ("ok", 3)
    )


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    ("part", "status", "reason"),
    [
        ("die 2", "crashed", "rank 1: its process"),
        pytest.param("raise 2", "out_of_memory", "rank 1: ", marks=pytest.mark.slow),
        pytest.param("sleep 2", "timeout", "rank ", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_breaks_costs_its_case_alone(
    start, tmp_path: Path, launcher: str, part: str, status: str, reason: str
):
    begin = time.monotonic()
    code, body = start(launcher=launcher, PLAY_TWO=part).finish()
    assert code == 1, body
    assert statuses(tmp_path) == {"one": ["ok"] * 3, "two": ["ok", status], "three": ["ok"] * 3}
    row = next(row for row in body["rows"] if row["case"] == "two")
    assert row["reason"].startswith(reason)
    ranks = raybench.load(tmp_path / "results").ranks
    broken = ranks[(ranks.case == "two") & (ranks["round"] == 2)]
    assert list(broken["rank"]) == [0, 1]
    assert broken.last_operation.notna().all()
    assert broken["stack"].notna().all()
    assert time.monotonic() - begin < 150


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_deadlock_is_captured_and_its_row_names_the_rank_and_the_operation(
    start, tmp_path: Path, launcher: str, capfd: pytest.CaptureFixture[str]
):
    code, body = start(launcher=launcher, track=HANGS, PLAY_SKIP="skip 1", PLAY_SEND="send 1").finish()
    assert (code, statuses(tmp_path)) == (1, {"skip": ["timeout"], "send": ["timeout"], "after": ["ok"]})
    reasons = {row["case"]: row["reason"] for row in body["rows"]}
    assert reasons["skip"].startswith(
        "rank 1 left out all_reduce bucket 1, #2 over data 0-1, which rank 0 began; rank 1 was at 'optimizer' "
        "(suite/fake_loop.py:"
    )
    assert reasons["send"].startswith(
        "ranks 0 and 1 wait for each other, and none receives: rank 0 in send activations over pipeline 0→1 #1; rank 1 "
        "in send activations over pipeline 1→0 #1 (captured in hangs/"
    )
    for attempt, case in enumerate(("skip", "send"), 1):
        folder = tmp_path / "results" / f"hangs/{body['suite_id']}/mine/{case}/{attempt}-1"
        assert f"(captured in {folder.relative_to(tmp_path / 'results')})" in reasons[case]
        found = [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in (0, 1)]
        assert all(f"in _{case}" in rank["stack"] for rank in found)
        assert [rank["last_operations"][-1]["seconds"] > 1 for rank in found] == [True, True]
        # The doctor's reading is the one that its own command makes of these files.
        files = [part for rank in (0, 1) for part in ("watchdog", str(folder / f"rank_{rank}.json"))]
        assert main(["doctor", *files, "--json"]) == 0
        read = json.loads(capfd.readouterr().out)
        kept = json.loads((folder / "reading.json").read_text())
        assert (read["verdict"], read["findings"][1]["code"]) == (kept["verdict"], "ranks-desynchronised")
        assert kept["verdict"] in " ".join((folder / "reading.txt").read_text().split())
    # gloo's flight recorder: three all-reduces in the first case, of which rank 0's last has not ended.
    skip = [json.loads(path.read_text()) for path in sorted((tmp_path / "results/hangs").glob("*/mine/skip/*/rank_*"))]
    ended = [[e["retired"] for e in rank["entries"] if e["profiling_name"] == "gloo:all_reduce"] for rank in skip]
    assert ended == [[True, True, False], [True, True]]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_driver_killed_again_and_again_gets_there_with_what_an_unbroken_run_has(start, tmp_path: Path):
    chance = random.Random(7)
    for _ in range(20):
        run = start("--resume", "--force", PLAY_ROUND_S="0.7")
        try:
            run.process.wait(chance.uniform(0.0, 14.0))
            break
        except subprocess.TimeoutExpired:
            run.process.kill()
            run.process.wait()
        assert run.nothing_left(60)
    code, body = start("--resume", "--force").finish()
    assert code == 0
    whole, _ = start().finish()
    assert whole == 0
    results = raybench.load(tmp_path / "results")
    assert not results.problems
    broken = raybench.load(f"{tmp_path / 'results'}@{body['suite_id']}")
    unbroken = next(s for s in reversed(results.suite_ids) if s != body["suite_id"])
    times = ["suite_id", "attempt", "started_at", "environment"]

    def tidy(found: Results, table: str) -> pd.DataFrame:
        frame = getattr(found, table).drop(columns=times, errors="ignore").astype(str)
        return frame.sort_values(list(frame.columns)).reset_index(drop=True)

    other = raybench.load(f"{tmp_path / 'results'}@{unbroken}")
    for table in ("runs", "ranks", "steps"):
        pd.testing.assert_frame_equal(tidy(broken, table), tidy(other, table))
