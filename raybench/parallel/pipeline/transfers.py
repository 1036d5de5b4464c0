"""From the order of the compute actions to the whole plan: where each rank sends and posts receives.

A send follows its producer at once. A receive is posted early, so that the data moves while the rank
computes: at the latest `lead` compute actions before the one that uses it, and never later than the moment
at which the sender is ready when every forward, input gradient and weight gradient takes one unit of time.
Two properties follow:

- **One order on every channel.** A channel is an ordered pair of ranks. What one end sends as its n-th
  message, the other end receives as its n-th, so channels without tags (NCCL) carry activations and
  gradients side by side.
- **No deadlock, even where a send blocks until its receive is posted.** In unit time, every action waits
  only for actions that are not later than itself, and at one boundary between two compute actions receives
  come before sends; so the waiting has no cycle, whatever the real times are.

The two directions between two ranks are two channels, and each needs its own queue: an early receive in the
same in-order queue as a later send would hold that send back. With NCCL that means one communicator for
each direction.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import replace

from raybench.parallel.pipeline.actions import (
    GIVES_GRADIENT,
    Action,
    Kind,
    Orders,
    Schedule,
    ScheduleError,
)

_UNITS = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.INPUT_GRADIENT: 1, Kind.WEIGHT_GRADIENT: 1}


def with_transfers(
    name: str, orders: Orders, *, placement: tuple[int, ...], num_micro_batches: int, lead: int = 2
) -> Schedule:
    """The schedule that computes in these orders, with its sends and receives in their places."""
    bare = Schedule(
        name=name,
        num_ranks=len(orders),
        num_stages=len(placement),
        num_micro_batches=num_micro_batches,
        placement=placement,
        actions=tuple(tuple(order) for order in orders),
    )
    ends = unit_ends(bare)
    positions = _receive_positions(bare, ends, lead)
    actions: list[tuple[Action, ...]] = []
    for rank, order in enumerate(bare.actions):
        whole: list[Action] = []
        send: Action | None = None
        for index, action in enumerate(order):
            whole.extend(positions[rank].get(index, ()))  # receives first: see above
            if send is not None:
                whole.append(send)
            whole.append(action)
            send = bare.output_of(action)
        if send is not None:
            whole.append(send)
        actions.append(tuple(whole))
    return replace(bare, actions=tuple(actions))


def unit_ends(schedule: Schedule) -> list[list[int]]:
    """When each compute action of each rank ends, if F, I and W take one unit, B two, a transfer none."""
    orders = [schedule.compute(rank) for rank in range(schedule.num_ranks)]
    ends: list[list[int]] = [[] for _ in orders]
    forward: dict[tuple[int, int], int] = {}  # (stage, micro-batch) to the end of its forward
    gradient: dict[tuple[int, int], int] = {}  # likewise of its input gradient
    moved = True
    while moved:
        moved = False
        for order, finished in zip(orders, ends, strict=True):
            while len(finished) < len(order):
                action = order[len(finished)]
                needed = _inputs(schedule, action, forward, gradient)
                if None in needed:
                    break
                begin = max([finished[-1] if finished else 0, *(end for end in needed if end is not None)])
                end = begin + _UNITS[action.kind]
                finished.append(end)
                key = (action.stage, action.micro_batch)
                if action.kind is Kind.FORWARD:
                    forward[key] = end
                elif action.kind in GIVES_GRADIENT:
                    gradient[key] = end
                moved = True
    stuck = [
        f"rank {rank} at {order[len(finished)]}"
        for rank, (order, finished) in enumerate(zip(orders, ends, strict=True))
        if len(finished) < len(order)
    ]
    if stuck:
        raise ScheduleError(f"the compute actions wait for each other: {', '.join(stuck)}")
    return ends


def _inputs(
    schedule: Schedule,
    action: Action,
    forward: dict[tuple[int, int], int],
    gradient: dict[tuple[int, int], int],
) -> list[int | None]:
    """When each thing that an action needs was ready; None where it is not yet."""
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind is Kind.FORWARD:
        return [forward.get((stage - 1, micro_batch))] if stage else []
    if action.kind is Kind.WEIGHT_GRADIENT:
        return [gradient.get((stage, micro_batch))]
    needed = [forward.get((stage, micro_batch))]
    if stage < schedule.num_stages - 1:
        needed.append(gradient.get((stage + 1, micro_batch)))
    return needed


def _receive_positions(schedule: Schedule, ends: list[list[int]], lead: int) -> list[dict[int, list[Action]]]:
    """For every rank: before which of its compute actions it posts which receives."""
    used_at: dict[Action, int] = {}
    for order in schedule.actions:
        for index, action in enumerate(order):
            receive = schedule.input_of(action)
            if receive is not None:
                used_at[receive] = index
    channels: dict[tuple[int, int], list[tuple[Action, int]]] = defaultdict(list)  # receives in order of sending
    for rank, order in enumerate(schedule.actions):
        for action, end in zip(order, ends[rank], strict=True):
            send = schedule.output_of(action)
            if send is None:
                continue
            receive = send.matching_receive()
            if receive in used_at:
                channels[rank, schedule.placement[receive.stage]].append((receive, end))

    posted: list[list[tuple[int, int, Action]]] = [[] for _ in schedule.actions]
    for (_, receiver), messages in channels.items():
        latest = len(schedule.actions[receiver])
        for receive, sent in reversed(messages):
            at_send = bisect_right(ends[receiver], sent)  # the boundary that the receiver last passed
            latest = max(0, min(latest, at_send, used_at[receive] - lead))
            posted[receiver].append((latest, sent, receive))
    positions: list[dict[int, list[Action]]] = [defaultdict(list) for _ in schedule.actions]
    for rank, receives in enumerate(posted):
        for position, _, receive in sorted(receives, key=lambda entry: entry[:2]):
            positions[rank][position].append(receive)
    return positions
