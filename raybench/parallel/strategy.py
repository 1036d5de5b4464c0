"""What every strategy promises the worker loop, hand-written or a library's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from raybench.data.batches import Batch
from raybench.errors import RequestError
from raybench.parallel.execution import Execution, LossSum
from raybench.parallel.parts import Parts
from raybench.worker.mesh import Mesh

OptimizerFactory = Callable[[Iterable[Tensor]], Optimizer]
SchedulerFactory = Callable[[Optimizer], LRScheduler]


@dataclass(frozen=True)
class StateBytes:
    """What a rank keeps between steps, counted over distinct storages."""

    parameters: int
    gradients: int
    optimizer: int


@dataclass(frozen=True)
class Context:
    """All that a strategy is built from."""

    model: nn.Module
    """This rank's part of the model (see `parts`), on its device; of data ranks only the first one's values count."""
    parts: Parts
    make_execution: Callable[[], Execution]
    """How a step's micro-batches go through the model: accumulation, or a pipeline schedule."""
    loss_sum: LossSum
    make_optimizer: OptimizerFactory
    make_scheduler: SchedulerFactory
    clip_gradient_norm: float | None
    mesh: Mesh
    options: Mapping[str, Any]
    recorded: bool = True
    """Whether all communication inside forward and backward goes through the mesh's axes; a library's does not."""


@dataclass(frozen=True)
class Held:
    """A stretch of the trained parameters, laid one after the other, as one tensor of an optimizer."""

    optimizer: Optimizer
    trained: nn.Parameter
    """With the optimizer's state for it."""
    parameters: Sequence[tuple[str, int]]
    """Names and numbers of elements of the parameters that the stretch was cut from, in order."""
    begin: int
    """Where the stretch begins in them; what goes beyond their end is padding."""
    is_first_copy: bool
    """Whether no rank before this one holds the same stretch."""


class Strategy(ABC):
    """Owns how parameters, gradients and optimizer state are laid out over its axis, and when they move."""

    gradient_norm: Tensor
    """Global gradient norm of the last step, before clipping; the same on every rank."""

    @abstractmethod
    def step(self, batch: Batch) -> Tensor:
        """Forward, backward, communication, optimizer; the global token-mean loss, the same on every rank."""

    @abstractmethod
    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Name and whole unclipped gradient of every trained parameter of the last step, one at a time.

        All ranks iterate together; the tensor may be reused once the next one is asked for.
        """

    @abstractmethod
    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Name and whole value of every trained parameter, one at a time."""

    @abstractmethod
    def held_parameters(self) -> Iterable[Tensor]:
        """Tensors that are parameters on this rank: what autograd keeps of them is no activation."""

    @abstractmethod
    def state_bytes(self) -> StateBytes:
        """Bytes of parameters, gradients and optimizer state that this rank holds now."""

    def instrument(self) -> bool:
        """Called before the instrumented steps: whether all of the communication will be recorded from here on."""
        return True

    def held_states(self) -> Iterator[Held]:
        """What this rank holds of parameters and optimizer state, for checkpoints.

        Raises:
            RequestError: a library, or an axis beside data, keeps them in a way of its own.
        """
        raise RequestError(f"checkpoint: {type(self).__name__} cannot be saved (allowed: hand-written data strategies)")

    def states_loaded(self, num_steps: int) -> None:
        """New values are in all that `held_states` gave: go on as after `num_steps` steps."""

    def settle(self) -> None:
        """Complete what the last step has left under way; the time of it belongs to the window."""

    def close(self) -> None:
        """Let go of hooks and wrappers before the model is dropped."""


def distinct_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def optimizer_tensors(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    """Every tensor of the optimizers' state larger than a step counter."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from (v for v in state.values() if isinstance(v, Tensor) and v.dim() > 0)
