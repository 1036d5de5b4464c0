"""What a pipeline cannot do is refused when the track is read, with the nearest sizes that would work."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from raybench.errors import RequestError
from raybench.models.build import outline
from raybench.parallel.pipeline.plan import make_plan
from raybench.parallel.pipeline.stage import cut
from raybench.suite.track import Case, Layout, ModelConfig, ResolvedTrack
from raybench.worker.mesh import Mesh
from tests.gating import TINY, workload


def resolve(case: dict[str, object], *, num_layers: int = 6, **changes: object) -> ResolvedTrack:
    work = workload(TINY.model_copy(update={"num_layers": num_layers}), **changes)
    values = {"name": "case", "layout": {"pipeline": 4}, "strategy": {"pipeline": "one-f-one-b"}, **case}
    return ResolvedTrack(track="t", title="t", question="q", scale="smoke", workload=work, cases=(values,))


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        (
            {},
            {"num_layers": 3},
            "4 pipeline stages are more than the model's 3 layers (nearest: 3 stages, or 4 lay",
        ),
        (
            {"layout": {"pipeline": 2}, "strategy": {"pipeline": "interleaved"}, "options": {"num_chunks": 4}},
            {"num_layers": 9},
            "options.num_chunks: 4 does not divide the model's 9 layers (nearest: 3, 9",
        ),
        (
            {"strategy": {"pipeline": "zero-bubble-v"}},
            {"num_layers": 6},
            "8 pipeline stages are more than the model's 6 layers",
        ),
        (
            {"options": {"num_micro_batches": 5}},
            {"num_micro_batches": 4},
            "options.num_micro_batches: 5 does not divide the 8 samples of a step (nearest: 4, 8)",
        ),
        (
            {"options": {"layers": [1, 2, 3]}},
            {},
            "options.layers: [1, 2, 3] is 3 numbers, not one for each of 4",
        ),
        ({"options": {"layers": [1, 2, 3, "4"]}}, {}, "a list of whole numbers"),
        ({"options": {"num_chunks": 2}}, {}, "num_chunks"),
        (
            {"strategy": {"pipeline": "torch-1f1b"}},
            {"num_micro_batches": 3},
            "num_micro_batches: 3 is less than the 4 stages, which torch-1f1b does not run (nearest: 4)",
        ),
        (
            {"layout": {"pipeline": 2}, "strategy": {"pipeline": "torch-interleaved"}},
            {"num_micro_batches": 7},
            "not a multiple of its 3 rounds of 2 ranks, which torch-interleaved does not run (nearest: 6, 8)",
        ),
    ],
)
def test_refused(case, changes, message):
    with pytest.raises(ValidationError) as caught:
        resolve(case, **changes)
    assert message in str(caught.value)


def test_allowed():
    assert resolve({"strategy": {"pipeline": "interleaved"}, "layout": {"pipeline": 3}}).cases
    assert resolve({"options": {"layers": [0, 2, 4, 0]}}).cases
    assert resolve({"options": {"num_micro_batches": 8}}, num_micro_batches=4).cases


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("Small", "cannot be cut into pipeline stages (needed: children `embedding`, `head` and `blocks`"),
        ("Entangled", "shared by stages between the first and the last"),
        ("Stray", "parameter extra is outside of embedding, blocks and head"),
    ],
)
def test_models_that_cannot_be_cut_are_refused_by_name(model, message):
    work = workload(model)
    with pytest.raises(RequestError) as caught:
        cut(outline(work, 0), work, _Anywhere(), (0, 1, 2), None)
    assert message in str(caught.value)


class _Anywhere(Mesh):
    """A mesh of three stages seen from the first, without process groups."""

    def __init__(self) -> None:
        from types import SimpleNamespace

        self.pipeline = SimpleNamespace(index=0)
        self.ends = SimpleNamespace()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forward": 3}, "did you mean 'forward_ms'"),
        ({"forward_ms": -1}, "options.forward_ms: -1 is not allowed"),
        ({"forward_ms": "20"}, "not allowed"),
    ],
)
def test_times_of_a_timed_model_are_checked(options, message):
    with pytest.raises(ValidationError) as caught:
        ModelConfig(name="timed", options=options)
    assert message in str(caught.value)


def test_layers_as_a_case_says_hold_for_a_model_of_ones_own():
    case = Case(name="case", layout=Layout(pipeline=2), strategy={"pipeline": "gpipe"}, options={"layers": [1, 4]})
    assert make_plan(case, workload("Staged")).layers == (1, 4)
