"""Flight records and marks of several ranks, read together: who did not come, to what."""

from __future__ import annotations

import json

import pytest

from raybench.doctor.hang import read_hang
from raybench.doctor.marks import among, read_mark, text_of
from raybench.doctor.read import read_watchdog, story

OPS = ["all_reduce bucket 0", "all_reduce bucket 1", "broadcast buffers", "all_reduce bucket 2"]
STACK = """Training thread (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2500 in {call}
  File "/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/me/job/train.py", line 77 in step

Thread 0x00007f05418296c0 (most recent call first):
  File "/home/me/job/other.py", line 1 in beat
"""


def dump(rank=None, *, marks=(), entries=(), stack=None, groups=None, reached=None):
    config = {name: {"name": name, "desc": "", "ranks": json.dumps(ranks)} for name, ranks in (groups or {}).items()}
    body = {"rank": rank, "stack": stack, "entries": list(entries), "pg_config": config}
    body["last_operations"] = [{"seconds": 0.1, "operation": text} for text in marks]
    if reached:
        enqueued, completed = reached
        body["pg_status"] = {"1": {"last_enqueued_collective": enqueued, "last_completed_collective": completed}}
    return read_watchdog(json.dumps(body))


def entry(seq, op="all_reduce", *, group="0", done=True, backend="gloo", sizes=((8,),), **more):
    """As gloo's recorder writes it, whose state never changes."""
    return {
        "process_group": [group, "default_pg"],
        "collective_seq_id": seq,
        "profiling_name": f"{backend}:{op}",
        "state": "scheduled",
        "retired": done,
        "is_p2p": False,
        "input_sizes": [list(size) for size in sizes],
        **more,
    }


def transfer(text, *, group="1"):
    """As NCCL's recorder writes a send or receive that did not end."""
    return entry(0, text, group=group, backend="nccl", done=False, is_p2p=True, p2p_seq_id=1)


def collective(name, number, where="data 0-1"):
    kind, _, label = name.partition(" ")
    begun = text_of(kind, label, where, number)
    return [begun, f"wait for {begun}"]


def hung(*dumps):
    return read_hang(dict(enumerate(dumps)))


@pytest.mark.parametrize("ranks", [(0,), (0, 1), (3, 4, 5), (0, 4, 8), (1, 0), (5, 2, 9), tuple(range(0, 1024, 8))])
def test_a_mark_is_read_as_it_was_written(ranks):
    for begun in ("", "wait for "):
        mark = read_mark(begun + text_of("all_reduce", "bucket 2 over and over", f"tensor part {among(ranks)}", 17))
        assert (mark.is_wait, mark.kind, mark.label) == (bool(begun), "all_reduce", "bucket 2 over and over")
        assert (mark.axis, mark.ranks, mark.number, mark.is_transfer) == ("tensor part", ranks, 17, False)
    sent = read_mark(text_of("send", "0F1", f"pipeline {among((3, 1), is_transfer=True)}", 4) + ", before 0B0")
    assert (sent.ranks, sent.number, sent.is_transfer, sent.place) == ((3, 1), 4, True, "pipeline 3→1")


@pytest.mark.parametrize(
    "text",
    ["", "optimizer", "waiting for end of round", "all_reduce b over data 0-9", "x y over data 0-99999999999 #1"],
)
def test_other_marks_are_no_operations(text):
    assert read_mark(text) is None


def test_what_has_ended_is_not_pending_although_gloo_leaves_its_state():
    answer = dump(0, entries=[entry(1), entry(2, "broadcast"), entry(3, done=False)], groups={"0": [0, 1]})
    assert [(item["op"], item["seq"], item["ranks"]) for item in answer["pending"]] == [("all_reduce", 3, [0, 1])]
    assert answer["reached"] == {"0": 3}


def test_a_rank_that_never_came_is_named_with_the_operation_and_where_it_was():
    waits = dump(0, entries=[entry(1), entry(2, "all_gather", done=False)])
    away = dump(1, entries=[entry(1)], marks=["optimizer"], stack=STACK.format(call="f"))
    found = hung(waits, away)
    assert found.missing == (1,)
    assert found.sentence == (
        "rank 1 has not come to all_gather #2 of process group 0, in which rank 0 waits; rank 1 was at 'optimizer' "
        "(job/train.py:77 in step)"
    )
    assert [item["code"] for item in found.findings] == ["collective-timeout", "silent-rank"]


COMPUTES = """Training thread (most recent call first):
  File "/home/me/job/model.py", line 10 in forward
  File "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1789 in _call_impl
  File "/raybench/worker/loop.py", line 122 in run
"""
WAITS = """Training thread (most recent call first):
  File "/raybench/worker/communication.py", line 201 in wait
  File "/raybench/worker/loop.py", line 122 in run
"""


