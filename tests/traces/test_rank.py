"""One rank's numbers, worked out by hand, and against a plain reference."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raybench.traces.columns import Columns
from raybench.traces.kineto import read_trace
from raybench.traces.label import Label
from raybench.traces.operations import find_operations
from raybench.traces.rank import report_rank
from raybench.traces.ranks import bus_bandwidth
from tests.traces import made

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL()"
SEND_RECV = "ncclDevKernel_SendRecv()"
GENERIC = "ncclDevKernel_Generic()"


def report(tmp_path, events, **more):
    return report_rank(made.write(tmp_path / "t.json", made.document(events, **more)))


def operations(tmp_path, events, **more):
    return find_operations(read_trace(made.write(tmp_path / "t.json", made.document(events, **more))).events)


def test_breakdown_of_a_gpu(tmp_path):
    """gemm 0-40 and 30-50 on two streams; copy 50-60; all-reduce 45-80; idle 80-90; gemm 90-100."""
    found = report(
        tmp_path,
        [
            made.kernel("gemm", 0, 40),
            made.kernel("gemm", 30, 20, stream=8),
            made.kernel("Memcpy HtoD", 50, 10, cat="gpu_memcpy"),
            made.kernel(ALL_REDUCE, 45, 35, stream=9),
            made.kernel("gemm", 90, 10),
            made.event("gpu_user_annotation", "nccl:all_reduce", 0, 100, pid=0, tid=9),
            made.event("cpu_op", "aten::mm", 0, 1000),
        ],
    )
    assert (found.span_ns, found.idle_ns, found.compute_ns) == (100_000, 10_000, 60_000)
    assert (found.communication_ns, found.overlap_ns) == (35_000, 5_000)
    assert (found.compute_sum_ns, found.communication_sum_ns, found.memory_sum_ns) == (70_000, 35_000, 10_000)
    assert [(t.name, t.kind, t.calls, t.time_ns) for t in found.top] == [
        ("gemm", "compute", 3, 70_000),
        ("all_reduce", "communication", 1, 35_000),
        ("Memcpy HtoD", "memory", 1, 10_000),
    ]
    assert sum(found.timeline.compute) / len(found.timeline.compute) == pytest.approx(0.60, abs=0.002)
    assert sum(found.timeline.exposed) / len(found.timeline.exposed) == pytest.approx(0.30, abs=0.002)


@given(
    st.lists(
        st.tuples(st.sampled_from(["gemm", ALL_REDUCE, "Memset"]), st.integers(0, 30), st.integers(1, 15)),
        min_size=1,
        max_size=8,
    )
)
def test_breakdown_against_counting_instants(tmp_path_factory, some):
    kinds = {"gemm": "kernel", ALL_REDUCE: "kernel", "Memset": "gpu_memset"}
    found = report(tmp_path_factory.mktemp("t"), [made.kernel(n, b, d, cat=kinds[n]) for n, b, d in some])
    during = {name: {at for n, b, d in some if n == name for at in range(b, b + d)} for name in kinds}
    busy = set().union(*during.values())
    span = max(busy) + 1 - min(busy)
    assert found.span_ns == span * 1000
    assert found.idle_ns == (span - len(busy)) * 1000
    assert found.compute_ns == len(during["gemm"]) * 1000
    assert found.overlap_ns == len(during["gemm"] & during[ALL_REDUCE]) * 1000


def test_breakdown_of_a_cpu(tmp_path):
    """Operators that compute, not the frames around them; gloo's annotation is the operation's time."""
    found = report(
        tmp_path,
        [
            made.event("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 0, 100),
            made.event("cpu_op", "aten::linear", 10, 20),
            made.event("cpu_op", "aten::addmm", 15, 10),
            made.event("cpu_op", "c10d::allreduce_", 20, 60),
            made.annotation("gloo:all_reduce", 25, 45, **{"Input Dims": [[1000]], "Input type": ["float"]}),
            made.event("cpu_op", "aten::mul", 80, 10),
        ],
    )
    assert not found.on_gpu
    assert (found.span_ns, found.idle_ns, found.compute_ns) == (80_000, 10_000, 30_000)
    assert (found.communication_ns, found.overlap_ns) == (45_000, 5_000)
    assert [(o.collective, o.payload_bytes) for o in found.operations] == [("all_reduce", 4000)]
    assert {t.name: t.time_ns for t in found.top if t.kind == "compute"} == {
        "aten::linear": 10_000,
        "aten::addmm": 10_000,
        "aten::mul": 10_000,
    }


def test_nccl_launches_without_gpu_activities(tmp_path):
    found = report(tmp_path, [made.event("cpu_op", "aten::mm", 0, 5), made.annotation("nccl:all_to_all", 7, 2)])
    assert found.operations == []
    assert found.problems == ["no GPU activities in it: 1 launches of communication, but not its time"]


ARGUMENTS = {
    "Collective name": "_allgather_base",
    "In msg nelems": 100,
    "Out msg nelems": 400,
    "dtype": "BFloat16",
    "Group size": 4,
    "Process Group Name": "1",
    "Process Group Description": "tensor",
}


def test_collective_size_and_group_by_the_kernels_arguments(tmp_path):
    (found,) = operations(tmp_path, [made.kernel("ncclDevKernel_AllGather_RING_LL()", 0, 3, **ARGUMENTS)])
    assert (found.collective, found.payload_bytes, found.group, found.group_size) == (
        "all_gather",
        800,
        "1 (tensor)",
        4,
    )
    assert found.wire_bytes == 600
    assert bus_bandwidth([found]) == pytest.approx(600 / 3e-6)


@pytest.mark.parametrize("name", [SEND_RECV, GENERIC])
def test_operation_by_the_annotation_on_the_stream(tmp_path, name):
    events = [
        made.kernel(name, 10, 5, stream=4),
        made.event("gpu_user_annotation", "nccl:all_to_all", 10, 5, pid=0, tid=4),
        made.event("gpu_user_annotation", "nccl:broadcast", 9, 20, pid=0, tid=5),
    ]
    assert [o.collective for o in operations(tmp_path, events)] == ["all_to_all"]


@pytest.mark.parametrize("name", [SEND_RECV, GENERIC])
@pytest.mark.parametrize("launched_by", ["cuda_runtime", "cuda_driver", "Runtime"])
def test_operation_and_size_by_the_annotations_around_the_launch(tmp_path, name, launched_by):
    events = [
        made.event("cpu_op", "record_param_comms", 0, 9, **{**ARGUMENTS, "Collective name": "all_to_allv"}),
        made.annotation("nccl:all_to_all", 1, 7),
        made.launch(3, 55, cat=launched_by),
        made.annotation("nccl:broadcast", 0, 9, tid=2),
        made.kernel(name, 40, 5, stream=4, correlation=55),
    ]
    (found,) = operations(tmp_path, events)
    assert (found.collective, found.payload_bytes, found.group_size) == ("all_to_all", 200, 4)


def test_operation_that_nothing_tells(tmp_path):
    assert [o.collective for o in operations(tmp_path, [made.kernel(GENERIC, 0, 1), made.kernel(SEND_RECV, 2, 1)])] == [
        "unknown",
        "p2p",
    ]


def test_raybenchs_own_label(tmp_path):
    label = Label.of("all_reduce", "data", (0, 2), 4096, "bucket 0: a:b")
    assert Label.parse(str(label)) == label
    events = [made.annotation(str(label), 0, 9), made.annotation("gloo:all_reduce", 2, 40)]
    (found,) = operations(tmp_path, events)
    assert (found.group, found.group_size, found.payload_bytes, found.label) == (
        "data [0,2]",
        2,
        4096,
        "bucket 0: a:b",
    )
    assert Label.of("all_reduce", "data", range(0, 32, 2), 1, "").group == "data [0,2…30]"


def test_labels_of_what_gloos_own_thread_runs_in_order(tmp_path):
    labels = [Label.of("all_reduce", "data", (0, 1), 8, f"bucket {i}") for i in range(2)]
    events = [
        made.annotation("gloo:all_reduce", 1, 2, tid=9),
        made.annotation(str(labels[0]), 5, 3),
        made.annotation(str(labels[1]), 10, 3),
        made.annotation("gloo:all_reduce", 6, 14, tid=9),
        made.annotation("gloo:all_reduce", 22, 8, tid=9),
    ]
    found = operations(tmp_path, events)
    assert [(o.label, o.begin - made.BASE_NS, o.end - made.BASE_NS) for o in found] == [
        ("", 1000, 3000),
        ("bucket 0", 5000, 20_000),
        ("bucket 1", 10_000, 30_000),
    ]


def test_waits_for_launches(tmp_path):
    """Gaps 10-20 (launched at 18: 8 of it) and 30-50 (launched at 5: none) in step 0; 60-100 (at 90: 30) in step 1."""
    events = [
        made.annotation("ProfilerStep#0", 0, 55),
        made.annotation("ProfilerStep#1", 55, 50),
        made.annotation("ProfilerStep#2", 105, 90),
        *(made.launch(at, number) for number, at in enumerate([0, 18, 5, 90, 110])),
        *(made.kernel("gemm", at, 10, correlation=number) for number, at in enumerate([0, 20, 50, 100, 120])),
    ]
    steps = report(tmp_path, events).steps
    assert (steps.numbers, steps.launch_wait_ns, steps.total_launch_wait_ns) == ([0, 1], [8000, 30000], 38000)
    assert steps.launch_bound == [0, 1]
    late = report(tmp_path, [made.launch(0, 0), *(e for e in events if e["cat"] != "cuda_runtime")]).steps
    assert late.launch_bound == []


def test_of_several_steps_the_last_is_left_out(tmp_path):
    """By when work was launched, as HolisticTraceAnalysis does; raybench's own traces hold whole steps."""
    events = [
        *(made.annotation(f"ProfilerStep#{step}", 100 * step, 100) for step in range(2)),
        *(made.launch(at, at) for at in (0, 99, 101)),
        made.kernel("gemm", 10, 20, correlation=0),
        made.kernel(ALL_REDUCE, 110, 20, stream=9, correlation=99),
        made.kernel("gemm", 130, 20, correlation=101),
        made.kernel("gemm", 5, 20, correlation=77),
    ]
    found = report(tmp_path, events)
    assert (found.steps.numbers, found.compute_ns, found.communication_ns, found.span_ns) == (
        [0],
        20_000,
        20_000,
        120_000,
    )
    own = report(tmp_path, events, raybench={"case": "naive"})
    assert (own.steps.numbers, own.compute_ns, own.span_ns) == ([0, 1], 45_000, 145_000)


