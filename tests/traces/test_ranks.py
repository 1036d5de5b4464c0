"""What ranks tell together."""

import pytest

from raybench.traces.label import Label
from raybench.traces.rank import report_rank
from raybench.traces.ranks import bus_bandwidth, compare
from tests.traces import made

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL()"
ARGUMENTS = {"Collective name": "allreduce", "In msg nelems": 1000, "dtype": "Float", "Group size": 2}


def reports(tmp_path, *events, group="0", size=2, **more):
    """One report a rank; `events` are lists of (name, begin, duration)."""
    found = []
    for rank, own in enumerate(events):
        arguments = {**ARGUMENTS, "Group size": size, "Process Group Name": group, **more}
        kernels = [made.kernel(n, b, d, **(arguments if n.startswith("nccl") else {})) for n, b, d in own]
        document = made.document([made.kernel("gemm", 0, 1), *kernels], rank=rank, world_size=2)
        found.append(report_rank(made.write(tmp_path / f"rank_{rank}.json", document)))
    return found


def test_waiting_apart_from_transfer(tmp_path):
    """Rank 1 begins at 40 and 120; both end at 50 and 125."""
    both = reports(
        tmp_path, [(ALL_REDUCE, 10, 40), (ALL_REDUCE, 100, 25)], [(ALL_REDUCE, 40, 10), (ALL_REDUCE, 120, 5)]
    )
    together = compare(both)
    assert [[o.waiting_ns for o in r.operations] for r in both] == [[30_000, 20_000], [0, 0]]
    assert (together.last, together.waited_for_ns, together.straggler) == ([0, 2], [0, 50_000], 1)
    assert together.notes == []
    assert bus_bandwidth(both[0].operations) == pytest.approx(2 * 4000 / 15e-6)


def test_broadcast_is_not_waiting(tmp_path):
    name = "ncclDevKernel_Broadcast_RING_LL()"
    both = reports(tmp_path, [(name, 10, 40)], [(name, 40, 10)], **{"Collective name": "broadcast"})
    compare(both)
    assert [o.waiting_ns for r in both for o in r.operations] == [None, None]


@pytest.mark.parametrize(
    ("offsets", "waits"), [((0, 0), (30_000, 0)), ((0, 15_000), (40_000, 0)), (None, (None, None))]
)
def test_two_ends_of_a_send_wait_on_one_clock_alone(tmp_path, offsets, waits):
    """A receive is posted at 10 for 40, its send begins at 40; a receive never waits for longer than it lasts."""
    both = []
    for rank, (kind, begin, length) in enumerate([("receive", 10, 40), ("send", 40, 3)]):
        label = str(Label.of(kind, "pipeline", (1, 0), 4000, "1F0"))
        events = [made.annotation(label, begin, 1), made.annotation(f"gloo:{kind}", begin, length)]
        about = (
            {} if offsets is None else {"raybench": {"rank": rank, "ranks": [0, 1], "clock_offset_ns": offsets[rank]}}
        )
        path = made.write(tmp_path / f"rank_{rank}.json", made.document(events, rank=rank, world_size=2, **about))
        both.append(report_rank(path))
    together = compare(both)
    assert tuple(o.waiting_ns for r in both for o in r.operations) == waits
    assert together.straggler is None


@pytest.mark.parametrize(
    ("events", "size", "said"),
    [
        ([[(ALL_REDUCE, 10, 40)]], 2, "1 of 2 ranks are there"),
        ([[(ALL_REDUCE, 10, 40)], [(ALL_REDUCE, 10, 40)] * 2], 2, "same operations"),
        ([[(ALL_REDUCE, 10, 40)]], 1, "nobody to wait for"),
        ([[(ALL_REDUCE, 10, 40)]], 0, "do not tell its size"),
    ],
)
def test_what_cannot_be_told_apart(tmp_path, events, size, said):
    found = reports(tmp_path, *events, size=size)
    together = compare(found)
    assert said in together.notes[0]
    assert together.waited_for_ns == [None] * len(found)
    assert all(o.waiting_ns is None for r in found for o in r.operations)


def test_without_groups_the_world_is_the_group(tmp_path):
    both = []
    for rank, begin in enumerate([10, 40]):
        document = made.document([made.kernel(ALL_REDUCE, begin, 50 - begin)], rank=rank, world_size=2)
        both.append(report_rank(made.write(tmp_path / f"rank_{rank}.json", document)))
    assert compare(both).waited_for_ns == [0, 30_000]


def test_bubble_by_step(tmp_path):
    """GPipe of 2 stages and 2 micro-batches, forward 10 and backward 20: (p-1)/(m+p-1) = 1/3 on each rank and step."""
    plans = [[("F", 0, 0, 10), ("F", 1, 10, 10), ("B", 0, 50, 20), ("B", 1, 70, 20)],
             [("F", 0, 10, 10), ("F", 1, 20, 10), ("B", 0, 30, 20), ("B", 1, 50, 20)]]  # fmt: skip
    both = []
    for rank, plan in enumerate(plans):
        events = [made.annotation(f"ProfilerStep#{step}", 100 * step, 95) for step in range(2)]
        events += [
            made.annotation(f"PP:{rank}{kind}{number}", 100 * step + begin, length)
            for step in range(2)
            for kind, number, begin, length in plan
        ]
        both.append(report_rank(made.write(tmp_path / f"rank_{rank}.json", made.document(events, rank=rank))))
    assert compare(both).bubble == [pytest.approx(1 / 3), pytest.approx(1 / 3)]
    assert compare(both[:1]).bubble == [pytest.approx(1 / 3)]


def test_no_pipeline_no_bubble(tmp_path):
    assert compare(reports(tmp_path, [(ALL_REDUCE, 10, 40)])).bubble == [None]