def test_a_wait_that_has_ended_is_not_where_the_rank_is():
    loss = collective("all_reduce loss", 7)
    waits = dump(0, marks=[*loss, *collective("all_reduce bucket 0", 8)], stack=WAITS, reached=("8", "7"))
    away = dump(1, marks=loss, stack=COMPUTES, reached=("7", "7"))
    found = hung(waits, away)
    assert found.missing == (1,)
    assert found.sentence == (
        "rank 1 has not come to all_reduce bucket 0 over data 0-1 #8, in which rank 0 waits; rank 1 was at "
        "job/model.py:10 in forward, after 'all_reduce loss over data 0-1 #7'"
    )
    assert found.findings[0]["message"] == "Hung: rank 0 in all_reduce bucket 0 over data 0-1 #8."


@pytest.mark.parametrize(
    ("stack", "reached"), [(COMPUTES, ("7", "6")), (WAITS, ("7", "7")), (None, ("7", "7")), (COMPUTES, None)]
)
def test_a_wait_goes_on_unless_all_says_that_it_ended(stack, reached):
    answer = dump(1, marks=collective("all_reduce loss", 7), stack=stack, reached=reached)
    assert [(item["op"], item["seq"]) for item in answer["pending"]] == [("all_reduce loss", 7)]


def test_marks_name_the_bucket_where_both_tell():
    marks = [text for number, name in enumerate(OPS, 1) for text in collective(name, number)]
    waits = dump(0, marks=marks, entries=[entry(4, done=False)])
    away = dump(1, marks=[*marks[:-2], "optimizer"], entries=[entry(3)])
    assert hung(waits, away).sentence.startswith(
        "rank 1 has not come to all_reduce bucket 2 over data 0-1 #4, in which rank 0 waits; rank 1 was at 'optimizer'"
    )


@pytest.mark.parametrize(("size", "odd"), [(2, 0), (2, 1), (4, 0), (4, 3)])
@pytest.mark.parametrize("left_out", range(3))
def test_a_collective_that_was_left_out_is_named_though_the_hang_is_later(size, odd, left_out):
    whole = [text for number, name in enumerate(OPS, 1) for text in collective(name, number, f"data 0-{size - 1}")]
    rest = OPS[:left_out] + OPS[left_out + 1 :]
    less = [text for number, name in enumerate(rest, 1) for text in collective(name, number, f"data 0-{size - 1}")]
    found = hung(*(dump(rank, marks=[*less, "optimizer"] if rank == odd else whole) for rank in range(size)))
    others = ", ".join(str(rank) for rank in range(size) if rank != odd)
    start = f"rank {odd} left out {OPS[left_out]}, #{left_out + 1} over data 0-{size - 1}, which rank {others} began"
    assert found.sentence.startswith(start)
    assert found.missing == (odd,)
    assert "ranks-desynchronised" in [item["code"] for item in found.findings]


def test_a_collective_too_many():
    more = [*OPS[:2], "barrier extra", *OPS[2:]]
    marks = [[text for n, name in enumerate(ops, 1) for text in collective(name, n)] for ops in (more, OPS, OPS)]
    found = hung(*(dump(rank, marks=texts) for rank, texts in enumerate(marks)))
    assert found.sentence.startswith("rank 0 began barrier extra as #3 over data 0-1, which rank 1, 2 did not")


def test_other_sizes_at_one_place():
    found = hung(dump(0, entries=[entry(1, done=False)]), dump(1, entries=[entry(1, done=False, sizes=((16,),))]))
    assert found.sentence.startswith("rank 1 began all_reduce [[16]] as #1 over 0, where rank 0 began all_reduce [[8]]")


def test_two_that_send_first_wait_for_each_other():
    places = ("pipeline 0→1", "pipeline 1→0")
    found = hung(*(dump(rank, marks=collective("send x", 1, places[rank])) for rank in (0, 1)))
    assert found.sentence == (
        "ranks 0 and 1 wait for each other, and none receives: rank 0 in send x over pipeline 0→1 #1; rank 1 in send x "
        "over pipeline 1→0 #1"
    )
    assert "batch_isend_irecv" in found.findings[-1]["advice"][0]


def test_two_that_send_first_by_nccls_recorder_and_global_ranks():
    groups = {"1": [4, 6]}
    dumps = {
        4: dump(4, entries=[transfer("send 0->1")], groups=groups),
        6: dump(6, entries=[transfer("send 1->0")], groups=groups),
    }
    sentence = read_hang(dumps).sentence
    assert sentence.startswith("ranks 4 and 6 wait for each other, and none receives: rank 4 in send 4→6 of process gr")


