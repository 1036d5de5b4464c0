"""How long a schedule takes, given how long its actions take: an event simulation, without processes.

Every rank does its actions in order. A compute action begins when the rank is free and its input is there;
a transfer begins when it was sent, its receive was posted and the channel's previous message has arrived,
and takes the rank no time but that of launching it. The bubble is the fraction of the step, over all ranks,
in which nothing is computed: 1 - busy / (num_ranks x step).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from raybench.parallel.pipeline.actions import (
    COMPUTE,
    GIVES_GRADIENT,
    RECEIVES,
    SENDS,
    Action,
    Kind,
    Schedule,
    ScheduleError,
)

PerStage = float | Sequence[float]


class Durations(Protocol):
    """Anything that knows how many seconds an action takes; a transfer is asked for by its send."""

    def duration(self, action: Action) -> float: ...

    def launch(self, action: Action) -> float:
        """The seconds for which beginning a send or a receive keeps its rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds that one stage takes for one micro-batch: a number for all stages, or one number a stage."""

    forward: PerStage = 1.0
    input_gradient: PerStage = 1.0
    weight_gradient: PerStage = 1.0
    transfer: PerStage = 0.0
    """From the moment that both ends are ready; of the stage that sends."""

    def duration(self, action: Action) -> float:
        """The time of one action; a backward that is not split is the sum of its two gradients."""
        stage = action.stage
        if action.kind in SENDS:
            return _at(self.transfer, stage)
        if action.kind is Kind.FORWARD:
            return _at(self.forward, stage)
        if action.kind is Kind.INPUT_GRADIENT:
            return _at(self.input_gradient, stage)
        if action.kind is Kind.WEIGHT_GRADIENT:
            return _at(self.weight_gradient, stage)
        if action.kind is Kind.BACKWARD:
            return _at(self.input_gradient, stage) + _at(self.weight_gradient, stage)
        raise ValueError(f"{action} takes no time of its own: ask for its send")

    def launch(self, action: Action) -> float:
        """Nothing, as theory has it."""
        return 0.0


def _at(times: PerStage, stage: int) -> float:
    return times[stage] if isinstance(times, Sequence) else times


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """The time that each action of one step took, as measured; a transfer is listed under its send."""

    seconds: Mapping[Action, float]
    launches: Mapping[Action, float] = field(default_factory=dict)
    """Of sends and receives; one that is missing takes no time."""

    def duration(self, action: Action) -> float:
        return self.seconds[action]

    def launch(self, action: Action) -> float:
        return self.launches.get(action, 0.0)


@dataclass(frozen=True, slots=True)
class Event:
    """A compute action on the time axis; before it, its rank waited `waited` seconds for the input."""

    action: Action
    begin: float
    end: float
    waited: float = 0.0


@dataclass(frozen=True, slots=True)
class Transfer:
    """A message on the time axis: its send, and when it left and arrived."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """What happened when, simulated or measured: every rank's compute actions, and all transfers."""

    name: str
    events: tuple[tuple[Event, ...], ...]
    transfers: tuple[Transfer, ...] = ()

    @property
    def begin(self) -> float:
        return min(events[0].begin for events in self.events if events)

    @property
    def end(self) -> float:
        return max(events[-1].end for events in self.events if events)

    @property
    def step_time(self) -> float:
        """From the first action's begin to the last one's end, over all ranks."""
        return self.end - self.begin

    @property
    def num_chunks(self) -> int:
        return max(len({event.action.stage for event in events}) for events in self.events)

    def busy(self, rank: int) -> float:
        """The seconds that a rank computes."""
        return sum(event.end - event.begin for event in self.events[rank])

    def waited(self, rank: int) -> float:
        """The seconds that a rank waits for inputs; the rest of its idle time is after its last action."""
        return sum(event.waited for event in self.events[rank])

    @property
    def bubble(self) -> float:
        """The fraction of the step, over all ranks, in which nothing is computed."""
        busy = sum(self.busy(rank) for rank in range(len(self.events)))
        return 1.0 - busy / (len(self.events) * self.step_time)


