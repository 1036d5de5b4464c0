"""Whether a schedule can run, found out without running it.

Four questions, in this order: is every forward and backward there once, on its own rank, after what it
needs on that rank; does every hop between ranks have one send and one receive, in their places; do both
ends of every channel list its messages in the same order; and does the whole plan come to its end, under
the strictest way to execute it, where a send blocks until the other end has posted the receive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise

from raybench.parallel.pipeline.actions import (
    COMPUTE,
    FREES_ACTIVATION,
    GIVES_GRADIENT,
    RECEIVES,
    SENDS,
    Action,
    Kind,
    Schedule,
    ScheduleError,
)


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong, and where: at `actions[rank][index]`, or on the whole rank if index is None."""

    rank: int
    index: int | None
    message: str

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.message}"


def check(schedule: Schedule) -> None:
    """Raise a ScheduleError that names every fault."""
    faults = find_faults(schedule)
    if faults:
        raise ScheduleError(f"{schedule.name} cannot run: " + "; ".join(map(str, faults)))


def find_faults(schedule: Schedule) -> list[Fault]:
    """All faults of the first kind that there is one of; an empty list is a schedule that runs."""
    return (
        _misplaced(schedule)
        or _wrong_compute(schedule)
        or _wrong_transfers(schedule)
        or _crossed_channels(schedule)
        or find_deadlock(schedule, sends_block=True)
    )


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """For each rank, the most micro-batches that are at once between a forward and its weight gradient.

    With v chunks a rank, each chunk counts for itself: one is the activations of 1/v of the rank's layers.
    """
    return tuple(
        _peak((action.kind is Kind.FORWARD) - (action.kind in FREES_ACTIVATION) for action in actions)
        for actions in schedule.actions
    )


def peak_receives(schedule: Schedule) -> tuple[int, ...]:
    """For each rank, the most receive buffers held at once: posted, and not yet taken by their action."""
    return tuple(
        _peak((action.kind in RECEIVES) - (schedule.input_of(action) is not None) for action in actions)
        for actions in schedule.actions
    )


def _peak(changes: Iterable[int]) -> int:
    return max(accumulate(changes), default=0)


def _misplaced(schedule: Schedule) -> list[Fault]:
    """Stages, micro-batches and ranks that do not exist; actions on a rank without their stage."""
    if len(schedule.actions) != schedule.num_ranks or len(schedule.placement) != schedule.num_stages:
        return [Fault(0, None, "the plan does not list every rank and place every stage")]
    faults = []
    for rank, actions in enumerate(schedule.actions):
        for index, action in enumerate(actions):
            if not 0 <= action.stage < schedule.num_stages:
                faults.append(Fault(rank, index, f"{action} is of a stage that does not exist"))
            elif not 0 <= action.micro_batch < schedule.num_micro_batches:
                faults.append(Fault(rank, index, f"{action} is of a micro-batch that does not exist"))
            elif schedule.placement[action.stage] != rank:
                holder = schedule.placement[action.stage]
                faults.append(Fault(rank, index, f"{action} is here, but its stage is on rank {holder}"))
    return faults


def _wrong_compute(schedule: Schedule) -> list[Fault]:
    """Every stage runs every micro-batch forward once, then backward once, whole or split."""
    faults = []
    for rank, actions in enumerate(schedule.actions):
        place: dict[Action, int] = {}
        for index, action in enumerate(actions):
            if action.kind not in COMPUTE:
                continue
            if action in place:
                faults.append(Fault(rank, index, f"{action} is there twice"))
            place.setdefault(action, index)
        for stage in schedule.stages_of(rank):
            for micro_batch in range(schedule.num_micro_batches):
                forward, whole, of_input, of_weight = (
                    Action(kind, stage, micro_batch)
                    for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
                )
                is_split = of_input in place or of_weight in place
                backward = [of_input, of_weight] if is_split and whole not in place else [whole]
                missing = [action for action in (forward, *backward) if action not in place]
                faults += [Fault(rank, None, f"{action} is missing") for action in missing]
                if whole in place and is_split:
                    faults.append(Fault(rank, place[whole], f"{whole} is there both whole and split"))
                if not missing:
                    chain = [forward, *backward]
                    for earlier, later in pairwise(chain):
                        if place[earlier] > place[later]:
                            faults.append(Fault(rank, place[later], f"{later} comes before {earlier}"))
    return faults