def test_a_transfer_whose_ends_are_both_there_is_the_network():
    both = dump(0, entries=[transfer("send 0->1")]), dump(1, entries=[transfer("recv 1<-0")])
    assert hung(*both).sentence.startswith("no rank is missing, so it is the network, or only slow: rank 0 in send 0→1")


def test_a_receive_whose_sender_is_elsewhere():
    waits = dump(1, marks=[*collective("receive 0F3", 4, "pipeline 0→1")])
    away = dump(0, marks=[*collective("send 0F2", 3, "pipeline 0→1"), "stage 0: forward of micro-batch 3"])
    assert read_hang({0: away, 1: waits}).sentence == (
        "rank 0 has not come to receive 0F3 over pipeline 0→1 #4, in which rank 1 waits; rank 0 was at 'stage 0: "
        "forward of micro-batch 3'"
    )


def test_the_end_of_a_chain_is_blamed_not_its_middle():
    chain = [
        dump(0, marks=collective("all_reduce grads", 5, "data 0-1")),
        dump(1, marks=[*collective("all_reduce grads", 4, "data 0-1"), *collective("receive x", 2, "pipeline 2→1")]),
        dump(2, marks=[*collective("send x", 1, "pipeline 2→1"), "reading a file"]),
    ]
    found = hung(*chain)
    assert found.missing == (2,)
    assert found.sentence.startswith("rank 2 has not come to receive x over pipeline 2→1 #2, in which rank 1 waits")


def test_two_collectives_in_another_order_are_a_circle():
    dumps = [
        dump(0, marks=collective("all_reduce a", 1, "data 0-1")),
        dump(1, marks=collective("all_reduce b", 1, "tensor 0-1")),
    ]
    assert hung(*dumps).sentence.startswith(
        "ranks 0 and 1 wait for each other: rank 0 in all_reduce a over data 0-1 #1"
    )


def test_a_rank_of_which_nothing_came_is_missing():
    found = read_hang({0: dump(0, marks=collective("all_reduce a", 1, "data 0-1"))})
    assert found.sentence.endswith("in which rank 0 waits; rank 1 does not tell where it was")


@pytest.mark.parametrize(
    ("calls", "sentence"),
    [
        (["send", "send"], "ranks 0 and 1 wait for each other, and none receives: rank 0 in send; rank 1 in send"),
        (["recv", "recv"], "ranks 0 and 1 wait for each other, and none sends: rank 0 in receive; rank 1 in receive"),
        (["barrier", "all_reduce"], "every rank waits: rank 0 in barrier; rank 1 in all_reduce"),
    ],
)
def test_stacks_tell_where_nothing_else_does(calls, sentence):
    assert hung(*(dump(rank, stack=STACK.format(call=call)) for rank, call in enumerate(calls))).sentence == sentence


def test_a_rank_in_no_operation_is_found_by_the_others_stacks():
    found = hung(dump(0, stack=STACK.format(call="all_reduce")), dump(1, marks=["optimizer"]))
    assert found.sentence == "rank 1 is in no operation, while rank 0 in all_reduce waits; rank 1 was at 'optimizer'"


def test_nothing_is_made_up_of_ranks_that_wait_for_nothing():
    found = hung(dump(0, marks=["optimizer"]), dump(1, marks=["forward"]))
    assert (found.sentence, found.missing, found.findings) == (None, (), ())


def test_several_dumps_are_one_story_and_the_file_name_tells_the_rank():
    waits, away = dump(None, entries=[entry(1), entry(2, done=False)]), dump(None, entries=[entry(1)])
    answer = story([("watchdog", "dumps/nccl_trace_rank_3.json", away), ("watchdog", "nccl_trace_rank_2.json", waits)])
    assert answer["verdict"].startswith(
        "Rank 3 has not come to all_reduce #2 of process group 0, in which rank 2 waits"
    )
    assert answer["verdict"].endswith("; its last there is all_reduce [[8]] #1.")
    assert answer["silent_ranks"] == ["3"]


@pytest.mark.parametrize(
    "body",
    [
        {"entries": [1, None, {}, {"state": "started"}]},
        {"entries": [{"process_group": [], "collective_seq_id": "x", "state": "scheduled", "profiling_name": 3}]},
        {"entries": [], "last_operations": [3, {"operation": None}, {}], "stack": 5, "pg_config": 4, "pg_status": []},
        {"entries": [], "pg_config": {"a": 1, "b": {"ranks": {"x": 1}}}, "pg_status": {"0": 3, "1": {}}, "rank": "z"},
    ],
)
def test_odd_dumps_are_no_traceback(body):
    answer = read_watchdog(json.dumps(body))
    story([("watchdog", "a0.json", answer), ("watchdog", "a1.json", answer)])
