"""`raybench traces`, from files to files."""

import csv
import json
import re
import subprocess
import sys

import pytest

from raybench.cli import main
from raybench.traces import command
from tests.traces import made

HEAVY = {"torch", "ray", "pandas", "pyarrow", "matplotlib", "datasets", "transformers", "yaml"}
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL()"


def trace(path, begin=10, *, rank=0, at=0, **more):
    events = [
        made.annotation("ProfilerStep#1", at, 70),
        made.kernel("gemm<float, 3>", at, 10),
        made.kernel(ALL_REDUCE, at + begin, 60 - begin),
        made.memory(at + 1, 5 << 20, 8 << 20),
        made.memory(at + 2, 3 << 20, 8 << 20),
        made.annotation(f"PP:{rank}F0", at, 20),
    ]
    return made.write(path, made.document(events, rank=rank, world_size=2, **more))


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def run(capfd, *arguments):
    code = main(["traces", *map(str, arguments)])
    shown = capfd.readouterr()
    return code, shown.out, shown.err


def test_two_ranks(tmp_path, capfd):
    trace(tmp_path / "in/rank_0.json.gz", 20)
    trace(tmp_path / "in/rank_1.json", 40, rank=1)
    code, out, _ = run(capfd, tmp_path / "in", "-o", tmp_path / "out")
    assert code == 0
    first, second = rows(tmp_path / "out/summary.csv")
    assert (first["rank"], second["rank"]) == ("0", "1")
    assert first["kernel_time_us"] == "60.0"
    assert (first["idle_time_us"], first["temporal_compute_time_us"], first["non_compute_time_us"]) == (
        "10.0",
        "10.0",
        "40.0",
    )
    assert float(first["idle_time_pctg"]) == pytest.approx(100 / 6, abs=1e-3)
    assert (first["all_reduce_time_us"], first["all_reduce_calls"], first["collective_time_ms"]) == (
        "40.0",
        "1",
        "0.04",
    )
    assert (first["waiting_us"], second["waiting_us"], second["waited_for_us"]) == ("20.0", "0.0", "20.0")
    assert (first["peak_allocated_mb"], first["final_allocated_mb"], first["memory_samples"]) == ("5.0", "3.0", "2")
    assert first["bus_bandwidth_gb_s"] == ""
    operations = rows(tmp_path / "out/operations.csv")
    assert [(o["rank"], o["collective"], o["duration_us"], o["waiting_us"]) for o in operations] == [
        ("0", "all_reduce", "40.0", "20.0"),
        ("1", "all_reduce", "20.0", "0.0"),
    ]
    page = (tmp_path / "out/summary.html").read_text()
    assert "gemm&lt;float, 3&gt;" in page
    assert "the others waited most for rank 1" in page
    assert not re.search(r"(?:src|href|url)\s*[=(]|@import|<script", page)
    assert "wrote" in out


def test_json(tmp_path, capfd):
    trace(tmp_path / "in/rank_0.json")
    code, out, _ = run(capfd, tmp_path / "in", "-o", tmp_path / "out", "--json")
    body = json.loads(out)
    assert (code, body["exit_code"], body["schema"], len(body["rows"])) == (0, 0, 1, 1)
    assert body["rows"][0]["communication_time_us"] == 50.0
    assert body["notes"][0] == "in: 1 of 2 ranks have no trace here: 1"


