"""When a sent tensor may go: at the first moment at which the rank knows that it arrived, without asking anybody.

A rank learns what others have done from what reaches it: an activation tells that its sender has done all that stands
before it in the sender's order, and all that the sender knew by then. These are vector clocks (Mattern, 1989) over a
plan that is known beforehand, so they are computed once, and waiting for a send there costs no time.
"""

from __future__ import annotations

from collections import defaultdict

from raybench.parallel.pipeline.actions import GIVES_GRADIENT, SENDS, Action, Kind, Schedule

Clock = list[int]
"""For every rank, how many of its compute actions are known to be done."""


def releases(schedule: Schedule, rank: int) -> dict[Action, tuple[Action, ...]]:
    """By compute action of `rank`: the sends that have arrived once this action has its input.

    Sends of which nothing in the plan tells are in none of them: they are waited for at the end of the step.
    """
    consumed = {
        receive: (other, index)
        for other in range(schedule.num_ranks)
        for index, action in enumerate(schedule.compute(other))
        if (receive := schedule.input_of(action)) is not None
    }
    known = _known_before(schedule)
    outstanding: list[Action] = []
    released: dict[Action, list[Action]] = defaultdict(list)
    for action in schedule.actions[rank]:
        if action.kind in SENDS:
            outstanding.append(action)
        elif action in known:
            for send in list(outstanding):
                receiver, index = consumed[send.matching_receive()]
                if known[action][receiver] > index:
                    released[action].append(send)
                    outstanding.remove(send)
    return {action: tuple(sends) for action, sends in released.items()}


def _known_before(schedule: Schedule) -> dict[Action, Clock]:
    """What the rank of each compute action knows once the action has its input."""
    orders = [schedule.compute(rank) for rank in range(schedule.num_ranks)]
    now: list[Clock] = [[0] * schedule.num_ranks for _ in orders]
    before: dict[Action, Clock] = {}
    after: dict[Action, Clock] = {}
    while len(after) < sum(map(len, orders)):
        for rank, order in enumerate(orders):
            while now[rank][rank] < len(order):
                action = order[now[rank][rank]]
                source = _producer(schedule, action, after)
                if source is None:
                    break
                now[rank] = [max(pair) for pair in zip(now[rank], source, strict=True)]
                before[action] = list(now[rank])
                now[rank][rank] += 1
                after[action] = list(now[rank])
    return before


def _producer(schedule: Schedule, action: Action, after: dict[Action, Clock]) -> Clock | None:
    """What the action that made this one's input on another rank knew at its end; None while that is to come."""
    if schedule.input_of(action) is None:
        return [0] * schedule.num_ranks
    if action.kind is Kind.FORWARD:
        return after.get(Action(Kind.FORWARD, action.stage - 1, action.micro_batch))
    either = (Action(kind, action.stage + 1, action.micro_batch) for kind in GIVES_GRADIENT)
    return next((after[other] for other in either if other in after), None)
