"""What real ranks record is read back: every operation, on its axis and with its label."""

import gzip
import json
import os
import shutil
from collections import defaultdict
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from raybench.cli import main
from raybench.data.batches import Batches
from raybench.errors import RequestError
from raybench.parallel.pipeline.plan import make_plan
from raybench.parallel.pipeline.schedules import SCHEDULES
from raybench.parallel.pipeline.theory import theory_bubble
from raybench.suite.request import DEFAULT_TRACED_STEPS, Request, traced_steps
from raybench.suite.track import Case, Layout, ModelConfig
from raybench.traces.label import Label
from raybench.traces.names import spoken_collective
from raybench.traces.rank import report_rank
from raybench.traces.ranks import compare
from raybench.worker.build import build_strategy
from raybench.worker.messages import RoundRows
from raybench.worker.spans import Span
from raybench.worker.trace import TracePlan, record_trace, with_spans
from tests.gating import data_case, workload
from tests.traces import made
from tests.worker import test_loop

FIRST_STEP = 5
STRATEGIES = ("accumulated", "bucketed", "torch-ddp", "zero3", "one-f-one-b", "sequence")
FAMILIES = {
    "data": data_case("bucketed", 2, bucket_mib=2),
    "pipeline": Case(name="pipeline", layout=Layout(pipeline=2), strategy={"pipeline": "one-f-one-b"}),
    "tensor": Case(name="tensor", layout=Layout(tensor=2), strategy={"tensor": "megatron"}),
    "sequence": Case(name="sequence", layout=Layout(tensor=2), strategy={"tensor": "sequence"}),
    "sharded": data_case("zero2", 2, bucket_mib=2),
    "sharded by layer": data_case("zero3", 2),
    "hybrid-sharded": data_case("hybrid-sharded", 4, num_shards=2),
    "data and tensor": Case(
        name="hybrid", layout=Layout(data=2, tensor=2), strategy={"data": "zero1", "tensor": "sequence"}
    ),
    "pipeline and tensor": Case(
        name="hybrid", layout=Layout(pipeline=2, tensor=2), strategy={"pipeline": "one-f-one-b", "tensor": "megatron"}
    ),
}
SMALL = ModelConfig(num_layers=4, width=256, num_heads=4, ffn_width=1024, vocabulary_size=1024)
"""For data parallelism: its tensors are as large as the model."""
WAKE_NS = 2_000_000
"""What an operation may last longer in the recorder, which sees its end when the rank goes on: more on busy cores."""
TIMES = ("forward_ms", "input_gradient_ms", "weight_gradient_ms")


def case_of(name):
    if name in SCHEDULES:
        return Case(name=name, layout=Layout(pipeline=2), strategy={"pipeline": name})
    if name == "sequence":
        return FAMILIES[name]
    return data_case(name, 2)


def timed(block_ms, *, width=64, **more):
    """A workload of one block a stage that takes a set time."""
    options = dict.fromkeys(TIMES, block_ms)
    model = ModelConfig(name="timed", num_layers=2, width=width, ffn_width=16, vocabulary_size=64, options=options)
    return workload(model, optimizer={"name": "sgd", "learning_rate": 1e-3, "weight_decay": 0.0}, **more)


def large(case):
    """A workload whose operations take many milliseconds: large gradients, or activations of 16 MiB."""
    if case.layout.data == case.layout.num_ranks:
        return workload(SMALL, sequence_length=64, num_micro_batches=4, clip_gradient_norm=1.0)
    return timed(1.0, width=1024, sequence_length=512, micro_batch_size=8, num_micro_batches=2)


def record(rank, case, work, *, with_nsys=False):
    """One rank's trace, and the recorder's operations of the traced steps."""
    mesh = rank.mesh(case.layout, case.options.get("num_shards"))
    strategy = build_strategy(work, case, mesh, rank.device)
    ranks = list(range(case.layout.num_ranks))
    about = {"suite_id": "s", "track": "t", "case": case.name, "round": 1, "rank": rank.rank, "ranks": ranks}
    plan = TracePlan(num_steps=2, with_nsys=with_nsys, about={**about, "clock_offset_ns": 0})
    source = Batches(work, case.layout.data)
    batches = [source.batch(FIRST_STEP + i, mesh.data.index) for i in range(plan.num_batches)]
    strategy.instrument()
    data = record_trace(plan, strategy, batches, rank.recorder, FIRST_STEP)
    strategy.close()
    keys = ("kind", "axis", "label", "payload_bytes", "begin_ns", "end_ns")
    recorded = [{key: getattr(o, key) for key in keys} for o in rank.recorder.operations if o.step > FIRST_STEP]
    return data, recorded


def read(folder, rank, data):
    path = folder / f"rank_{rank}.json.gz"
    path.write_bytes(data)
    return report_rank(path)


