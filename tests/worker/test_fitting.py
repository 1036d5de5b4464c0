"""The largest micro-batch that fits: the search alone, and on real ranks."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import PrefixStore

from raybench.errors import RequestError
from raybench.suite.track import Case, ResolvedTrack
from raybench.worker import fitting
from raybench.worker.fitting import Fitter, Fitting, search
from raybench.worker.messages import CaseRefused
from raybench.worker.rendezvous import Rendezvous
from tests.gating import data_case, workload
from tests.pool import Rank
from tests.worker.test_loop import make_job, rows, run

MIB = 2**20


def track(case: Case, budget_mib: float | None, num_samples: int | None = None) -> ResolvedTrack:
    work = workload(num_micro_batches=2, data={"num_samples": num_samples})
    changes = {"micro_batch": "largest", "memory_budget_mib": budget_mib}
    return make_job([case], work).track.model_copy(update=changes)


@given(base=st.integers(0, 200), slope=st.integers(1, 50), bend=st.integers(0, 60), limit=st.integers(0, 3000))
def test_the_search_finds_the_largest_that_fits(base: int, slope: int, bend: int, limit: int):
    """Whatever convex way memory takes, with and without running out of it."""
    most = 500

    def used(size: int) -> int:
        return max(base + slope * size, 3 * slope * size - bend)

    fitting_sizes = [size for size in range(1, most + 1) if used(size) <= limit]
    for run_out in (False, True):
        tried: list[int] = []

        def take(size: int, tried: list[int] = tried, run_out: bool = run_out) -> int | None:
            tried.append(size)
            return None if run_out and used(size) > limit else used(size)

        found = search(take, limit_bytes=limit, most=most)
        assert found.micro_batch_size == max(fitting_sizes, default=None)
        assert len(tried) == len(set(tried)) <= 18
        assert set(found.tried) == set(tried)


def test_what_a_straight_line_excludes_is_never_tried():
    """On a GPU, a size far beyond the memory would end the job."""
    tried: list[int] = []

    def used(size: int) -> int:
        tried.append(size)
        return 100 + 10 * size

    assert search(used, limit_bytes=100 + 10 * 37).micro_batch_size == 37
    assert max(tried) == 37


def test_no_size_that_fits_is_told_with_both_numbers():
    assert search(lambda size: 3 * MIB, limit_bytes=MIB).reason == (
        "not even a micro-batch of one sequence fits: it takes 3.0 MiB on the fullest rank, allowed is 1.0 MiB"
    )
    assert "a rank runs out of memory, allowed" in Fitting(None, MIB, {1: None}).reason


def fitter(rank: Rank, name: str) -> Fitter:
    store = PrefixStore(name, dist.distributed_c10d._get_default_store())
    return Fitter(rank.device, rank.recorder, Rendezvous(store, rank.recorder.marks, 60))


def find(rank: Rank, strategy: str, budget_mib: float | None, num_samples: int | None) -> Fitting | str:
    case = data_case(strategy, rank.world_size)
    mesh = rank.mesh(case.layout)
    try:
        return fitter(rank, f"find {strategy} {budget_mib} {num_samples}").run(
            track(case, budget_mib, num_samples), case, mesh
        )
    except RequestError as error:
        return str(error)


@pytest.mark.parametrize("strategy", ["naive", "bucketed", "torch-ddp"])
def test_every_rank_finds_the_same_size_and_the_next_one_does_not_fit(pools, strategy):
    first, second = pools(2).run(find, strategy, 0.4, None)
    assert first == second
    size = first.micro_batch_size
    assert size is not None
    assert size > 2
    limit = first.limit_bytes
    assert limit == int(0.4 * MIB)
    assert first.tried[size] <= limit
    slope = (first.tried[2] - first.tried[1]) / 1
    assert first.tried[size] + slope > limit
    states = 4 * 4 * sum(p.numel() for p in _tiny().parameters())  # fp32 parameters, gradients, two moments
    assert states < first.tried[1] < limit


def _tiny():
    from raybench.models.build import build_model

    return build_model(workload(), "cpu", 0)


def test_a_finite_data_set_bounds_the_size(pools):
    found = pools(2).run(find, "naive", 1000, 20)[0]
    assert found.micro_batch_size == 20 // (2 * 2)


def test_without_a_budget_a_rank_without_a_gpu_says_so(pools):
    assert set(pools(2).run(find, "naive", None, None)) == {
        "memory_budget_mib: is missing; without GPUs `micro_batch: largest` needs it"
    }


def run_out(rank: Rank, who: list[int], begun: list[int]) -> Fitting | str:
    """Sizes over four run out of memory on the ranks `who`, after as many operations as `begun` says."""
    case = data_case("naive", rank.world_size)
    mesh = rank.mesh(case.layout)
    keeper = fitter(rank, f"run out {who} {begun}")
    used, others_s = Fitter._used_bytes, fitting.OTHERS_S

    def take(self: Fitter, work, case, mesh) -> int:
        if work.micro_batch_size <= 4:
            return 1000
        rank.recorder.num_begun += begun[rank.rank]
        if rank.rank in who:
            raise MemoryError("cannot allocate 9 GiB")
        return 2000

    Fitter._used_bytes, fitting.OTHERS_S = take, 1.0
    try:
        return keeper.run(track(case, 1000, 64), case, mesh)
    except MemoryError as error:
        return str(error)
    finally:
        Fitter._used_bytes, fitting.OTHERS_S = used, others_s


def test_running_out_of_memory_is_an_answer_where_no_collective_is_left_unfinished(pools):
    for who in ([0, 1], [1]):
        first, second = pools(2).run(run_out, who, [5, 5])
        assert first == second
        assert first.micro_batch_size == 4
        assert first.tried == {1: 1000, 2: 1000, 4: 1000, 8: None, 6: None, 5: None}


def test_a_rank_that_runs_out_inside_a_collective_ends_the_case(pools):
    told = pools(2).run(run_out, [0, 1], [5, 6])
    assert told == ["cannot allocate 9 GiB"] * 2


def budgeted(work_changes: dict | None = None, *, budget_mib: float, rounds: int = 2, **changes: object):
    cases = [data_case("naive", 2), data_case("torch-ddp", 2)]
    job = make_job(cases, workload(num_micro_batches=2, **(work_changes or {})), rounds=rounds, **changes)
    track = job.track.model_copy(update={"micro_batch": "largest", "memory_budget_mib": budget_mib})
    return job.model_copy(update={"track": track})


def test_rounds_are_timed_with_the_size_found_and_gated_with_the_given_one(pools):
    messages = rows(pools(2).run(run, budgeted(budget_mib=0.4))[0])
    assert [(m.case, m.round) for m in messages] == [(c, r) for r in (1, 2) for c in ("naive", "torch-ddp")]
    for message in messages:
        told = message.run
        searched = json.loads(told["environment"]).get("micro_batch_search")
        size = told["micro_batch_size"]
        assert size > 2
        assert told["tokens_per_step"] == size * 2 * 2 * 9
        assert told["tokens"] == 4 * told["tokens_per_step"]
        assert told["control_tokens"] == told["tokens"] / 2
        assert told["gate"] == "passed"
        assert (searched is None) == (message.round > 1)
        assert sum(message.ranks[f"{kind}_bytes"] for kind in ("parameter", "gradient", "optimizer", "activation")) <= (
            0.4 * MIB
        )
    assert len({(m.case, m.run["micro_batch_size"], m.run["workload_hash"]) for m in messages}) == 2


def test_a_size_found_by_an_earlier_job_is_not_searched_again(pools):
    job = budgeted(budget_mib=0.4, rounds=1, micro_batch_sizes={"naive": 3, "torch-ddp": 5})
    for message in rows(pools(2).run(run, job)[0]):
        assert message.run["micro_batch_size"] == {"naive": 3, "torch-ddp": 5}[message.case]
        assert "micro_batch_search" not in json.loads(message.run["environment"])


def test_a_case_that_never_fits_is_out_of_memory_and_the_job_goes_on(pools):
    messages = pools(2).run(run, budgeted(budget_mib=0.05))[0]
    refused = [m for m in messages if isinstance(m, CaseRefused)]
    assert [(m.case, m.round, m.status) for m in refused] == [
        ("naive", 1, "out_of_memory"),
        ("torch-ddp", 1, "out_of_memory"),
    ]
    assert refused[0].reason.startswith("not even a micro-batch of one sequence fits: it takes 0.")
    assert refused[0].run["gate"] == "passed"
    assert not rows(messages)
