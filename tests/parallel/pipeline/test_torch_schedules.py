"""Our plans beside those of torch.distributed.pipelining: valid by its rules, and never slower than its own."""

from __future__ import annotations

import pytest

from raybench.parallel.pipeline.actions import COMPUTE, Action, folded, looped
from raybench.parallel.pipeline.check import find_faults, peak_activations
from raybench.parallel.pipeline.schedules import SCHEDULES, build
from raybench.parallel.pipeline.simulate import Times, simulate
from raybench.parallel.pipeline.transfers import with_transfers

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")


def torch_order(class_name, num_ranks, num_micro_batches, num_chunks):
    """The order that a torch schedule computes for every rank, without its stages or process groups."""
    schedule = object.__new__(getattr(torch_schedules, class_name))
    num_rounds = max(1, num_micro_batches // num_ranks)
    schedule.__dict__.update(
        _num_stages=num_ranks * num_chunks,
        num_stages=num_ranks * num_chunks,
        _n_microbatches=num_micro_batches,
        pp_group_size=num_ranks,
        n_local_stages=num_chunks,
        number_of_rounds=num_rounds,
        microbatches_per_round=num_micro_batches // num_rounds,
    )
    if class_name == "ScheduleGPipe":
        order = schedule._get_pipeline_order()
    else:
        order = {rank: schedule._calculate_single_rank_operations(rank) for rank in range(num_ranks)}
    kept = {"FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT"}
    computed = [[action for action in order[rank] if action is not None] for rank in range(num_ranks)]
    return [
        [Action.parse(str(action)) for action in actions if action.computation_type.name in kept]
        for actions in computed
    ]


@pytest.mark.parametrize("micro_batches", [4, 8, 16])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize(
    ("name", "class_name"),
    [
        ("gpipe", "ScheduleGPipe"),
        ("interleaved", "ScheduleInterleaved1F1B"),
        ("zero-bubble", "ScheduleInterleavedZeroBubble"),
        ("zero-bubble-v", "ScheduleZBVZeroBubble"),
    ],
)
def test_no_plan_is_slower_or_larger_than_its_torch_peer(name, class_name, stages, micro_batches):
    ours = build(name, stages=stages, micro_batches=micro_batches)
    order = torch_order(class_name, stages, micro_batches, ours.num_chunks)
    placement = folded(stages) if name == "zero-bubble-v" else looped(stages, ours.num_chunks)
    theirs = with_transfers("torch", order, placement=placement, num_micro_batches=micro_batches)
    assert find_faults(theirs) == []
    full = micro_batches >= 2 * stages - 1
    for transfer in (0.0, 0.035, 0.2):
        times = Times(transfer=transfer)
        assert simulate(ours, times).step_time <= simulate(theirs, times).step_time + 1e-9
    if full:
        assert max(peak_activations(ours)) <= max(peak_activations(theirs))


@pytest.mark.parametrize("micro_batches", [1, 3, 8])
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_torch_accepts_every_plan(name, micro_batches):
    """Its validation counts the actions, and its own pass adds transfers and simulates them."""
    schedule = build(name, stages=4, micro_batches=micro_batches)
    orders = {
        rank: [torch_schedules._Action.from_str(str(action)) for action in schedule.compute(rank)] for rank in range(4)
    }
    placement = torch_schedules._validate_schedule(orders, 4, schedule.num_stages, micro_batches)
    assert placement == dict(enumerate(schedule.placement))
    with_comms = torch_schedules._add_send_recv(orders, placement.__getitem__, schedule.num_stages)
    transfers = [
        sorted(str(action) for action in schedule.actions[rank] if action.kind not in COMPUTE) for rank in range(4)
    ]
    theirs = {
        rank: [str(action) for action in actions if "SEND" in str(action) or "RECV" in str(action)]
        for rank, actions in with_comms.items()
    }
    assert [sorted(theirs[rank]) for rank in range(4)] == transfers
    torch_schedules._simulate_comms_compute(with_comms, placement.__getitem__, schedule.num_stages)
