"""PyTorch's watchdog, store and flight-recorder messages of torch 1.8 to today."""

import json

import pytest

from raybench.doctor.read import read_watchdog


def codes(answer):
    return [item["code"] for item in answer["findings"]]


def find(answer, code):
    return next(item for item in answer["findings"] if item["code"] == code)


def work(seq=7, op="ALLREDUCE", numel=4096, out=None, limit=600_000):
    return f"WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={numel}, NumelOut={out or numel}, Timeout(ms)={limit})"


def caught(rank, inside=None, elapsed=600_040, **values):
    """A line of torch 2.2 and later."""
    inside = rank if inside is None else inside
    return (
        f"[rank{rank}]:[E1119 03:27:40.20{rank} ProcessGroupNCCL.cpp:607] [Rank {inside}] Watchdog caught collective "
        f"operation timeout: {work(**values)} ran for {elapsed + rank} milliseconds before timing out."
    )


def old(rank, text):
    """A line of torch 2.1 and earlier."""
    return f"[E ProcessGroupNCCL.cpp:475] [Rank {rank}] Watchdog caught collective operation timeout: {text}"


def at_work(rank, inside, group, seq, enqueued=None, completed=None, style="2.4"):
    enqueued, completed = enqueued or seq + 2, seq - 1 if completed is None else completed
    if style == "2.4":
        told = f"Exception (either an error or timeout) detected by watchdog at work: {seq}, last enqueued NCCL work: "
        told += f"{enqueued}, last completed NCCL work: {completed}."
    else:
        told = (
            f" failure detected by watchdog at work sequence id: {seq} PG status: last enqueued work: {enqueued}, last "
        )
        told += f"completed work: {completed}"
    return f"[rank{rank}]:[E1119 03:27:40.3 ProcessGroupNCCL.cpp:1664] [{group} Rank {inside}] {told}"


def ranks(answer):
    return [timeout["rank"] for timeout in answer["timeouts"]]


FULL = {"rank": 3, "seq": 7, "op": "ALLREDUCE", "numel_in": 4096, "numel_out": 4096, "timeout_ms": 600000}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (caught(3), FULL),
        (caught(3, inside=0), FULL),
        (caught(3).replace("[E1119 ", "[E321 "), FULL),
        (caught(3).replace("[Rank 3] Watchdog", "[PG ID 2 PG GUID 7(tp) Rank 3] Watchdog"), FULL),
        (caught(3).replace("[Rank 3] Watchdog", "Watchdog"), FULL),
        ("(RayTrainWorker pid=9, ip=10.0.0.1) " + caught(3), FULL),
        ("[default3]:" + caught(3), FULL),
        ("  942  " + caught(3), FULL),
        ("Map:  61%|██▏ | 41/67 [28:20<17:58, 4s/it]" + caught(3), FULL),
        ("B" + old(3, f"{work()} ran for 600016 milliseconds before timing out."), FULL),
        ("[rank3]: Watchdog caught collective operation timeout: " + work(), FULL),
        ("[rank3]: RuntimeError: [Rank 1] Watchdog caught collective operation timeout: " + work(), FULL),
        (old(3, "WorkNCCL(SeqNum=7, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 9 milliseconds"),
         FULL | {"numel_in": None, "numel_out": None}),
        (old(3, "WorkNCCL(OpType=ALLREDUCE, TensorShape=[2, 3], Timeout(ms)=600000) ran for 9 milliseconds"),
         FULL | {"seq": None, "numel_in": None, "numel_out": None}),
        ("Watchdog caught collective operation timeout: " + work(), FULL | {"rank": None}),
        (f"[E ProcessGroupNCCL.cpp:541] [Rank 3] Work {work()} timed out in blocking wait (X=1).", FULL),
        (f"[rank3]:[E1 ProcessGroupNCCL.cpp:541] [PG 0 Rank 3] Work {work()} timed out in blocking wait.", FULL),
        (caught(3).split(", Timeout")[0], FULL | {"timeout_ms": None}),
    ],
)  # fmt: skip
def test_one_timed_out_work(text, expected):
    answer = read_watchdog(text)
    assert answer["timeouts"] == [expected]
    assert "collective-timeout" in codes(answer)


