"""nsys's two exports, made small."""

import csv
import sqlite3

import pytest

from raybench.cli import main
from raybench.traces.nsys import report_kernel_sums, report_sqlite
from raybench.traces.stream import UnreadableTraceError

PROCESS = 42 << 24


def database(path, *, kernels=True):
    with sqlite3.connect(path) as made:
        made.executescript("""
            CREATE TABLE StringIds (id INTEGER, value TEXT);
            INSERT INTO StringIds VALUES (1, 'gemm'), (2, 'ncclDevKernel_AllReduce_Sum_f32_RING_LL()'),
                (3, 'cudaLaunchKernel'), (4, 'ProfilerStep#7');
            CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER);
            INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (1700000000000000000);
            CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT);
            INSERT INTO TARGET_INFO_GPU VALUES (0, 'Made GPU');
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER,
                correlationId INTEGER, globalPid INTEGER, demangledName INTEGER);
            CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER,
                correlationId INTEGER, globalPid INTEGER, bytes INTEGER);
            CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, correlationId INTEGER,
                globalTid INTEGER, nameId INTEGER);
            CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, text TEXT, textId INTEGER, globalTid INTEGER);
        """)
        thread = PROCESS + 9
        made.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (90, 95, 2, ?, 3)", (thread,))
        made.execute("INSERT INTO NVTX_EVENTS VALUES (0, 200, NULL, 4, ?)", (thread,))
        made.execute("INSERT INTO NVTX_EVENTS VALUES (20, 50, 'PP:0F1', NULL, ?)", (thread,))
        if kernels:
            rows = [(0, 40, 0, 7, 1, PROCESS, 1), (100, 150, 0, 7, 2, PROCESS, 1), (20, 60, 0, 9, 3, PROCESS, 2)]
            made.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            made.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (60, 70, 0, 7, 4, ?, 100)", (PROCESS,))
    return path


def test_database(tmp_path):
    (found,) = report_sqlite(database(tmp_path / "rank_0.sqlite"))
    assert (found.span_ns, found.idle_ns, found.compute_ns, found.overlap_ns) == (150, 30, 90, 20)
    assert (found.communication_sum_ns, found.memory_sum_ns) == (40, 10)
    assert [o.collective for o in found.operations] == ["all_reduce"]
    assert (found.steps.numbers, found.steps.launch_wait_ns) == ([7], [20])
    assert found.actions.kinds == ["F"]
    assert (found.device, found.timeline.begin_ns) == ("Made GPU", 1_700_000_000_000_000_000)


def test_what_is_no_database_of_nsys(tmp_path):
    with pytest.raises(UnreadableTraceError, match="no GPU activities"):
        report_sqlite(database(tmp_path / "a.sqlite", kernels=False))
    (tmp_path / "b.sqlite").write_bytes(b"something else" * 100)
    with pytest.raises(UnreadableTraceError, match="not a database"):
        report_sqlite(tmp_path / "b.sqlite")
    sqlite3.connect(tmp_path / "c.sqlite").close()
    with pytest.raises(UnreadableTraceError, match="not a database that nsys exports"):
        report_sqlite(tmp_path / "c.sqlite")


SUMS = """Processing [run.sqlite] with [cuda_gpu_kern_sum.py]...

Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name
44.8,44800,10,4480.0,4480.0,1,9000,1.0,"ncclDevKernel_SendRecv(ncclDevComm *, unsigned long, ncclWork *)"
10.2,10200,6,1700.0,1700.0,1,9000,1.0,"ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm *, unsigned long, ncclWork *)"
45.0,"45,000","1,000",45.0,45.0,1,90,1.0,ampere_sgemm_128x64_tn
"""


def test_kernel_sums(tmp_path):
    path = tmp_path / "rank_1_cuda_gpu_kern_sum.csv"
    path.write_text(SUMS)
    found = report_kernel_sums(path)
    assert (found.compute_sum_ns, found.communication_sum_ns) == (45_000, 55_000)
    assert [(o.collective, o.calls, o.duration_ns) for o in found.operations] == [
        ("p2p", 10, 44_800),
        ("all_reduce", 6, 10_200),
    ]
    assert [(t.calls, t.time_ns) for t in found.top] == [(1000, 45_000), (10, 44_800), (6, 10_200)]


def test_both_through_the_command(tmp_path, capfd):
    """A database of one rank, sums of another: what the sums do not tell is empty."""
    (tmp_path / "in").mkdir()
    database(tmp_path / "in/rank_0.sqlite")
    (tmp_path / "in/rank_1_cuda_gpu_kern_sum.csv").write_text(SUMS)
    assert main(["traces", str(tmp_path / "in"), "-o", str(tmp_path / "out")]) == 0
    with (tmp_path / "out/summary.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["rank"], first["device"], first["idle_time_us"], first["all_reduce_calls"]) == (
        "0",
        "Made GPU",
        "0.03",
        "1",
    )
    assert (first["launch_wait_us"], first["num_steps"], first["pipeline_actions"]) == ("0.02", "1", "1")
    assert (second["rank"], second["idle_time_us"], second["p2p_kernel_calls"], second["compute_time_us"]) == (
        "1",
        "",
        "10",
        "45.0",
    )
    assert "sums of kernels alone" in capfd.readouterr().out


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", SUMS.split("\n44.8")[0]])
def test_what_is_no_table_of_kernels(tmp_path, text):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(UnreadableTraceError, match="table of kernels"):
        report_kernel_sums(tmp_path / "x.csv")
