"""What real ranks record is read back: every operation, on its axis and with its label."""

import gzip
import json
import shutil

import pytest
import torch

from raybench.cli import main
from raybench.data.batches import Batches
from raybench.errors import RequestError
from raybench.parallel.pipeline.plan import make_plan
from raybench.parallel.pipeline.schedules import SCHEDULES
from raybench.suite.request import DEFAULT_TRACED_STEPS, Request, traced_steps
from raybench.suite.track import Case, Layout
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
STRATEGIES = ("accumulated", "bucketed", "torch-ddp", "zero3", "one-f-one-b")


def case_of(name):
    if name in SCHEDULES:
        return Case(name=name, layout=Layout(pipeline=2), strategy={"pipeline": name})
    return data_case(name, 2)


def record(rank, name):
    """One rank's trace, and the recorder's operations of the traced steps."""
    work = workload(num_micro_batches=2)
    case = case_of(name)
    mesh = rank.mesh(case.layout)
    strategy = build_strategy(work, case, mesh, rank.device)
    about = {"suite_id": "s", "track": "t", "case": name, "round": 1, "rank": rank.rank, "ranks": [0, 1]}
    plan = TracePlan(num_steps=2, with_nsys=False, about={**about, "clock_offset_ns": 0})
    source = Batches(work, case.layout.data)
    batches = [source.batch(FIRST_STEP + i, mesh.data.index) for i in range(plan.num_batches)]
    strategy.instrument()
    data = record_trace(plan, strategy, batches, rank.recorder, FIRST_STEP)
    strategy.close()
    keys = ("kind", "axis", "label", "payload_bytes", "begin_ns", "end_ns")
    recorded = [{key: getattr(o, key) for key in keys} for o in rank.recorder.operations if o.step > FIRST_STEP]
    return data, recorded


@pytest.mark.parametrize("name", STRATEGIES)
def test_recorded_operations_are_found_again(pools, tmp_path, name):
    reports = []
    for rank, (data, recorded) in enumerate(pools(2).run(record, name)):
        path = tmp_path / f"rank_{rank}.json.gz"
        path.write_bytes(data)
        report = report_rank(path)
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
        plan = make_plan(case_of(name), workload(num_micro_batches=2))
        for rank, report in enumerate(reports):
            done = zip(report.actions.stages, report.actions.kinds, report.actions.micro_batches, strict=True)
            assert [f"{stage}{kind}{number}" for stage, kind, number in done] == 2 * [
                str(action) for action in plan.schedule.compute(rank)
            ]
        assert all(0 <= bubble < 1 for bubble in together.bubble)


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


def test_traced_once_in_the_last_round(pools):
    job = test_loop.make_job([data_case("bucketed", 2)], trace_steps=1)
    for messages in pools(2).run(test_loop.run, job):
        traces = [m.trace for m in messages if isinstance(m, RoundRows)]
        assert traces[0] is None
        assert traces[1][:2] == b"\x1f\x8b"


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