@pytest.mark.parametrize("width", range(37, 130, 6))
def test_wrapped_inside_words_at_any_width(width):
    text = "\n".join([caught(2), at_work(2, 2, "PG 1", 7), caught(5), at_work(5, 5, "PG 1", 7)])
    wrapped = "\n".join(line[at : at + width] for line in text.splitlines() for at in range(0, len(line), width))
    answer = read_watchdog(wrapped)
    assert answer["timeouts"] == [FULL | {"rank": 2}, FULL | {"rank": 5}]
    assert codes(answer) == codes(read_watchdog(text)) == ["collective-timeout", "silent-rank"]


def test_wrapped_at_blanks():
    text = caught(2) + "\n" + caught(5)
    answer = read_watchdog(text.replace(" ", "\n"))
    assert ranks(answer) == [2, 5]


def test_repeats_of_a_work_count_once():
    wait = f"[E ProcessGroupNCCL.cpp:541] [Rank 2] Work {work()} timed out in blocking wait (NCCL_BLOCKING_WAIT=1)."
    first = old(2, f"{work()} ran for 600016 milliseconds before timing out.")
    thrown = (
        "terminate called after throwing an instance of 'std::runtime_error'\n  what():  " + first.split("] ", 1)[1]
    )
    assert ranks(read_watchdog("\n".join([first, wait, thrown]))) == [2]
    assert ranks(read_watchdog("\n".join([wait, first, thrown]))) == [2]


def test_an_exception_without_the_global_rank_is_no_second_work():
    line = caught(5, inside=1)
    thrown = (
        "  what():  [PG 3 Rank 1] Process group watchdog thread terminated with exception: " + line.split("607] ", 1)[1]
    )
    assert ranks(read_watchdog(line + "\nterminate called\n" + thrown)) == [5]


def test_works_without_numbers_are_told_apart_by_their_time():
    text = "WorkNCCL(OpType=ALLREDUCE, Timeout(ms)=600000) ran for {} milliseconds before timing out."
    one, two = old(0, text.format(600_001)), old(0, text.format(600_950))
    assert len(read_watchdog("\n".join([one, one, two]))["timeouts"]) == 2


def test_a_work_that_did_not_time_out_is_none():
    answer = read_watchdog(f"[rank0]:[I1119 03:27:40.2 ProcessGroupNCCL.cpp:1] [Rank 0] Work {work()} completed\n")
    assert (answer["timeouts"], codes(answer)) == ([], [])


def test_order_is_the_files():
    assert ranks(read_watchdog("\n".join(caught(rank) for rank in (3, 0, 2)))) == [3, 0, 2]


@pytest.mark.parametrize(
    ("lines", "silent"),
    [
        ([caught(1), caught(3)], ["0", "2"]),
        ([caught(0), caught(1)], []),
        ([caught(2)], ["0", "1"]),
        ([old(2, work(seq=4)), old(1, work(seq=4))], ["0"]),
        ([caught(4, inside=0), caught(5, inside=1), caught(7, inside=3)], ["6"]),
        ([caught(3, inside=1)], ["0 of the group"]),
        ([caught(1, op="SEND")], []),
    ],
)
def test_silent_ranks(lines, silent):
    answer = read_watchdog("\n".join(lines))
    assert ("silent-rank" in codes(answer)) is bool(silent)
    if silent:
        assert f"rank {', '.join(silent)} does not report" in find(answer, "silent-rank")["message"]


def test_a_barrier_is_recognised():
    answer = read_watchdog("\n".join(caught(rank, seq=3, numel=1) for rank in (1, 2)))
    assert any("barrier" in step for step in find(answer, "silent-rank")["advice"])
    answer = read_watchdog("\n".join(caught(rank, seq=3000, numel=1) for rank in (1, 2)))
    assert not any("barrier" in step for step in find(answer, "silent-rank")["advice"])