def in_groups(found):
    """Calls, bytes and nanoseconds of operations by axis, collective and label."""
    sums = defaultdict(lambda: [0, 0, 0])
    for axis, collective, label, payload, duration in found:
        for place, value in enumerate((1, payload, duration)):
            sums[axis, collective, label][place] += value
    return dict(sums)


@pytest.mark.parametrize("name", STRATEGIES)
def test_recorded_operations_are_found_again(pools, tmp_path, name):
    reports = []
    work = workload(num_micro_batches=2, sequence_length=8)
    for rank, (data, recorded) in enumerate(pools(2).run(record, case_of(name), work)):
        report = read(tmp_path, rank, data)
        reports.append(report)
        assert (report.rank, report.world_size, report.problems) == (rank, 2, [])
        assert (report.case["case"], report.steps.numbers) == (name, [FIRST_STEP + 1, FIRST_STEP + 2])
        labelled = [o for o in report.operations if o.label]
        found = [(o.collective, o.group.split()[0], o.label, o.payload_bytes) for o in labelled]
        assert found == [(spoken_collective(o["kind"]), o["axis"], o["label"], o["payload_bytes"]) for o in recorded]
        for operation, own in zip(labelled, recorded, strict=True):
            assert own["begin_ns"] < operation.end
            assert operation.begin < own["end_ns"]
        assert len(report.memory) > 0
        assert set(report.phases) == {"forward", "backward", "optimizer"}
        assert report.compute_ns > 0
    together = compare(reports)
    assert together.notes == [] or name == "torch-ddp"
    assert together.waited_for_ns != [None, None] or name == "torch-ddp"
    if name in SCHEDULES:
        plan = make_plan(case_of(name), work)
        for rank, report in enumerate(reports):
            done = zip(report.actions.stages, report.actions.kinds, report.actions.micro_batches, strict=True)
            assert [f"{stage}{kind}{number}" for stage, kind, number in done] == 2 * [
                str(action) for action in plan.schedule.compute(rank)
            ]
        assert all(0 <= bubble < 1 for bubble in together.bubble)


@pytest.mark.slow
@pytest.mark.flaky(reruns=2)
@pytest.mark.parametrize("name", FAMILIES)
def test_communication_of_every_family_equals_the_recorders(pools, tmp_path, name):
    """By axis and bucket: calls and bytes exactly, time to 2 % and what a rank takes to go on; of all, time to 2 %.

    Where ranks share cores, one may have to wait for a core before it sees an end: there times are not compared.
    """
    case = FAMILIES[name]
    axes = set()
    for rank, (data, recorded) in enumerate(pools(case.layout.num_ranks).run(record, case, large(case))):
        report = read(tmp_path, rank, data)
        assert all(o.label for o in report.operations)
        ours = in_groups(
            (o.group.split()[0], o.collective, o.label, o.payload_bytes, o.duration_ns) for o in report.operations
        )
        theirs = in_groups(
            (o["axis"], spoken_collective(o["kind"]), o["label"], o["payload_bytes"], o["end_ns"] - o["begin_ns"])
            for o in recorded
        )
        assert {key: value[:2] for key, value in ours.items()} == {key: value[:2] for key, value in theirs.items()}
        if case.layout.num_ranks <= len(os.sched_getaffinity(0)):
            for key, (calls, _, duration) in theirs.items():
                assert ours[key][2] == pytest.approx(duration, rel=0.02, abs=WAKE_NS * calls), key
            assert report.communication_sum_ns == pytest.approx(sum(v[2] for v in theirs.values()), rel=0.02)
        axes |= {axis for axis, _, _ in ours}
    expected = {axis for axis in ("data", "pipeline", "tensor") if getattr(case.layout, axis) > 1}
    if case.options.get("num_shards"):  # the data axis in two
        expected = expected - {"data"} | {"shards", "replicas"}
    assert axes >= expected


@pytest.mark.flaky(reruns=2)
def test_bubble_of_a_timed_pipeline_is_the_schedules(pools, tmp_path):
    """Two stages of one block of 3 × 25 ms, four micro-batches: a fifth of the step, on each rank."""
    case, work = case_of("one-f-one-b"), timed(25.0, num_micro_batches=4)
    reports = [read(tmp_path, i, data) for i, (data, _) in enumerate(pools(2).run(record, case, work))]
    together = compare(reports)
    theory = theory_bubble(make_plan(case, work).schedule)
    assert theory == pytest.approx(0.2)
    for report, bubble in zip(reports, together.bubble, strict=True):
        assert bubble == pytest.approx(theory, abs=0.02)
        assert all(o.waiting_ns is not None for o in report.operations if o.collective == "p2p")