def test_memory_of_the_gpu_alone(tmp_path):
    events = [
        made.kernel("gemm", 0, 1),
        made.memory(2, 3 << 20, 8 << 20),
        made.memory(1, 1 << 20, 4 << 20),
        made.memory(3, 9 << 30, -1, device_type=0),
    ]
    found = report(tmp_path, events)
    assert found.memory[:, 1:].tolist() == [[1 << 20, 4 << 20], [3 << 20, 8 << 20]]


@pytest.mark.parametrize(
    ("names", "actions"),
    [
        (["PP:0F0", "PP:2B1", "PP:1W3"], [("F", 0, 0), ("B", 2, 1), ("W", 1, 3)]),
        (["Forward 0", "Backward 7"], [("F", -1, 0), ("B", -1, 7)]),
        (["raybench:action:3I2", "PP:0RECV_F1", "Forward pass"], [("I", 3, 2)]),
    ],
)
def test_pipeline_actions(tmp_path, names, actions):
    found = report(tmp_path, [made.annotation(name, 10 * i, 5) for i, name in enumerate(names)]).actions
    assert list(zip(found.kinds, found.stages, found.micro_batches, strict=True)) == actions


def test_no_events_at_all():
    events = Columns().finish(0)
    assert (events.kind.size, find_operations(events)) == (0, [])
    assert np.array_equal(events.memory, np.empty((0, 4)))