def test_a_rank_that_had_not_enqueued_the_work_is_named():
    dump = (
        "[rank2]:[E1 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank 2] Received a dump signal due to a "
        "collective timeout from rank 1. Last enqueued NCCL work: 6, last completed NCCL work: 6."
    )
    group = "PG ID 0 PG GUID 0(default_pg)"
    text = "\n".join([caught(0), at_work(0, 0, group, 7), caught(1), at_work(1, 1, group, 7), dump])
    item = find(read_watchdog(text), "silent-rank")
    assert "Rank 2 had only enqueued #6" in item["message"]


@pytest.mark.parametrize("style", ["2.4", "2.6"])
def test_groups_are_known_by_the_line_after(style):
    tp = [caught(0, 0, seq=40), at_work(0, 0, "PG ID 1 PG GUID 5", 40, style=style), caught(1, 1, seq=40)]
    dp = [caught(2, 0, seq=9), at_work(2, 0, "PG ID 2 PG GUID 8", 9, style=style), caught(4, 1, seq=9)]
    answer = read_watchdog("\n".join(tp + dp))
    assert codes(answer) == ["collective-timeout"]


def test_one_rank_in_several_groups_is_no_desync():
    answer = read_watchdog("\n".join([caught(0, seq=5), caught(0, seq=90), caught(1, seq=5)]))
    assert "ranks-desynchronised" not in codes(answer)


def test_two_ranks_of_one_number_are_two_groups():
    answer = read_watchdog("\n".join([caught(0, inside=0, seq=5), caught(4, inside=0, seq=9)]))
    assert "ranks-desynchronised" not in codes(answer)


@pytest.mark.parametrize(
    ("one", "two", "words"),
    [
        (caught(0, seq=5), caught(1, seq=6), "Rank 0 is behind"),
        (caught(0, op="ALLREDUCE"), caught(1, op="BROADCAST"), "different operations"),
    ],
)
def test_ranks_at_different_places(one, two, words):
    answer = read_watchdog(one + "\n" + two)
    assert words in find(answer, "ranks-desynchronised")["message"]


def test_a_send_and_a_receive_are_one_place():
    answer = read_watchdog(caught(0, op="SEND", seq=5) + "\n" + caught(1, op="RECV", seq=3))
    assert codes(answer) == ["collective-timeout"]


@pytest.mark.parametrize(("op", "expected"), [("ALLREDUCE", True), ("COALESCED", True), ("SEND", False)])
def test_sizes(op, expected):
    answer = read_watchdog(caught(0, op=op, numel=5) + "\n" + caught(1, op=op, numel=9))
    assert ("size-mismatch" in codes(answer)) is expected
    if expected:
        assert "rank 0: 5, rank 1: 9" in find(answer, "size-mismatch")["message"]


def test_first_collective():
    first = "\n".join(caught(rank, seq=1) for rank in range(3))
    assert codes(read_watchdog(first)) == ["collective-timeout", "stuck-first-collective"]
    assert "stuck-first-collective" not in codes(read_watchdog(first + "\n" + caught(3, seq=2)))


@pytest.mark.parametrize(
    ("status", "idle"),
    [
        ("Last enqueued NCCL work: 9, last completed NCCL work: 9.This is most likely", True),
        ("Last enqueued NCCL work: -1, last completed NCCL work: -1.", True),
        ("Last enqueued NCCL work: 10, last completed NCCL work: 9.", False),
        (
            "failure detected by watchdog at work sequence id: 9 PG status: last enqueued work: 9, last "
            "completed work: 9",
            True,
        ),
        ("PG status: last enqueued work: 5, last completed work: 5\n77%|#   | 7/9", True),  # not 577
        ("PG status: last enqueued work: 2288, last completed work: 22\n88", True),  # wrapped inside the number
    ],
)
def test_idle_groups(status, idle):
    answer = read_watchdog("[rank2]:[E1 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank 2] " + status)
    assert ("other-group-stuck" in codes(answer)) is idle


