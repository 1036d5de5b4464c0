"""The driver against scripted jobs: what ends up in the store, whatever the workers do."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybench.results.schema import RANKS, RUNS, STEPS
from raybench.suite.driver import Driver, Outcome
from raybench.suite.means import Means
from raybench.suite.plan import TrackPlan, plan_track
from raybench.suite.progress import Progress
from raybench.suite.resume import Recorded
from raybench.suite.rows import RowMaker
from raybench.suite.track import ResolvedTrack

from .fakes import QUICK, THREE, MemoryStore, World, cluster, make_track, node


class Silent(Progress):
    def _line(self, text: str) -> None:
        self.lines = [*getattr(self, "lines", []), text]


def drive(
    world: World,
    *tracks: ResolvedTrack,
    store: MemoryStore | None = None,
    named: tuple[str, ...] = (),
    progress: Progress | None = None,
    replan=lambda plan: plan,
    plans: list[TrackPlan] | None = None,
    **driver: object,
) -> tuple[Outcome, MemoryStore]:
    kept = store or MemoryStore()
    means = Means(
        store=kept,
        launcher=world,
        make_sink=world.make_sink,
        progress=progress or Silent(),
        patience=QUICK,
        replan=replan,
    )
    plans = plans or [plan_track(track, cluster(), named=named) for track in tracks]
    rows = [RowMaker(suite_id="s", plan=plan, cluster=cluster(), nccl_env={"NCCL_DEBUG": "INFO"}) for plan in plans]
    outcome = Driver(means=means, **driver).run(list(zip(plans, rows, strict=True)))
    assert all(world.stopped) or world.before == "cannot start"
    return outcome, kept


def test_rounds_alternate_and_every_row_has_the_columns_that_the_driver_knows():
    world = World()
    outcome, store = drive(world, make_track(THREE))
    assert outcome.exit_code == 0
    order = [(r["round"], r["case"]) for r in store.rounds]
    assert order == [(n, c) for n in (1, 2, 3) for c in THREE]
    for written in store.rounds:
        row = written["runs"][0]
        assert set(row) <= set(RUNS)
        assert all(set(r) <= set(RANKS) for r in written["ranks"])
        assert all(set(r) <= set(STEPS) for r in written["steps"])
        assert [r["rank"] for r in written["ranks"]] == [0, 1]
        assert written["evaluations"] == [{"step": 1, "loss": 2.5, "accuracy": 0.25, "num_samples": 64}]
        assert written["ranks"][1] | {"x": 0} == {
            "rank": 1, "node": "10.0.0.1", "node_rank": 0, "local_rank": 1, "parameter_bytes": 8, "x": 0,
        }  # fmt: skip
        assert row["attempt"] == 1
        assert row["tokens_per_step"] == 2 * 8 * 128
        assert (row["num_ranks"], row["num_nodes"], row["backend"], row["device"]) == (2, 1, "gloo", "EPYC")
        assert isinstance(row["started_at"], datetime)
        assert row["started_at"].tzinfo == UTC
        environment = json.loads(row["environment"])
        assert environment["threads"] == 1
        assert environment["nccl_env"] == {"NCCL_DEBUG": "INFO"}
        assert environment["ranks_share_cores"] is False
    assert world.jobs[0].environment == {"NCCL_DEBUG": "INFO"}


def test_a_lost_rank_ends_its_case_alone_and_the_row_says_what_every_rank_did():
    world = World({("two", 2): "die"})
    outcome, store = drive(world, make_track(THREE))
    assert store.statuses("one") == store.statuses("three") == ["ok"] * 3
    assert store.statuses("two") == ["ok", "crashed"]
    assert [job.attempt for job in world.jobs] == [1, 2]
    assert {key.case for key in world.jobs[1].rounds} == {"one", "three"}
    assert {case.name for case in world.jobs[1].track.cases} == {"one", "three"}
    assert world.jobs[1].gate_passed["one"]["gate"] == "passed"
    broken = next(r for r in store.rounds if r["runs"][0]["status"] == "crashed")
    assert broken["runs"][0]["reason"] == "rank 1 on 10.0.0.1 went away without a word (last: all-reduce)"
    assert broken["runs"][0]["gate"] == "passed"
    assert [(r["rank"], r["last_operation"]) for r in broken["ranks"]] == [(0, "all-reduce"), (1, "all-reduce")]
    assert broken["ranks"][0]["stack"] == "stack 0"
    assert outcome.exit_code == 1


@pytest.mark.parametrize(
    ("part", "status", "reason"),
    [
        ("oom", "out_of_memory", "rank 1: no memory (last: all-reduce)"),
        ("late", "timeout", "rank 0: late (last: all-reduce) (captured in hangs/t/one/1-1)"),
        (
            "hang",
            "timeout",
            "no rank ended itself at the time-out of 1 s, nor later within 0.3 s (captured in hangs/t/one/1-1)",
        ),
        ("quit", "crashed", "the controller died"),
    ],
)
def test_what_ends_a_case_is_its_status_and_reason(part: str, status: str, reason: str):
    outcome, store = drive(World({("one", 1): part}), make_track(THREE))
    assert [(row["status"], row["reason"]) for row in store.runs("one")] == [(status, reason)]
    assert list(store.hangs) == (["hangs/t/one/1-1"] if status == "timeout" else [])
    assert store.statuses("two") == store.statuses("three") == ["ok"] * 3
    assert outcome.exit_code == 1


def test_a_refused_case_fails_and_the_others_go_on_in_the_same_job():
    world = World({("two", 1): "refuse"})
    outcome, store = drive(world, make_track(THREE))
    row = store.runs("two")[0]
    assert (row["status"], row["reason"], row["gate"], row["num_nodes"]) == ("failed", "gate failed: x", "failed", 1)
    assert len(world.jobs) == 1
    assert store.statuses("one") == store.statuses("three") == ["ok"] * 3
    assert outcome.exit_code == 1


@pytest.mark.parametrize(
    ("before", "status", "reason"),
    [
        ("cannot start", "crashed", "the job could not start: as a worker"),
        ("no resources", "crashed", "the cluster is full"),
        ("nobody comes", "timeout", "0 of 2 ranks started, and no other within 0.3 s"),
        ("dies at once", "crashed", "rank 1 on 10.0.0.1 went away without a word (last: starting)"),
    ],
)
def test_a_job_that_never_gets_to_a_round_is_not_tried_again(before: str, status: str, reason: str):
    world = World(before=before)
    outcome, store = drive(world, make_track(THREE), make_track(THREE, name="u"))
    assert [(row["case"], row["status"], row["reason"]) for row in store.runs()] == 2 * [
        (case, status, reason) for case in THREE
    ]
    assert len(world.jobs) == 2
    assert outcome.exit_code == 1


def test_a_rank_lost_between_rounds_costs_a_job_and_no_case():
    world = World({("two", 1): "lost after"})
    outcome, store = drive(world, make_track(THREE))
    assert all(store.statuses(case) == ["ok"] * 3 for case in THREE)
    assert [row["attempt"] for row in store.runs()] == [1, 1] + [2] * 7
    assert outcome.exit_code == 0


def test_a_lost_rank_that_only_waited_costs_a_job_and_not_the_case_beside_it():
    world = World({("narrow", 2): "lost beside"})
    outcome, store = drive(world, make_track({"wide": {"data": 4}, "narrow": {"data": 2}}))
    assert len(world.jobs) == 2
    assert store.statuses("wide") == store.statuses("narrow") == ["ok"] * 3
    assert outcome.exit_code == 0


def test_interrupted_keeps_rows_and_names_what_is_missing():
    world = World({("two", 2): "interrupt"})
    outcome, store = drive(world, make_track(THREE), make_track({"four": {"data": 2}}, name="u"))
    assert outcome.exit_code == 130
    assert store.statuses("one") == ["ok", "ok", "skipped"]
    assert store.statuses("two") == ["ok", "skipped"]
    assert store.statuses("four") == ["skipped"]
    last = [row for row in store.runs() if row["status"] == "skipped"]
    assert {(row["attempt"], row["round"], row["reason"]) for row in last} == {(0, 0, "interrupted")}
    assert world.orders == ["the driver ends this job"]


def test_a_store_that_cannot_be_written_ends_the_suite_with_its_message():
    world = World()
    outcome, store = drive(world, make_track(THREE), make_track(THREE, name="u"), store=MemoryStore(fail_after=4))
    assert outcome.errors == ["results r: cannot be written (No space left on device)"]
    assert outcome.exit_code == 1
    assert len(store.rounds) == 4
    assert len(world.jobs) == 1


def test_a_cluster_that_is_gone_gives_what_is_left_its_reason():
    from raybench.errors import RequestError

    def replan(plan: TrackPlan) -> TrackPlan:
        raise RequestError("cluster: no node answers any more")

    outcome, store = drive(World({("two", 1): "die"}), make_track(THREE), make_track(THREE, name="u"), replan=replan)
    assert outcome.exit_code == 1
    assert store.statuses("two") == ["crashed", "skipped"]
    assert {row["reason"] for row in store.runs() if row["status"] == "skipped"} == {
        "cluster: no node answers any more"
    }


def test_after_a_crash_the_rest_is_planned_for_the_nodes_that_are_left():
    def replan(plan: TrackPlan) -> TrackPlan:
        return plan_track(plan.track.model_copy(update={"scale": "full"}), cluster(node(gpus=1)))

    world = World({("two", 1): "die"})
    outcome, store = drive(world, make_track(THREE), make_track({"four": {"data": 2}}, name="u"), replan=replan)
    assert store.statuses("three") == store.statuses("four") == ["skipped"]
    assert store.runs("three")[0]["reason"] == "needs 2 GPUs, the cluster has 1"
    assert len(world.jobs) == 1
    assert outcome.exit_code == 1


def test_rounds_on_fewer_nodes_are_not_mixed_with_those_before():
    track = make_track({"narrow": {"data": 2}, "wide": {"data": 4, "nodes": 2}, "mortal": {"data": 4, "nodes": 2}})
    both = plan_track(track, cluster(node("10.0.0.1"), node("10.0.0.2")))

    def replan(plan: TrackPlan) -> TrackPlan:
        return plan_track(plan.track, cluster(node("10.0.0.1")))

    outcome, store = drive(World({("mortal", 1): "die"}), track, plans=[both], replan=replan)
    assert (store.statuses("narrow"), store.statuses("wide"), store.statuses("mortal")) == (
        ["ok"] * 3,
        ["ok"],
        ["crashed"],
    )
    assert outcome.notes == ["t:wide: 1 of 3 rounds, whose nodes were 2 and would now be 1"]
    assert outcome.statuses["t", "wide"] == "ok"

    recorded = Recorded("s", {("t", "wide"): {1: ("ok", None)}}, num_nodes={("t", "wide"): 1})
    outcome, store = drive(World(), track, plans=[both], recorded=recorded)
    assert (len(store.statuses("narrow")), store.statuses("wide"), len(store.statuses("mortal"))) == (3, [], 3)
    assert outcome.notes == ["t:wide: 1 of 3 rounds, whose nodes were 1 and would now be 2"]


def test_a_case_that_does_not_fit_has_its_row_and_matters_only_where_it_was_named():
    wide = make_track({"one": {"data": 2}, "wide": {"data": 4, "nodes": 2}}, scale="full")
    outcome, store = drive(World(), wide)
    row = store.runs("wide")[0]
    assert (row["status"], row["attempt"], row["round"]) == ("skipped", 0, 0)
    assert row["reason"] == "needs 2 nodes, the cluster has 1"
    assert row["gate"] == "not_run"
    assert outcome.exit_code == 0
    assert drive(World(), wide, named=("wide",))[0].exit_code == 1
    assert drive(World(), make_track({"wide": {"data": 4, "nodes": 2}}, scale="full"))[0].exit_code == 1


def test_the_budget_cuts_rounds_and_says_which():
    progress = Silent()
    outcome, store = drive(World(budget_rounds=4), make_track(THREE), budget_s=1000.0, progress=progress)
    assert [len(store.statuses(case)) for case in THREE] == [2, 1, 1]
    assert outcome.exit_code == 0
    assert outcome.notes == [
        "t:one: 2 of 3 rounds, the budget is used up",
        "t:two: 1 of 3 rounds, the budget is used up",
        "t:three: 1 of 3 rounds, the budget is used up",
    ]
    assert set(outcome.notes) <= set(progress.lines)


def test_the_budget_is_shared_by_estimate_and_what_is_saved_goes_on():
    world = World()
    tracks = [make_track(THREE, name=name) for name in ("t", "u")]
    begin = datetime.now(UTC).timestamp()
    drive(world, *tracks, budget_s=100.0, estimate_s=lambda plan: {"t": 1.0, "u": 3.0}[plan.track.track])
    deadlines = [job.deadline_unix_s - begin for job in world.jobs]
    assert deadlines[0] == pytest.approx(25, abs=2)
    assert deadlines[1] == pytest.approx(100, abs=2)


def test_without_a_budget_a_job_that_leaves_rounds_out_is_a_fault():
    _, store = drive(World(budget_rounds=4), make_track(THREE))
    assert store.statuses("two") == ["ok", "failed"]
    assert store.runs("two")[-1]["reason"] == "its job ended before round 2"


def test_resumed_suites_run_just_the_rest():
    world = World()
    recorded = Recorded(
        "s",
        rounds={
            ("t", "one"): {1: ("ok", None), 2: ("ok", None), 3: ("ok", None)},
            ("t", "two"): {1: ("ok", None), 2: ("crashed", "it did")},
            ("t", "three"): {1: ("ok", None), 0: ("skipped", "interrupted")},
        },
        gates={("t", "three"): {"gate": "passed"}},
        last_attempts={"t": 4},
    )
    outcome, store = drive(world, make_track(THREE), recorded=recorded)
    assert [(key.case, key.round) for key in world.jobs[0].rounds] == [("three", 2), ("three", 3)]
    assert world.jobs[0].gate_passed == {"three": {"gate": "passed"}}
    assert {row["attempt"] for row in store.runs()} == {5}
    assert outcome.statuses == {("t", "one"): "ok", ("t", "two"): "crashed", ("t", "three"): "ok"}


def test_a_micro_batch_that_was_found_is_kept_by_later_jobs_and_told_by_every_row():
    found = {"micro_batch_size": 24, "tokens_per_step": 6144, "workload_hash": "largest"}
    track = make_track(THREE).model_copy(update={"micro_batch": "largest", "memory_budget_mib": 1.0})
    world = World({("two", 2): "die"})
    _, store = drive(world, track)
    assert [dict(job.micro_batch_sizes) for job in world.jobs] == [{}, {"one": 24, "three": 24}]
    assert all({k: row[k] for k in found} == found for row in store.runs())
    assert [row["status"] for row in store.runs("two")] == ["ok", "crashed"]

    recorded = Recorded("s", rounds={("t", "one"): {1: ("ok", None)}}, batches={("t", "one"): found})
    world = World()
    drive(world, track, recorded=recorded)
    assert dict(world.jobs[0].micro_batch_sizes) == {"one": 24}


def test_verify_gates_each_case_once():
    world = World()
    track = make_track(THREE)
    store = MemoryStore()
    means = Means(
        store=store, launcher=world, make_sink=world.make_sink, progress=Silent(), patience=QUICK, verify_only=True
    )
    plan = plan_track(track, cluster())
    Driver(means=means).run([(plan, RowMaker(suite_id="s", plan=plan, cluster=cluster()))])
    assert world.jobs[0].verify_only
    assert [key.round for key in world.jobs[0].rounds] == [1, 1, 1]


PARTS = st.sampled_from(["ok", "ok", "ok", "die", "oom", "late", "refuse", "quit", "lost after"])


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.tuples(st.sampled_from(list(THREE)), st.integers(1, 3)), PARTS))
def test_whatever_happens_every_case_ends_and_no_offender_is_tried_again(parts: dict[tuple[str, int], str]):
    world = World(parts)
    outcome, store = drive(world, make_track(THREE))
    for case in THREE:
        statuses = store.statuses(case)
        first_bad = min((n for (c, n), p in parts.items() if c == case and p not in ("ok", "lost after")), default=None)
        if first_bad is None:
            assert statuses == ["ok"] * 3
        else:
            assert statuses[:-1] == ["ok"] * (first_bad - 1)
            assert statuses[-1] in ("crashed", "out_of_memory", "timeout", "failed")
        assert outcome.statuses["t", case] == statuses[-1]
    places = [(r["case"], r["round"]) for r in store.rounds]
    assert len(places) == len(set(places))
    assert len(world.jobs) <= 1 + len(parts)
    assert outcome.exit_code == (0 if all(s == "ok" for s in outcome.statuses.values()) else 1)


def test_nodes_that_went_away_are_left_out_of_everything_that_follows(monkeypatch: pytest.MonkeyPatch):
    from raybench.errors import RequestError
    from raybench.suite import session
    from raybench.suite.request import Request

    alive = ["a", "b"]
    monkeypatch.setattr(session, "probe_ray", lambda **_: cluster(*(node(name) for name in alive)))
    progress = Silent()
    whole = cluster(node("a"), node("b"))
    replan = session._replanner(Request(targets=(), results="r"), whole, progress)
    plans = [plan_track(make_track({"wide": {"data": 4, "nodes": 2}}, name=name), whole) for name in ("t", "u")]
    assert replan(plans[0]) is plans[0]
    alive.remove("a")
    assert [share.address for share in replan(plans[0]).placement.nodes] == ["b"]
    assert [share.address for share in replan(plans[1]).placement.nodes] == ["b"]
    assert progress.lines == ["cluster: a went away; going on with what remains"]
    alive.remove("b")
    alive.append("c")
    with pytest.raises(RequestError, match=r"^cluster: no node answers any more$"):
        replan(plans[0])