def _wrong_transfers(schedule: Schedule) -> list[Fault]:
    """Every hop between ranks has a send after the producer, a receive before the consumer, no more."""
    faults = []
    for rank, actions in enumerate(schedule.actions):
        place: dict[Action, int] = {}
        for index, action in enumerate(actions):
            if action.kind not in COMPUTE and action in place:
                faults.append(Fault(rank, index, f"{action} is there twice"))
            place.setdefault(action, index)
        needed: set[Action] = set()
        for action in schedule.compute(rank):
            receive, send = schedule.input_of(action), schedule.output_of(action)
            if receive is not None:
                needed.add(receive)
                if receive not in place:
                    faults.append(Fault(rank, place[action], f"{action} has no {receive} to take its input from"))
                elif place[receive] > place[action]:
                    faults.append(Fault(rank, place[receive], f"{receive} comes after {action}, which needs it"))
            if send is not None:
                needed.add(send)
                if send not in place:
                    faults.append(Fault(rank, place[action], f"{action} has no {send} to pass its output on"))
                elif place[send] < place[action]:
                    faults.append(Fault(rank, place[send], f"{send} comes before {action}, which makes it"))
        for action, index in place.items():
            if action.kind not in COMPUTE and action not in needed:
                faults.append(Fault(rank, index, f"{action} has no other end on another rank"))
    return faults


def _crossed_channels(schedule: Schedule) -> list[Fault]:
    """What a rank sends to another as its n-th message, the other receives from it as its n-th."""
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)  # as the receives that they match
    received: dict[tuple[int, int], list[tuple[int, Action]]] = defaultdict(list)
    for rank, actions in enumerate(schedule.actions):
        for index, action in enumerate(actions):
            if action.kind in SENDS:
                receive = action.matching_receive()
                sent[rank, schedule.placement[receive.stage]].append(receive)
            elif action.kind in RECEIVES:
                sender = schedule.placement[action.matching_send().stage]
                received[sender, rank].append((index, action))
    faults = []
    for (sender, receiver), receives in received.items():
        for number, ((index, got), expected) in enumerate(zip(receives, sent[sender, receiver], strict=True)):
            if got != expected:
                message = f"message {number} from rank {sender} is received as {got}, but was sent for {expected}"
                faults.append(Fault(receiver, index, message))
                break  # the rest of this channel follows from it
    return faults


def find_deadlock(schedule: Schedule, *, sends_block: bool) -> list[Fault]:
    """Execute the plan without time: every rank goes on until it must wait; who never ends is at fault.

    A send that blocks does so until the other end has posted the receive, as it may with large messages.
    """
    position = [0] * schedule.num_ranks
    passed: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                if waits_for(schedule, action, passed, sends_block=sends_block):
                    break
                passed.add(action)
                position[rank] += 1
                moved = True
    faults = []
    for rank, (actions, index) in enumerate(zip(schedule.actions, position, strict=True)):
        if index < len(actions):
            waiting = waits_for(schedule, actions[index], passed, sends_block=sends_block)
            message = f"{actions[index]} waits for ever for {' and '.join(map(str, waiting))}"
            faults.append(Fault(rank, index, message + (" to be posted" if actions[index].kind in SENDS else "")))
    return faults


def waits_for(schedule: Schedule, action: Action, passed: set[Action], *, sends_block: bool) -> list[Action]:
    """What an action still waits for from elsewhere, given what all ranks have passed."""
    if action.kind in SENDS:
        needed = [action.matching_receive()] if sends_block else []
    elif receive := schedule.input_of(action):
        needed = [receive, receive.matching_send()]
    elif action.kind is Kind.FORWARD and action.stage > 0:  # a hop within the rank
        needed = [Action(Kind.FORWARD, action.stage - 1, action.micro_batch)]
    elif action.kind in GIVES_GRADIENT and action.stage < schedule.num_stages - 1:
        either = {Action(kind, action.stage + 1, action.micro_batch) for kind in GIVES_GRADIENT}
        needed = [] if either & passed else [Action(action.kind, action.stage + 1, action.micro_batch)]
    else:
        needed = []
    return [other for other in needed if other not in passed]