@pytest.mark.parametrize("style", ["2.4", "2.6"])
def test_the_watchdog_without_its_work(style):
    answer = read_watchdog(at_work(1, 1, "PG 1", 2288, style=style))
    assert (answer["timeouts"], codes(answer)) == ([], ["collective-timeout"])


DESYNC = (
    " - [1] Timeout at collective: ALLREDUCE, #4\n"
    " - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync are:\n"
    "     [0, 2] finished collective #3, but didn't join collective #4 (count from 1)\n"
)


def test_desync_report():
    answer = read_watchdog(old(1, work(seq=3)) + "\n" + DESYNC)
    item = find(answer, "ranks-desynchronised")
    assert "rank 0, 2 finished collective #3 and never joined #4" in item["message"]
    assert item["evidence"].startswith("[0, 2] finished")
    assert [timeout["seq"] for timeout in answer["timeouts"]] == [3]


def test_desync_report_of_ranks_that_never_came():
    text = " - To our best knowledge, ranks [3] are the lagging ranks that caused this timeout. They never joined any\n"
    assert "rank 3 never joined" in find(read_watchdog(text), "ranks-desynchronised")["message"]


FRAMES = ["c10d::ProcessGroupNCCL::ncclCommWatchdog()", "c10d::ProcessGroupNCCL::WorkNCCL::checkTimeout(std::optional<"]


@pytest.mark.parametrize("frame", FRAMES)
def test_stack_frames(frame):
    assert codes(read_watchdog(f"frame #1: {frame} + 0x1b4 (0x7f in libtorch_cuda.so)\n")) == ["collective-timeout"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "[W729 02:11:48.3 socket.cpp:489] [c10d] waitForInput: socket SocketImpl(fd=8) timed out after 1800000ms",
            "1800 s",
        ),
        ("torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//cuda//0", "300 s"),
        ("DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.", "601 s"),
        ("The client socket has timed out after 60s while trying to connect to (10.0.0.1, 29500).", "could not reach"),
    ],
)
def test_the_store(text, words):
    answer = read_watchdog("Filtering: 88%|██▊| 51/58 [29:57<04:03]" + text)
    assert codes(answer) == ["store-timeout"]
    assert words in answer["findings"][0]["message"]


def test_a_poll_that_may_time_out_is_no_store_timeout():
    line = "[rank3]:[W729 02:11:48.3 socket.cpp:464] [c10d] waitForInput: poll for socket returned 0, likely a timeout"
    assert codes(read_watchdog(line)) == []


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (
            "Not all ranks joining collective, sequence number: 3\ninternal record id: 2\nmissing ranks: {1, 4}\n",
            "ranks-desynchronised",
        ),
        (
            "Collective sequence number: 3 has errors\nCulprit rank 1; Error type: SIZE_OR_SYNTAX_MISMATCH\n",
            "size-mismatch",
        ),
        ("error msg: Culprit rank 1; Error type: COLLECTIVE_TYPE_MISMATCH\n", "ranks-desynchronised"),
        ("[Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 1800000 ms\n", "silent-rank"),
        (
            "RuntimeError: [gloo/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete\n",
            "collective-timeout",
        ),
        (
            "Detected mismatch between collectives on ranks. Rank 0 is running collective: "
            "CollectiveFingerPrint(SequenceNumber=3, "
            "OpType=ALLREDUCE, TensorShape=[8]), but Rank 1 is running collective: "
            "CollectiveFingerPrint(SequenceNumber=3, "
            "OpType=ALLREDUCE, TensorShape=[9]).",
            "size-mismatch",
        ),
    ],
)
def test_other_reports(text, code):
    assert codes(read_watchdog(text)) == [code]


