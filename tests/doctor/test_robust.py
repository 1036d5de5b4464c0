"""Whatever is fed in, an answer comes back, in the form that is promised, within bounded time and memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybench.doctor.findings import SEVERITY
from raybench.doctor.read import read_file, read_nccl, read_topo, read_watchdog, story
from raybench.doctor.render import render

TOPO = (
    "\tGPU0\tGPU1\tNIC0\tmlx5_1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    "GPU0\t X \tNV6\tPXB\tSYS\t0-27\t0\t\tN/A\n"
    "GPU1\tNV6\t X \tSYS\tSOC\t28-55\t1\t\tN/A\nNIC0\tPXB\tSYS\t X \tPIX\t\t\n"
    "NIC Legend:\n  NIC0: mlx5_3\n GPU0\tX\tOK\tGNS\n"
)
NCCL = (
    "n1:1:2 [0] NCCL INFO Bootstrap : Using [0]eth0:10.0.0.1<0> [1]veth1:fe80::1%veth1<0>\n"
    "NCCL version 2.19.3+cuda12.3\n"
    "n1:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>\n"
    "n1:1:2 [0] NCCL INFO Channel 00/02 :    0   1   2\nn1:1:2 [0] NCCL INFO comm 0x1 rank 0 nranks 8\n"
    "n1:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] [send] via NET/IB/0/GDRDMA\n"
    "n1:1:2 [0] x.cc:1 NCCL WARN socketPollConnect: Connect to a<1> returned 113(No route) errno 11\nLast error:\n"
    "n1:1:2 [0] x.cc:1 NCCL WARN NET/IB : Got completion with error 12, opcode 0, len 0, vendor err 129\n"
)
WATCHDOG = (
    "[rank1]:[E1119 03:27:40.2 ProcessGroupNCCL.cpp:607] [Rank 1] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for 600040 milliseconds\n"
    "[rank1]:[E1119 03:27:40.2 ProcessGroupNCCL.cpp:1] [PG ID 2 PG GUID 7 Rank 1] Exception detected by watchdog "
    "at work: 9, last enqueued NCCL work: 9, last completed NCCL work: 9.\n"
    " - [1] Timeout at collective: ALLREDUCE, #4\n"
    " - the lagging/dead/mismatched ranks that caused the desync are:\n"
    " [0] finished collective #3, but didn't join collective #4\n"
    "waitForInput: socket x timed out after 5ms\n"
    '{"entries": [{"state": "started"}]}\n'
)
SAMPLES = (TOPO, NCCL, WATCHDOG)
JUNK = st.sampled_from(
    ["\x1b[0m", "\x1b[4m", "[0m", "\t", "\t\t", "\r", "\n", "\x00", "\ufffd", "  ", "²", "٣", "9" * 5000, "GPU9999999",
     "NV999999999", "[rank", "Work", "(", ")", "[", "]", "<0>", "\u2028", "\x85", "NIC0:", "Last error:", " via ", "-1"]
)  # fmt: skip


@st.composite
def damaged(draw):
    """A real text with pieces cut out, repeated, shuffled and put in."""
    text = draw(st.sampled_from(SAMPLES))
    for _ in range(draw(st.integers(0, 6))):
        at, to = sorted((draw(st.integers(0, len(text))), draw(st.integers(0, len(text)))))
        action = draw(st.sampled_from(["cut", "put", "double", "tabs", "shuffle", "upper"]))
        piece = text[at:to]
        if action == "cut":
            piece = ""
        elif action == "put":
            piece = draw(JUNK) + piece
        elif action == "double":
            piece = piece * 2
        elif action == "tabs":
            piece = piece.replace(" ", "\t") if "\t" not in piece else piece.replace("\t", " ")
        elif action == "shuffle":
            piece = "\n".join(draw(st.permutations(piece.split("\n")[:12])))
        else:
            piece = piece.upper()
        text = text[:at] + piece + text[to:]
    return text


TEXTS = st.one_of(damaged(), st.text(max_size=300), st.lists(st.one_of(JUNK, damaged()), max_size=6).map("".join))


def check_finding(item):
    assert set(item) >= {"code", "severity", "message", "evidence", "advice"}
    assert item["severity"] == SEVERITY[item["code"]]
    assert item["message"]
    assert item["evidence"] is None or len(item["evidence"]) <= 400


def check(answer, keys):
    for part in answer.get("hosts", [answer]):
        assert keys <= set(part)
        for item in part["findings"]:
            check_finding(item)
    assert json.loads(json.dumps(answer)) == answer
    assert render(answer)


TOPO_KEYS = {"complete", "gpus", "nics", "links", "gpu_nic_links", "cpu_affinity", "numa_affinity", "worst_link",
             "nvlink_full_mesh", "findings"}  # fmt: skip
NCCL_KEYS = {"nccl_version", "cuda_version", "num_ranks", "network", "interfaces", "ib_devices", "transports", "gdrdma",
             "rings_connected", "findings"}  # fmt: skip


@given(TEXTS)
@settings(max_examples=150, deadline=None)
def test_topo_always_answers(text):
    check(read_topo(text), TOPO_KEYS)


@given(TEXTS)
@settings(max_examples=150, deadline=None)
def test_nccl_always_answers(text):
    check(read_nccl(text.splitlines(keepends=True)), NCCL_KEYS)


@given(TEXTS)
@settings(max_examples=150, deadline=None)
def test_watchdog_always_answers(text):
    check(read_watchdog(text), {"kind", "timeouts", "findings"})


@given(st.lists(st.tuples(st.sampled_from(["topo", "nccl", "watchdog"]), TEXTS), max_size=4))
@settings(max_examples=60, deadline=None)
def test_story_always_answers(parts):
    readers = {"topo": read_topo, "nccl": lambda text: read_nccl(text.splitlines()), "watchdog": read_watchdog}
    answer = story([(kind, "file", readers[kind](text)) for kind, text in parts])
    assert answer["verdict"]
    check(answer, {"verdict", "silent_ranks", "files", "findings"})


SMALL = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 3),
    st.floats(allow_nan=False),
    st.sampled_from(["0", "1", "x", "[0, 1]", "9" * 30, ""]),
)
ODD = st.recursive(SMALL, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner))
MARKS = st.sampled_from(
    ["optimizer", "wait for all_reduce b over data 0-1 #2", "send x over p 0→1 #1", "receive x over p"]
)
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "process_group": st.one_of(ODD, st.just(["0", "default_pg"])),
        "collective_seq_id": SMALL,
        "profiling_name": st.one_of(ODD, st.sampled_from(["gloo:all_reduce", "nccl:send 0->1", "nccl:recv 1<-0"])),
        "state": st.one_of(ODD, st.sampled_from(["scheduled", "started", "completed"])),
        "retired": ODD,
        "is_p2p": ODD,
        "input_sizes": ODD,
    },
)
OPERATION = st.one_of(ODD, st.fixed_dictionaries({"operation": st.one_of(MARKS, ODD)}))
DUMP = st.fixed_dictionaries(
    {"entries": st.lists(st.one_of(ENTRY, ODD), max_size=4)},
    optional={
        "rank": ODD,
        "stack": st.one_of(ODD, st.just('  File "/a/torch/distributed/distributed_c10d.py", line 5 in send')),
        "last_operations": st.one_of(ODD, st.lists(OPERATION, max_size=3)),
        "pg_config": st.one_of(
            ODD, st.dictionaries(st.sampled_from(["0", "1"]), st.fixed_dictionaries({"ranks": ODD}))
        ),
        "pg_status": st.one_of(ODD, st.dictionaries(st.sampled_from(["0", "1"]), st.dictionaries(SMALL.map(str), ODD))),
    },
)


@given(st.lists(DUMP, min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_flight_records_always_answer(dumps):
    answers = [read_watchdog(json.dumps(dump)) for dump in dumps]
    for answer in answers:
        check(answer, {"kind", "timeouts", "findings"})
    check(story([("watchdog", f"rank_{rank}.json", a) for rank, a in enumerate(answers)]), {"verdict", "silent_ranks"})


@given(st.binary(max_size=2000), st.sampled_from(SAMPLES))
@settings(max_examples=60, deadline=None)
def test_binary_files(tmp_path_factory, data, sample):
    path = tmp_path_factory.getbasetemp() / "binary"
    path.write_bytes(data + sample.encode() + data)
    for kind, keys in (("topo", TOPO_KEYS), ("nccl", NCCL_KEYS), ("watchdog", {"timeouts", "findings"})):
        check(read_file(kind, path), keys)


def test_lines_without_end(tmp_path):
    path = tmp_path / "one-line"
    path.write_bytes(b"NCCL INFO Channel 00/0 : 0[0] -> 1[1] via " * 40_000)
    for kind in ("topo", "nccl", "watchdog"):
        read_file(kind, path)


NOISY = [
    "n1:1:2 [0] NCCL INFO Channel 01/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA\n",
    "n1:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read\n",
    "n1:1:2 [0] NCCL INFO Trees [0] 1/-1/-1->0->-1 [1] 1/-1/-1->0->-1\n",
    "n1:1:2 [0] NCCL INFO AllReduce: opCount 5 sendbuff 0x7f recvbuff 0x7f count 1 datatype 7 [nranks=512]\n",
    "n1:1:2 [0] NCCL INFO Call to connect returned Connection refused, retrying\n",
    "epoch 12: loss 0.25, 1200 tokens/s, and so on and on and on\n",
    "[rank0]: Traceback (most recent call last):\n",
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nccl", "watchdog", "topo"])
def test_a_log_of_50_megabytes(tmp_path, kind):
    """Whichever reader gets it: nobody knows beforehand what is in a large file."""
    path = tmp_path / "nccl.log"
    block = "".join(NOISY) * 500
    with path.open("w") as handle:
        for _ in range(50_000_000 // len(block) + 1):
            handle.write(block)
    assert path.stat().st_size >= 50_000_000
    code = (
        "import resource, sys, pathlib\n"
        "from raybench.doctor.read import read_file\n"
        "answer = read_file(sys.argv[1], pathlib.Path(sys.argv[2]))\n"
        "usage = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(usage.ru_utime + usage.ru_stime, usage.ru_maxrss, sum(answer.get('transports', {}).values()))\n"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code, kind, str(path)], capture_output=True, text=True, check=True, cwd=root, timeout=120
    )
    seconds, kilobytes, connections = map(float, done.stdout.split())
    assert connections == (path.stat().st_size // len(block) * 1000 if kind == "nccl" else 0)
    assert seconds <= 5
    assert kilobytes <= 300_000