@pytest.mark.flaky(reruns=2)
def test_waiting_on_the_timed_model_is_what_the_slow_rank_takes_longer(pools, tmp_path):
    """Rank 1's blocks take 40 ms more a part: of each of its steps rank 0 waits 2 × 3 × 40 ms."""
    quick, slow = (timed(block_ms, num_micro_batches=1) for block_ms in (10.0, 50.0))
    case = data_case("accumulated", 2)
    reports = [read(tmp_path, i, data) for i, (data, _) in enumerate(pools(2).run(record_unlike, case, [quick, slow]))]
    together = compare(reports)
    assert together.straggler == 1
    longer_ns = 2 * 2 * 3 * 40e6  # of two steps
    waits = [sum(o.waiting_ns for o in report.operations) for report in reports]
    assert waits[0] == pytest.approx(longer_ns, rel=0.02)
    assert waits[1] < 0.02 * longer_ns
    assert together.waited_for_ns[1] == pytest.approx(longer_ns, rel=0.02)


def record_unlike(rank, case, works):
    """Every rank with a workload of its own, of the same shapes."""
    return record(rank, case, works[rank.rank])


def test_spans_of_actions_become_pipeline_actions(tmp_path):
    document = made.document([made.event("cpu_op", "aten::mm", 0, 5)])
    seen = [("step", "", 0, 90), ("forward", "0F1", 1500, 2500), ("backward", "0B1", 3000, 7000)]
    seen.append(("optimizer", "", 7000, 8000))
    spans = [Span(3, kind, label, made.BASE_NS + begin, made.BASE_NS + end) for kind, label, begin, end in seen]
    packed = gzip.compress(json.dumps(document).encode())
    (tmp_path / "t.json.gz").write_bytes(with_spans(packed, spans, torch.device("cpu")))
    report = report_rank(tmp_path / "t.json.gz")
    assert list(zip(report.actions.kinds, (report.actions.times - made.BASE_NS).tolist(), strict=True)) == [
        ("F", [1500, 2500]),
        ("B", [3000, 7000]),
    ]
    assert report.phases == {"forward": 1000, "backward": 4000, "optimizer": 1000}


@pytest.mark.parametrize(("deadline", "traced"), [(None, [False, True]), (4e9, [True, False])])
def test_traced_once_in_the_last_round_or_the_one_that_a_deadline_leaves(pools, deadline, traced):
    job = test_loop.make_job([data_case("bucketed", 2)], trace_steps=1, deadline_unix_s=deadline)
    for messages in pools(2).run(test_loop.run, job):
        traces = [m.trace for m in messages if isinstance(m, RoundRows)]
        assert [trace is not None and trace[:2] == b"\x1f\x8b" for trace in traces] == traced


def record_under_nsys(rank, case, work):
    """What nsys would see of one rank: its ranges, and when it starts and stops; one line each."""
    seen = []

    @contextmanager
    def range_of(name):
        seen.append(name)
        yield

    with (
        patch("torch.cuda.nvtx.range", range_of),
        patch("torch.cuda.profiler.start", lambda: seen.append("start")),
        patch("torch.cuda.profiler.stop", lambda: seen.append("stop")),
    ):
        data, recorded = record(rank, case, work, with_nsys=True)
    return data, seen, recorded


def test_nsys_gets_the_same_names(pools):
    """NVTX ranges, inside a capture of the traced steps alone."""
    case = data_case("accumulated", 2)
    for data, seen, recorded in pools(2).run(record_under_nsys, case, workload(num_micro_batches=2)):
        assert data is None
        begin = seen.index("start")
        assert [name for name in seen[:begin] if Label.parse(name) is None] == []
        traced = seen[begin:]
        steps = [f"ProfilerStep#{FIRST_STEP + 1}", f"ProfilerStep#{FIRST_STEP + 2}"]
        assert [name for name in traced if Label.parse(name) is None] == ["start", *steps, "stop"]
        labels = [found for name in traced if (found := Label.parse(name)) is not None]
        assert [(o.kind, o.axis, o.label) for o in labels] == [(o["kind"], o["axis"], o["label"]) for o in recorded]


@pytest.mark.parametrize(
    ("trace", "nsys", "steps"), [(None, False, 0), ("", False, DEFAULT_TRACED_STEPS), ("7", False, 7), (None, True, 2)]
)
def test_how_many_steps(trace, nsys, steps):
    assert traced_steps(trace, with_nsys=nsys) == steps


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--trace=0"], "--trace: '0' is not allowed"),
        (["--nsys", "--launcher", "torchrun"], "--nsys: Ray starts nsys"),
        (["--nsys"], "--nsys: no nsys on PATH"),
    ],
)
def test_wrong_requests(capfd, monkeypatch, tmp_path, arguments, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert main(["run", "a", *arguments]) == 2
    assert said in capfd.readouterr().err


def test_nsys_keeps_its_reports(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nsys")
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    request = Request(targets=("a",), results="results", with_nsys=True)
    with pytest.raises(RequestError, match="RAY_TMPDIR is not set"):
        request.check()
