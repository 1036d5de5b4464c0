"""What a pipeline schedule is made of: actions, and the plan that lists them for every rank.

An action prints as in `torch.distributed.pipelining`: `2F0` is stage 2's forward of micro-batch 0,
`1RECV_B3` is stage 1 receiving the gradient of its output for micro-batch 3. A schedule is plain data: it
can be printed, checked, simulated and drawn without a process group, a device or torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What a rank does in one action; the value is how it prints."""

    FORWARD = "F"
    BACKWARD = "B"  # input and weight gradients together
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    SEND_ACTIVATION = "SEND_F"  # a stage's output, to the next stage
    RECEIVE_ACTIVATION = "RECV_F"  # a stage's input, from the previous stage
    SEND_GRADIENT = "SEND_B"  # the gradient of a stage's input, to the previous stage
    RECEIVE_GRADIENT = "RECV_B"  # the gradient of a stage's output, from the next stage


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT})
SENDS = frozenset({Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT})
RECEIVES = frozenset({Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT})
GIVES_GRADIENT = frozenset({Kind.BACKWARD, Kind.INPUT_GRADIENT})  # ends with a gradient for the previous stage
FREES_ACTIVATION = frozenset({Kind.BACKWARD, Kind.WEIGHT_GRADIENT})  # the last use of a stage's saved activations

_PRINTED = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d+)")


class ScheduleError(ValueError):
    """A schedule that cannot run: a dependency that is never met, or a transfer without its other end."""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does: a kind, for one stage and one micro-batch."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The inverse of `str`: `Action.parse("2F0")`."""
        found = _PRINTED.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is not an action such as 2F0, 1I3 or 0SEND_F2")
        return cls(Kind(found[2]), int(found[1]), int(found[3]))

    def matching_receive(self) -> Action:
        """The receive, on the neighbouring stage, that takes what this send gives."""
        if self.kind is Kind.SEND_ACTIVATION:
            return Action(Kind.RECEIVE_ACTIVATION, self.stage + 1, self.micro_batch)
        if self.kind is Kind.SEND_GRADIENT:
            return Action(Kind.RECEIVE_GRADIENT, self.stage - 1, self.micro_batch)
        raise ValueError(f"{self} is not a send")

    def matching_send(self) -> Action:
        """The send, on the neighbouring stage, that gives what this receive takes."""
        if self.kind is Kind.RECEIVE_ACTIVATION:
            return Action(Kind.SEND_ACTIVATION, self.stage - 1, self.micro_batch)
        if self.kind is Kind.RECEIVE_GRADIENT:
            return Action(Kind.SEND_GRADIENT, self.stage + 1, self.micro_batch)
        raise ValueError(f"{self} is not a receive")


@dataclass(frozen=True, slots=True)
class Schedule:
    """Who does what, in which order. `actions[rank]` is executed from left to right.

    A receive stands where it is posted; it is waited for just before the action that uses it. A send never
    blocks. Stages that follow each other on one rank (the fold of a V) hand over directly: there is no
    transfer between them.
    """

    name: str
    num_ranks: int
    num_stages: int
    num_micro_batches: int
    placement: tuple[int, ...]  # the rank of each stage
    actions: tuple[tuple[Action, ...], ...]

    @property
    def num_chunks(self) -> int:
        """Stages a rank holds."""
        return self.num_stages // self.num_ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, in the order of the model."""
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == rank)

    def compute(self, rank: int) -> tuple[Action, ...]:
        """A rank's forwards and backwards, without the transfers."""
        return tuple(action for action in self.actions[rank] if action.kind in COMPUTE)

    def input_of(self, action: Action) -> Action | None:
        """The receive that a compute action waits for, or None where its input is already on the rank."""
        if action.kind is Kind.FORWARD:
            return self._over_the_wire(Kind.RECEIVE_ACTIVATION, action, action.stage - 1)
        if action.kind in GIVES_GRADIENT:
            return self._over_the_wire(Kind.RECEIVE_GRADIENT, action, action.stage + 1)
        return None

    def output_of(self, action: Action) -> Action | None:
        """The send that follows a compute action, or None where nobody or this rank itself uses it."""
        if action.kind is Kind.FORWARD:
            return self._over_the_wire(Kind.SEND_ACTIVATION, action, action.stage + 1)
        if action.kind in GIVES_GRADIENT:
            return self._over_the_wire(Kind.SEND_GRADIENT, action, action.stage - 1)
        return None

    def _over_the_wire(self, kind: Kind, action: Action, neighbour: int) -> Action | None:
        if not 0 <= neighbour < self.num_stages:
            return None
        if self.placement[neighbour] == self.placement[action.stage]:
            return None
        return Action(kind, action.stage, action.micro_batch)


def looped(num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """Stage s on rank s mod p: the model passes over the ranks once a chunk."""
    return tuple(stage % num_ranks for stage in range(num_ranks * num_chunks))


def folded(num_ranks: int) -> tuple[int, ...]:
    """Two chunks in a V: down the ranks and back up, so that rank 0 holds the first stage and the last."""
    down = tuple(range(num_ranks))
    return down + down[::-1]


Orders = Sequence[Sequence[Action]]  # compute actions of every rank, in order