def test_some_unreadable(tmp_path, capfd):
    trace(tmp_path / "in/rank_0.json")
    made.write(tmp_path / "in/rank_1.json", b'{"nodes": []}')
    code, out, err = run(capfd, tmp_path / "in", "-o", tmp_path / "out")
    assert code == 1
    assert "rank_1.json: an execution trace" in out
    assert "Traceback" not in out + err
    assert len(rows(tmp_path / "out/summary.csv")) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing"], "is not there"),
        (["empty"], "holds no trace"),
        (["bad"], "no trace could be read"),
        (["good", "--select", "last"], "did you mean 'latest'"),
        (["good", "-o", "good/rank_0.json"], "cannot be written"),
    ],
)
def test_wrong_requests_in_one_message(tmp_path, capfd, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    made.write(tmp_path / "bad/t.json", b"[")
    trace(tmp_path / "good/rank_0.json")
    code, out, err = run(capfd, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_windows_of_time(tmp_path, capfd):
    """`tensorboard_trace_handler`'s names: the newest of each rank, or each in its own folder."""
    for rank in range(2):
        for window in range(2):
            stamp = 1_700_000_000_000 + 1000 * window + rank
            name = f"rank_{rank}/host_12.{stamp}.pt.trace.json"
            trace(tmp_path / "in" / name, 20 * (1 + rank), rank=rank, at=1_000_000 * window)
    assert run(capfd, tmp_path / "in", "-o", tmp_path / "latest")[0] == 0
    latest = rows(tmp_path / "latest/summary.csv")
    assert [row["rank"] for row in latest] == ["0", "1"]
    assert {int(row["begin_ns"]) for row in latest} == {made.BASE_NS + 1_000_000_000}
    assert run(capfd, tmp_path / "in", "-o", tmp_path / "all", "--select", "all")[0] == 0
    folders = sorted(path.name for path in (tmp_path / "all").iterdir())
    assert folders == [f"run_{i}_{made.BASE_NS // 10**6 + 1000 * i}" for i in range(2)]
    assert [len(rows(tmp_path / "all" / name / "summary.csv")) for name in folders] == [2, 2]


def test_nccl_without_gpu_activities(tmp_path, capfd):
    """Unknown is empty, not zero."""
    events = [made.event("cpu_op", "aten::mm", 0, 5), made.annotation("nccl:all_reduce", 7, 2)]
    made.write(tmp_path / "rank-0-of-8/t.json", made.document(events))
    assert run(capfd, tmp_path, "-o", tmp_path / "out")[0] == 0
    (row,) = rows(tmp_path / "out/summary.csv")
    assert (row["case"], row["compute_time_pctg"]) == ("rank-0-of-8", "100.0")
    known = ("communication_time_us", "exposed_communication_pctg", "all_reduce_calls", "comm_time_us")
    assert [row[name] for name in known] == [""] * 4


def test_ranks_that_only_names_tell(tmp_path, capfd):
    for name in ("rank7.json", "other.json"):
        made.write(tmp_path / "in" / name, {"traceEvents": [made.kernel("gemm", 0, 5)]})
    run(capfd, tmp_path / "in", "-o", tmp_path / "out")
    found = rows(tmp_path / "out/summary.csv")
    assert [(row["rank"], row["problems"]) for row in found] == [("0", "nothing tells its rank: called 0"), ("7", "")]


def test_several_cases_join_the_store(tmp_path, capfd):
    for case in ("bucketed", "naive"):
        origin = {"suite_id": "s1", "track": "a", "case": case, "round": 1}
        trace(tmp_path / "in/s1/a" / case / "rank_0.json.gz", raybench=origin)
    run(capfd, tmp_path / "in", "-o", tmp_path / "out")
    found = rows(tmp_path / "out/summary.csv")
    assert [(r["suite_id"], r["track"], r["case"], r["round"]) for r in found] == [
        ("s1", "a", "bucketed", "1"),
        ("s1", "a", "naive", "1"),
    ]


def test_in_processes_of_their_own(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(command, "PARALLEL_BYTES", 1)
    for rank in range(2):
        trace(tmp_path / f"in/rank_{rank}.json", rank=rank)
    made.write(tmp_path / "in/rank_2.json", b"")
    code, _, _ = run(capfd, tmp_path / "in", "-o", tmp_path / "out")
    assert (code, len(rows(tmp_path / "out/summary.csv"))) == (1, 2)


@pytest.mark.parametrize(
    ("arguments", "unneeded"),
    [
        (["--help"], HEAVY | {"numpy", "msgspec", "jinja2"}),
        (["in", "-o", "out"], HEAVY | {"rich", "multiprocessing", "sqlite3"}),
    ],
)
def test_nothing_is_imported_that_is_not_needed(tmp_path, arguments, unneeded):
    trace(tmp_path / "in/rank_0.json")
    code = "import sys; from raybench.cli import main; main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    command = [sys.executable, "-c", code, "traces", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert not unneeded & set(done.stderr.split())


def test_names_in_a_trace_are_no_markup(tmp_path, capfd):
    name = "<script>'\"&"
    group = {"Collective name": "allreduce", "Process Group Name": name}
    events = [made.kernel(name, 0, 5), made.kernel(ALL_REDUCE, 5, 5, **group)]
    made.write(tmp_path / name / "rank_0.json", made.document(events))
    assert run(capfd, tmp_path / name, "-o", tmp_path / "out")[0] == 0
    page = (tmp_path / "out/summary.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