PEER = "[rank1]:[E1119 03:27:40.2 ProcessGroupNCCL.cpp:1484] [PG ID 0 PG GUID 0(default_pg) Rank 1] "


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        (
            f"{PEER}ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring "
            "enqueued collectives. This typically indicates a NCCL/CUDA API (e.g., CudaEventDestroy) hang",
            "collective-timeout",
            "no progress for 480 s",
        ),
        (
            f"{PEER}Terminating the process after attempting to dump debug info, due to ProcessGroupNCCL watchdog "
            "hang.",
            "collective-timeout",
            "made no progress:",
        ),
        (
            f"{PEER}Process group watchdog thread terminated with exception: NCCL error: remote process exited or "
            "there was a network error, NCCL version 2.27.5\nncclRemoteError: A call failed.",
            "peer-closed",
            "only follows",
        ),
        (
            "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer "
            "[10.0.0.2]:35711",
            "peer-closed",
            "only follows",
        ),
        (
            "[W1119 03:27:40.2 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=60, addr=[n2]:43300, "
            "remote=[n1]:29500): failed to recv, got 0 bytes",
            "peer-closed",
            "only follows",
        ),
        (
            "RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no "
            "error",
            "wrong-interface",
            "127.0.1.1",
        ),
    ],
)
def test_what_is_no_time_out_of_a_collective(text, code, says, end):
    answer = read_watchdog(text.replace("\n", end) + end)
    assert codes(answer) == [code]
    assert says in answer["findings"][0]["message"]
    assert answer["timeouts"] == []


def test_missing_ranks_of_the_flight_recorder_are_named():
    text = "Not all ranks joining collective, sequence number: 3\ngroup info: 0:default_pg\nmissing ranks: {1, 4}\n"
    assert "rank 1, 4 never joined collective #3" in read_watchdog(text)["findings"][0]["message"]


def test_a_flight_recorder_dump_in_json():
    entries = [
        {
            "process_group": ["0", "default_pg"],
            "collective_seq_id": 8,
            "profiling_name": "nccl:all_reduce",
            "state": "completed",
        },
        {
            "process_group": ["2", "tp"],
            "collective_seq_id": 41,
            "profiling_name": "nccl:all_gather",
            "state": "started",
        },
    ]
    states = {"0": {"last_enqueued_collective": 8, "last_completed_collective": 8}}
    answer = read_watchdog(json.dumps({"version": "2.10", "entries": entries, "pg_status": states}))
    assert [(entry["group"], entry["op"], entry["seq"]) for entry in answer["pending"]] == [("2", "all_gather", 41)]
    assert codes(answer) == ["collective-timeout", "other-group-stuck"]
    assert answer["timeouts"] == []


def test_advice_fits_the_version_of_torch():
    new = " ".join(find(read_watchdog(caught(1)), "collective-timeout")["advice"])
    before = " ".join(find(read_watchdog(old(1, work())), "collective-timeout")["advice"])
    assert "TORCH_FR_BUFFER_SIZE=2000" in new
    assert "NCCL_DESYNC_DEBUG=1" in before
    assert "TORCH_FR_BUFFER_SIZE" not in before


def test_a_rank_whose_group_is_not_printed_belongs_to_the_only_one_that_is():
    answer = read_watchdog("\n".join([caught(0, seq=5), at_work(0, 0, "PG 1", 5), caught(1, seq=6)]))
    assert "Rank 0 is behind" in find(answer, "ranks-desynchronised")["message"]


def test_folklore_is_corrected():
    advice = " ".join(find(read_watchdog(caught(1)), "collective-timeout")["advice"])
    assert "init_process_group(timeout=" in advice
    assert "NCCL_TIMEOUT is no variable of NCCL's" in advice


@pytest.mark.parametrize("text", ["", "all is well\n", "Traceback (most recent call last):\nKeyError: 'Rank'\n"])
def test_not_recognised(text):
    assert codes(read_watchdog(text)) == ["not-recognised"]


def test_a_pickled_dump_is_explained():
    answer = read_watchdog(b"\x80\x04\x95\x01\x00".decode("utf-8", "replace"))
    assert "torchfrtrace" in answer["findings"][0]["advice"][0]
