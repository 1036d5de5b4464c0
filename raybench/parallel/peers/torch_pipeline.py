"""Peer: torch.distributed.pipelining, over the same stages, micro-batches and loss as the hand-written schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from raybench.data.batches import Batch, MicroBatch
from raybench.parallel.execution import BackwardObserver, LossSum
from raybench.parallel.pipeline.plan import Plan
from raybench.parallel.pipeline.runner import recut
from raybench.parallel.pipeline.stage import Stage
from raybench.suite.track import Precision
from raybench.worker.mesh import Mesh

SCHEDULES: dict[str, Callable[..., Any]] = {
    "torch-gpipe": pipelining.ScheduleGPipe,
    "torch-1f1b": pipelining.Schedule1F1B,
    "torch-interleaved": pipelining.ScheduleInterleaved1F1B,
    "torch-interleaved-zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
    "torch-zero-bubble": pipelining.ScheduleInterleavedZeroBubble,  # of one chunk a rank: ZB-H1
    "torch-zbv": pipelining.ScheduleZBVZeroBubble,
}


class TorchPipeline:
    """An execution by one of torch's schedules.

    Gradients are summed, not averaged over micro-batches (`scale_grads=False`), and data strategies reduce them after
    the schedule, as torch's own zero-bubble schedules add weight gradients past autograd's hooks.
    """

    recorded = False

    def __init__(
        self, plan: Plan, stages: Sequence[Stage], mesh: Mesh, loss_sum: LossSum, precision: Precision
    ) -> None:
        self.num_micro_batches = plan.schedule.num_micro_batches
        self.device = mesh.recorder.device
        self.marks = mesh.recorder.marks
        self.name = plan.strategy
        self.modules = [_Module(stage, self.device, precision) for stage in stages]
        self._num_tokens = 1
        self._loss_factor = 1

        def loss(output: Tensor, labels: Tensor) -> Tensor:
            return loss_sum(lambda: output, {}, labels) / self._num_tokens * self._loss_factor

        self.wrapped = [
            pipelining.PipelineStage(
                module, module.stage.index, plan.schedule.num_stages, self.device, group=mesh.pipeline.group
            )
            for module in self.modules
        ]
        make = SCHEDULES[plan.strategy]
        is_multi = isinstance(make, type) and issubclass(make, PipelineScheduleMulti)
        self.schedule = make(
            self.wrapped if is_multi else self.wrapped[0], self.num_micro_batches, loss, scale_grads=False
        )
        self._is_first_step = True

    def run(self, batch: Batch, observer: BackwardObserver) -> Tensor:
        batch = recut(batch, self.num_micro_batches)
        self._num_tokens = batch.num_tokens
        for module in self.modules:
            # In its first step torch runs every stage once more, to learn what it gives.
            module.begin(batch.micro_batches, num_trials=int(self._is_first_step))
        self._is_first_step = False
        has_first = any(module.stage.is_first for module in self.modules)
        has_last = any(module.stage.is_last for module in self.modules)
        losses: list[Tensor] = []
        observer.before_backward(False)
        self.marks.mark(f"{self.name}: {', '.join(f'stage {module.stage.index}' for module in self.modules)}")
        self.schedule.step(
            *([torch.cat([_some_input(m) for m in batch.micro_batches])] if has_first else []),
            target=torch.cat([m.labels for m in batch.micro_batches]) if has_last else None,
            losses=losses if has_last else None,
            return_outputs=False,
        )
        share = sum((loss.detach() for loss in losses), torch.zeros((), device=self.device))
        return share / self._loss_factor

    def wrap(self, wrapper: Callable[[nn.Module], nn.Module], *, loss_factor: int) -> None:
        """Let torch drive every stage through `wrapper`, and multiply the loss that gradients come from."""
        for stage in self.wrapped:
            stage.submod = wrapper(stage.submod)
        self._loss_factor = loss_factor


class _Module(nn.Module):
    """A stage as torch calls it: with hidden states alone, micro-batch after micro-batch."""

    def __init__(self, stage: Stage, device: torch.device, precision: Precision) -> None:
        super().__init__()
        self.stage = stage
        self._device = device
        self._precision = precision
        self._micro_batches: list[MicroBatch] = []

    def begin(self, micro_batches: Sequence[MicroBatch], *, num_trials: int) -> None:
        """A step begins; `num_trials` more passes of the first micro-batch come before it."""
        self._micro_batches = [*[micro_batches[0]] * num_trials, *micro_batches]

    def forward(self, given: Tensor) -> Tensor:
        inputs = self._micro_batches.pop(0).inputs
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._precision == "bf16"):
            output: Tensor = self.stage(None if self.stage.is_first else given, inputs)
        return output


def _some_input(micro_batch: MicroBatch) -> Tensor:
    """What torch cuts along the first dimension; the stage takes the micro-batch's inputs themselves."""
    return next(iter(micro_batch.inputs.values()))
