"""The worker loop on real text: prepared by each node's first rank, counted in tokens read, evaluated."""

from __future__ import annotations

import pytest

from raybench.data.batches import Batches
from raybench.suite.track import Case, Evaluate, Layout
from tests.gating import data_case
from tests.hub import DISTILBERT, classified
from tests.worker.test_loop import NUM_STEPS, make_job, rows, run


def test_rows_tell_weights_tokens_and_accuracy(pools):
    work = classified(DISTILBERT, num_micro_batches=2)
    job = make_job(
        [data_case("bucketed", 2), Case(name="stages", layout=Layout(pipeline=2), strategy={"pipeline": "gpipe"})],
        work,
        rounds=1,
    )
    track = job.track.model_copy(update={"evaluate": Evaluate(every_steps=2, num_samples=30)})
    results = pools(2).run(run, job.model_copy(update={"track": track}), ("a", "b"))
    for message in rows(results[0]):
        source = Batches(work, 2 if message.case == "bucketed" else 1)
        read = sum(source.batch(step, 0).num_read for step in range(1, 1 + NUM_STEPS))
        assert message.run["weights"] == "random"
        assert message.run["tokens"] == read
        assert [evaluation["num_samples"] for evaluation in message.evaluations] == [30, 30]
        assert all(0 <= evaluation["accuracy"] <= 1 for evaluation in message.evaluations)


def change_the_text(rank):
    """The second rank makes something else of the text."""
    from raybench.data import corpus

    before = corpus.digest
    if rank.rank == 1:
        corpus.digest = lambda workload: "other"

    def undo():
        corpus.digest = before

    return undo


def test_nodes_that_make_different_text_are_refused(pools):
    job = make_job([data_case("bucketed", 2)], classified(DISTILBERT), rounds=1)
    with pytest.raises(AssertionError, match="is not the same on b and a"):
        pools(2).run(run_changed, job)


def run_changed(rank, job):
    undo = change_the_text(rank)
    try:
        return run(rank, job, ("a", "b"))
    finally:
        undo()