def simulate(schedule: Schedule, times: Durations | None = None) -> Timeline:
    """Run the schedule in simulated time; by default F, I and W take a second each and a transfer none."""
    return _Simulation(schedule, times or Times()).run()


@dataclass
class _Simulation:
    """The state of the ranks and channels. In which order the ranks advance has no effect on the times."""

    schedule: Schedule
    times: Durations
    done: dict[Action, float] = field(default_factory=dict)  # compute actions: when they ended
    sent: dict[Action, float] = field(default_factory=dict)  # by the receive that a send matches
    posted: dict[Action, float] = field(default_factory=dict)
    arrived: dict[Action, float] = field(default_factory=dict)
    transfers: list[Transfer] = field(default_factory=list)

    def run(self) -> Timeline:
        ranks = range(self.schedule.num_ranks)
        self.queues = self._messages()
        self.heads = dict.fromkeys(self.queues, 0)
        self.free = dict.fromkeys(self.queues, 0.0)
        events: list[list[Event]] = [[] for _ in ranks]
        now = [0.0 for _ in ranks]
        position = [0 for _ in ranks]
        moved = True
        while moved:
            moved = False
            for rank in ranks:
                actions = self.schedule.actions[rank]
                while position[rank] < len(actions):
                    action = actions[position[rank]]
                    if action.kind in COMPUTE:
                        ready = self._ready(action)
                        if ready is None:
                            break
                        begin = max(now[rank], ready)
                        end = begin + self.times.duration(action)
                        events[rank].append(Event(action, begin, end, begin - now[rank]))
                        now[rank] = self.done[action] = end
                    else:
                        self._post(action, now[rank])
                        now[rank] += self.times.launch(action)
                    position[rank] += 1
                    moved = True
        stuck = [
            f"rank {rank} at {self.schedule.actions[rank][position[rank]]}"
            for rank in ranks
            if position[rank] < len(self.schedule.actions[rank])
        ]
        if stuck:
            raise ScheduleError(f"{self.schedule.name} does not come to its end: {', '.join(stuck)}")
        self.transfers.sort(key=lambda transfer: transfer.begin)
        return Timeline(self.schedule.name, tuple(map(tuple, events)), tuple(self.transfers))

    def _messages(self) -> dict[tuple[int, int], list[Action]]:
        """The messages of every channel in the order of sending, each as its receive."""
        queues: dict[tuple[int, int], list[Action]] = defaultdict(list)
        for rank, actions in enumerate(self.schedule.actions):
            for action in actions:
                if action.kind in SENDS:
                    receive = action.matching_receive()
                    queues[rank, self.schedule.placement[receive.stage]].append(receive)
        return dict(queues)

    def _ready(self, action: Action) -> float | None:
        """When an action's inputs from elsewhere are there, or None while that is not known."""
        receive = self.schedule.input_of(action)
        if receive is not None:
            return self.arrived.get(receive)
        # Inputs from this rank: earlier in its order, so done before now, if the order is right.
        if action.kind is Kind.FORWARD and action.stage > 0:
            return self.done.get(Action(Kind.FORWARD, action.stage - 1, action.micro_batch))
        if action.kind in GIVES_GRADIENT and action.stage < self.schedule.num_stages - 1:
            either = (Action(kind, action.stage + 1, action.micro_batch) for kind in GIVES_GRADIENT)
            return next((self.done[other] for other in either if other in self.done), None)
        return 0.0

    def _post(self, action: Action, now: float) -> None:
        """Note a send or a receive, and let the messages of its channel go whose two ends are now ready."""
        receive = action if action.kind in RECEIVES else action.matching_receive()
        placement = self.schedule.placement
        channel = placement[receive.matching_send().stage], placement[receive.stage]
        (self.posted if action.kind in RECEIVES else self.sent)[receive] = now
        queue = self.queues.get(channel, [])
        while self.heads.get(channel, 0) < len(queue):
            message = queue[self.heads[channel]]
            if message not in self.sent or message not in self.posted:
                break
            begin = max(self.sent[message], self.posted[message], self.free[channel])
            end = begin + self.times.duration(message.matching_send())
            self.transfers.append(Transfer(message.matching_send(), begin, end))
            self.arrived[message] = self.free[channel] = end
            self.heads[channel] += 1
