"""Weak and strong scaling: which batch each data rank takes, what its rows say, and what is refused."""

from __future__ import annotations

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raybench.analysis.comparison import rates, scaling
from raybench.data.batches import Batches
from raybench.errors import RequestError
from raybench.suite.catalog import find_tracks
from raybench.suite.estimate import estimate_track, rank_bytes
from raybench.suite.plan import plan_track
from raybench.suite.request import Request
from raybench.suite.rows import RowMaker
from raybench.suite.session import prepare
from raybench.suite.track import Case, Layout, ResolvedTrack
from raybench.suite.track_file import Track

from .fakes import cluster, make_track

SIZES = {"two": {"data": 2}, "four": {"data": 4}, "eight": {"data": 8}}


def scaled(micro_batch_size: int, num_micro_batches: int, **changes: object) -> ResolvedTrack:
    track = make_track(SIZES)
    sizes = {"micro_batch_size": micro_batch_size, "num_micro_batches": num_micro_batches}
    return track.model_copy(update={"workload": track.workload.model_copy(update=sizes), **changes})


@pytest.mark.parametrize(
    ("given", "shared"),
    [
        ((8, 1), [(4, 1), (2, 1), (1, 1)]),
        ((2, 8), [(2, 4), (2, 2), (2, 1)]),
        ((4, 2), [(4, 1), (2, 1), (1, 1)]),
        ((8, 3), [(4, 3), (2, 3), (1, 3)]),
        ((4, 6), [(4, 3), (2, 3), (1, 3)]),
    ],
)
def test_fewer_micro_batches_come_before_smaller_ones(given, shared):
    def taken(track: ResolvedTrack) -> list[tuple[int, int]]:
        works = [track.workload_of(case) for case in track.cases]
        return [(work.micro_batch_size, work.num_micro_batches) for work in works]

    assert taken(scaled(*given, scaling="strong")) == shared
    assert taken(scaled(*given)) == [given] * 3


@given(st.integers(1, 64), st.integers(1, 64), st.integers(2, 64))
def test_the_global_batch_stays_or_is_refused(micro_batch_size: int, num_micro_batches: int, ranks: int):
    track = scaled(micro_batch_size, num_micro_batches, scaling="strong")
    case = Case(name="x", layout=Layout(data=ranks), strategy={"data": "naive"})
    total = micro_batch_size * num_micro_batches
    if total % ranks:
        with pytest.raises(ValueError, match=r"nearest: ") as error:
            track.workload_of(case)
        near = [int(part) for part in str(error.value).split("nearest: ")[1].rstrip(")").split(", ")]
        assert all(total % size == 0 for size in near)
    else:
        assert track.workload_of(case).samples_per_rank * ranks == total


def test_every_layout_trains_on_the_same_samples():
    track = scaled(8, 1, scaling="strong")
    batches = [Batches(track.workload_of(case), case.layout.data).global_batch(3) for case in track.cases]
    ids = [[row for m in batch.micro_batches for row in m.inputs["input_ids"].tolist()] for batch in batches]
    assert len(ids[0]) == 8
    assert ids[0] == ids[1] == ids[2]


def rows(track: ResolvedTrack) -> dict[str, dict]:
    maker = RowMaker(suite_id="s", plan=plan_track(track, cluster()), cluster=cluster())
    return {case.name: maker.run(case, round=1, attempt=1, status="ok") for case in track.cases}


def test_rows_say_how_a_case_is_scaled_and_what_its_ranks_take():
    strong, weak = rows(scaled(8, 2, scaling="strong")), rows(scaled(8, 2))
    assert {row["scaling"] for row in strong.values()} == {"strong"}
    assert {row["scaling"] for row in weak.values()} == {"weak"}
    assert {row["tokens_per_step"] for row in strong.values()} == {16 * 128}
    assert [row["tokens_per_step"] for row in weak.values()] == [n * 16 * 128 for n in (2, 4, 8)]
    assert [(r["micro_batch_size"], r["num_micro_batches"]) for r in strong.values()] == [(8, 1), (4, 1), (2, 1)]
    assert len({row["workload_hash"] for row in strong.values()}) == 3
    assert len({row["workload_hash"] for row in weak.values()}) == 1


@pytest.mark.parametrize("kind", ["weak", "strong"])
def test_efficiency_against_the_smallest_layout(kind: str):
    """Of ranks that each lose a tenth of their speed with every doubling."""
    track = scaled(8, 1, scaling=kind)
    table = pd.DataFrame(rows(track).values())
    speed = {2: 200.0, 4: 360.0, 8: 648.0}
    table["tokens"] = table.tokens_per_step
    table["window_ns"] = [tokens / speed[n] * 1e9 for n, tokens in zip(table.num_ranks, table.tokens, strict=True)]
    table["tokens_per_s"] = [speed[n] for n in table.num_ranks]
    found = {ratio.case: ratio.estimate.value for ratio in scaling(table, rates(table))}
    assert found == {"four": pytest.approx(0.9), "eight": pytest.approx(0.81)}


def test_a_plan_knows_the_smaller_batches():
    weak, strong = (plan_track(scaled(64, 1, scaling=kind), cluster()) for kind in ("weak", "strong"))
    assert estimate_track(strong).seconds < estimate_track(weak).seconds
    sizes = [rank_bytes(strong.track, case) for case in strong.track.cases]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 3


def test_any_track_can_be_scaled_from_the_command_line():
    track = Track(find_tracks()["b-ddp-two-nodes"]).resolve("smoke", ["scaling=strong"])
    assert {track.workload_of(c).tokens_per_step(c.layout.data) for c in track.cases} == {4 * 128}
    assert track.workload_of(track.case("naive")).micro_batch_size == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["scaling=strong", "workload.micro_batch_size=6"],
            "cases.naive.layout.data: 4 ranks cannot share the global batch of 6 sequences evenly (scaling is strong; "
            "nearest: 3, 6)",
        ),
        (["scaling=string"], "scaling: \"string\": input should be 'weak' or 'strong'"),
        (
            ["scaling=strong", "micro_batch=largest"],
            "micro_batch: 'largest' changes the global batch, which scaling 'strong' keeps (allowed with it: given)",
        ),
        (["memory_budget_mib=0"], "memory_budget_mib: 0: input should be greater than 0"),
        (["evaluate.every_steps=0"], "evaluate.every_steps: 0: input should be greater than 0"),
        (["evaluate.num_samples=3"], "evaluate.every_steps: is missing"),
        (
            ["evaluate.every_steps=3", "evaluate.every=3"],
            "evaluate: 'every' is not known; did you mean 'every_steps'? (allowed: every_steps, num_samples)",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(settings: list[str], message: str):
    path = find_tracks()["b-ddp-two-nodes"]
    with pytest.raises(RequestError) as error:
        Track(path).resolve("smoke", settings)
    where, _, told = str(error.value).partition(": ")
    assert where.removesuffix(f" with {settings[-1]}") == str(path)
    assert told == message


def test_without_gpus_the_largest_micro_batch_needs_a_budget():
    def asked(*more: str) -> Request:
        from raybench.suite.catalog import parse_targets

        settings = ("micro_batch=largest", *more)
        return Request(targets=tuple(parse_targets(["a"])), results="r", settings=settings)

    with pytest.raises(RequestError, match=r"^a-ddp-one-node: memory_budget_mib: is missing; without GPUs "):
        prepare(asked(), cluster())
    (plan,) = prepare(asked("memory_budget_mib=64"), cluster()).plans
    assert plan.track.memory_budget_mib == 64
