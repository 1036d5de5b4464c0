"""What every strategy promises the worker loop, hand-written or a library's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from raybench.data.batches import Batch
from raybench.worker.mesh import Mesh

OptimizerFactory = Callable[[Iterable[Tensor]], Optimizer]
SchedulerFactory = Callable[[Optimizer], LRScheduler]
LossSum = Callable[[Callable[..., Tensor], Mapping[str, Tensor], Tensor], Tensor]
"""(the model or what wraps it, inputs, labels) to the summed loss of a micro-batch, in the workload's precision."""


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
    """The whole model, on this rank's device; only the first rank's values count."""
    loss_sum: LossSum
    make_optimizer: OptimizerFactory
    make_scheduler: SchedulerFactory
    clip_gradient_norm: float | None
    mesh: Mesh
    options: Mapping[str, Any]


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
    def state_bytes(self) -> StateBytes:
        """Bytes of parameters, gradients and optimizer state that this rank holds now."""

    def instrument(self) -> bool:
        """Called before the instrumented steps: whether all of the communication will be recorded from here on."""
        return True

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
