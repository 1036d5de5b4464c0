"""What a rank does by itself is recorded, and the parts of a step are right where their times are known."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from raybench.analysis.communication import stragglers, time_split
from raybench.results.store import Writer, load
from raybench.suite.track import ModelConfig
from raybench.worker.spans import Spans, recorded
from tests.gating import data_case, workload
from tests.models import VOCABULARY, Sleepy
from tests.worker.test_loop import make_job, rows, run

FORWARD_S, LATE_S, BACKWARD_S = 0.12, 0.08, 0.20


class Slow(torch.optim.SGD):
    def step(self, closure=None):
        time.sleep(0.05)
        return super().step()


class Outer(torch.optim.SGD):
    """An optimizer around another, as sharded ones are."""

    def step(self, closure=None):
        self.inner.step()


def take_step(spans: Spans, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss_sum = recorded(lambda forward, inputs, labels: forward(**inputs).sum(), spans)
    loss = loss_sum(model, {"input_ids": torch.zeros(2, 3, dtype=torch.int64)}, torch.zeros(2, 3)) / 7
    loss.backward()
    optimizer.step()


def test_forward_backward_and_optimizer_are_seen_without_touching_them():
    model = Sleepy(forward_s=0.02, late_s=0, backward_s=0.03)
    optimizer = Outer(model.parameters(), lr=0.1)
    optimizer.inner = Slow(model.parameters(), lr=0.1)
    spans = Spans(torch.device("cpu"))
    take_step(spans, model, optimizer)
    assert spans.found == []
    with spans.recording(step=5):
        take_step(spans, model, optimizer)
    take_step(spans, model, optimizer)
    assert [span.kind for span in spans.found] == ["step", "forward", "backward", "optimizer", "optimizer"]
    assert {span.step for span in spans.found} == {5}
    step, forward, backward, outer, inner = spans.found
    assert step.begin_ns <= forward.begin_ns <= forward.end_ns <= backward.begin_ns <= backward.end_ns
    assert backward.end_ns <= outer.begin_ns <= inner.begin_ns <= inner.end_ns <= outer.end_ns <= step.end_ns
    took = {span.kind: (span.end_ns - span.begin_ns) / 1e9 for span in spans.found}
    assert took["forward"] >= 0.02
    assert took["backward"] >= 0.03
    assert took["optimizer"] >= 0.05


@pytest.mark.flaky(reruns=3)  # a host that is busy lengthens waits
def test_the_split_of_a_model_that_takes_set_times(pools, tmp_path: Path):
    times = {"forward_s": FORWARD_S, "late_s": LATE_S, "backward_s": BACKWARD_S}
    model = ModelConfig(name="tests.models:Sleepy", vocabulary_size=VOCABULARY, options=times)
    job = make_job([data_case("bucketed", 2)], workload(model), rounds=1)
    ranks = [rows(messages)[0] for messages in pools(2).run(run, job)]
    run_row = {"status": "ok", "num_steps": 4, "num_ranks": 2, "data_size": 2, "tokens_per_step": 36}
    tables = {
        "runs": [{**ranks[0].run, **run_row}],
        "operations": [{"rank": r.rank, **o} for r in ranks for o in r.operations],
    }
    Writer(tmp_path, "s").write_round("t", "bucketed", 1, 1, tables)
    results = load(tmp_path)
    (row,) = results.summary().to_dict("records")
    seconds = time_split(results.summary()).set_index("part").seconds
    assert seconds.sum() == pytest.approx(row["step_time_s"], rel=0.01)
    within = 0.02 * row["step_time_s"]
    # The first rank waits for the others, half of all ranks for all of the difference.
    assert seconds["compute"] == pytest.approx(FORWARD_S + LATE_S / 2 + BACKWARD_S, abs=within)
    assert seconds["waiting"] == pytest.approx(LATE_S / 2, abs=within)
    assert seconds[["communication", "optimizer", "other"]].min() >= 0
    assert seconds[["communication", "optimizer", "other"]].max() < within
    late = stragglers(results).set_index("rank").lateness_s
    assert late[1] == pytest.approx(LATE_S, abs=within)
