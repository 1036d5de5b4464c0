"""`raybench comm` as it is typed: one message for what is wrong, JSON by the contract, and a real sweep."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pandas as pd
import pytest

from raybench.cli import main
from raybench.comm import command
from raybench.suite.cluster import Cluster
from raybench.suite.job_run import Patience
from tests.comm.test_driver import SweepWorld
from tests.suite.fakes import QUICK, World, cluster, node

ROOT = Path(__file__).parents[2]


def play(monkeypatch: pytest.MonkeyPatch, world: World, there: Cluster | None = None) -> World:
    """Have every job played by `world`, on a cluster of that shape."""
    from contextlib import contextmanager

    @contextmanager
    def connected_by(launcher: str):
        yield there or cluster()

    monkeypatch.setattr("raybench.suite.session.connected_by", connected_by)
    monkeypatch.setattr("raybench.suite.session.sink_host", lambda cluster: "127.0.0.1")
    monkeypatch.setattr("raybench.suite.launch.launcher", lambda name, loop: world)
    monkeypatch.setattr("raybench.suite.sink.Sink", lambda host: world.make_sink())
    monkeypatch.setattr(command, "Patience", partial(Patience, **vars(QUICK)))
    return world


def run(*arguments: str, capfd: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["comm", *arguments])
    out, err = capfd.readouterr()
    return code, out, err


TWO_GPU_NODES = Cluster((node("10.0.0.1", gpus=2), node("10.0.0.2", gpus=2)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--operations", "all-reduc"], "--operations: 'all_reduc' is not known; did you mean 'all_reduce'? "),
        (["--operations", ","], "--operations: names nothing (allowed: all_reduce, "),
        (["--sizes", "8:x"], "--sizes: '8:x' is not allowed (MIN:MAX or MIN:MAX:FACTOR in bytes"),
        (["--sizes", "3G"], "--sizes: 3.00 GiB is not allowed (at most 2.00 GiB: 2 ranks keep 4 times a size each, "),
        (["--groups", "nodes"], "--groups: 'nodes' is not known; did you mean 'node'? (allowed: node, across, all, "),
        (["--groups", "data"], "--groups: data is an axis of a layout, and no --layout is given"),
        (["--groups", "across"], "--groups: across needs 2 nodes, the cluster has 1"),
        (["--layout", "data=2,tensr=2"], "--layout: 'tensr' is not known; did you mean 'tensor'?"),
        (["--dtypes", "fp16"], "--dtypes: 'fp16' is not known; did you mean 'bf16'? (allowed: fp32, bf16)"),
        (["--nccl-env", "none,nope"], "--nccl-env: 'nope' is not known"),
        (["--nccl-env", "none,default"], "--nccl-env: 'default' is not known (allowed: none, universal, "),
        (["--nccl-env", "none,/gone.env"], "--nccl-env: there is no file '/gone.env'"),
        (["--ranks-per-node", "0"], "--ranks-per-node: '0' is not allowed (a whole number of at least 1)"),
        (["--ranks-per-node", "1"], "--groups: needs 2 ranks, there is 1 (see --ranks-per-node)"),
        (["--ranks-per-node", "2", "--layout", "data=4"], "--layout: data=4, pipeline=1, tensor=1 needs 4 ranks"),
        (["--repeats", "0"], "--repeats: '0' is not allowed"),
        (["--budget-s", "-1"], "--budget-s: '-1' is not allowed"),
        (["--link-gbps", "0"], "--link-gbps: '0' is not allowed (a number of Gbit/s above 0)"),
        (["--launcher", "mpi"], "--launcher: 'mpi' is not known (allowed: ray, torchrun)"),
        (["--ranks-per-node", "33"], "--ranks-per-node: 33 is not allowed (at most 32, 16 for each of the 2 CPUs of "),
        (["--layout", "data=8,tensor=5"], "--layout: 40 ranks on a node is not allowed (at most 32, "),
        (["--png", "gone/x.png"], "--png: 'gone/x.png' cannot be written (No such file or directory); allowed is"),
        (["--png", "/proc/x.png"], "--png: '/proc/x.png' cannot be written ("),
        (["--png", "."], "--png: '.' cannot be written (Is a directory)"),
        (["--results", "/proc/1/x"], "--results /proc/1/x: "),
    ],
)  # fmt: skip
def test_a_wrong_request_is_one_message(arguments, message, tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    world = play(monkeypatch, SweepWorld())
    code, out, err = run(*arguments, capfd=capfd)
    assert (code, out) == (2, "")
    assert err.startswith(f"raybench: {message}")
    assert len(err.splitlines()) == 1
    assert (world.jobs, list(tmp_path.iterdir())) == ([], [])


def test_more_ranks_than_gpus(tmp_path, monkeypatch, capfd) -> None:
    play(monkeypatch, SweepWorld(), TWO_GPU_NODES)
    code, _, err = run("--ranks-per-node", "3", "--results", str(tmp_path), capfd=capfd)
    assert code == 2
    assert "--ranks-per-node: 3 is not allowed (each rank needs a GPU, 10.0.0.1 has 2 free)" in err


def test_json(tmp_path, monkeypatch, capfd) -> None:
    world = play(monkeypatch, SweepWorld(), TWO_GPU_NODES)
    picture = tmp_path / "comm.png"
    arguments = ["--sizes", "8:512", "--dtypes", "bf16", "--results", str(tmp_path / "r"), "--png", str(picture)]
    code, out, err = run(*arguments, "--json", capfd=capfd)
    body = json.loads(out)
    assert (code, body["exit_code"], body["schema"], body["errors"]) == (0, 0, 1, [])
    assert (body["budget_s"], body["results"]) == (600, str(tmp_path / "r"))
    assert picture.exists()
    rows = body["rows"]
    assert len(rows) == 3 * 7 * 7  # groups, operations, sizes
    assert {row["group"] for row in rows} == {"node", "across", "all"}
    assert {row["status"] for row in rows} == {"ok"}
    assert len(body["links"]) == 3 * 7
    assert world.jobs[0].backend == "nccl"
    assert world.placements[0].use_gpu
    assert "budget: 600 s of measuring" in err
    stored = pd.read_parquet(tmp_path / "r" / "collectives")
    assert len(stored) == 3 * len(rows)
    assert set(stored.suite_id) == {body["suite_id"]}
    assert set(stored.torch_version) == {"2.13.0"}


def test_an_operation_that_was_named_and_is_not_there(tmp_path, monkeypatch, capfd) -> None:
    parts = {("node-send-fp32", 1): "refuse"}
    arguments = ["--sizes", "8", "--dtypes", "fp32", "--results", str(tmp_path)]
    play(monkeypatch, SweepWorld(dict(parts)))
    assert run(*arguments, capfd=capfd)[0] == 0  # by default all that there are
    play(monkeypatch, SweepWorld(dict(parts)))
    code, out, _ = run(*arguments, "--operations", "send,all-reduce", capfd=capfd)
    assert code == 1
    assert "raybench: node-send-fp32: gate failed: x" in out


def test_a_figure_that_cannot_be_written_costs_nothing_else(tmp_path, monkeypatch, capfd) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    play(monkeypatch, SweepWorld())
    monkeypatch.setattr("raybench.comm.figure.draw", full)
    picture = tmp_path / "x.png"
    code, out, _ = run("--sizes", "8:64", "--results", str(tmp_path), "--png", str(picture), capfd=capfd)
    assert code == 1
    assert "all_reduce" in out
    assert f"raybench: --png: {picture} cannot be written (No space left on device)" in out
    assert out.splitlines()[-1].endswith(f"rows in {tmp_path}")


def test_an_interrupt(tmp_path, monkeypatch, capfd) -> None:
    play(monkeypatch, SweepWorld({("node-all_gather-fp32", 1): "interrupt"}))
    code, out, _ = run("--sizes", "8:64", "--results", str(tmp_path), capfd=capfd)
    assert code == 130
    assert "all_reduce" in out
    assert "raybench: interrupted" in out
    assert out.splitlines()[-1].endswith(f"rows in {tmp_path}")


def start(*arguments: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "raybench", "comm", "--launcher", "torchrun", "--results", str(folder), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_real_sweep_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "one-thread.env").write_text("OMP_NUM_THREADS=1\n")
    process = start(
        *["--sizes", "8:1M:8", "--repeats", "2", "--budget-s", "40", "--json", "--ranks-per-node", "2"],
        *["--nccl-env", f"none,{tmp_path}/one-thread.env"],
        folder=tmp_path / "r",
    )
    out, err = process.communicate(timeout=200)
    body = json.loads(out)
    assert (process.returncode, body["errors"]) == (0, []), err
    rows = pd.DataFrame(body["rows"])
    assert len(rows) == 2 * 14 * 6
    assert (rows.num_wrong == 0).all()
    largest = rows[(rows.payload_bytes == 4096) & (rows.status == "ok")]
    assert set(largest.setting) == {"none", "one-thread"}
    assert largest[largest.kind != "send"].bus_bandwidth_bytes_per_s.between(1e4, 1e11).all()
    speedups = largest.speedup[largest.setting == "one-thread"].dropna()  # null where one side had no time for the size
    assert len(speedups)
    assert speedups.between(0.01, 100).all()
    stored = pd.read_parquet(tmp_path / "r" / "collectives")
    assert set(stored["round"]) == {1, 2}


@pytest.mark.slow
def test_ctrl_c_keeps_the_rows_so_far(tmp_path: Path) -> None:
    process = start("--sizes", "8:4M:8", "--budget-s", "300", folder=tmp_path / "r")
    place = tmp_path / "r" / "collectives"
    deadline = time.monotonic() + 120
    while len(list(place.rglob("*.parquet"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted" in out
    stored = pd.read_parquet(place)
    assert (stored.status == "ok").sum() > 0
    assert "interrupted" in set(stored[stored.status == "skipped"].reason)  # on a busy machine the budget, too
