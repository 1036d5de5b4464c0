"""Peers: DeepSpeed's ZeRO stages 1, 2 and 3, with its own norm and clipping."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from raybench.data.batches import Batch
from raybench.parallel.peers.deepspeed_ddp import DeepSpeed0, make_engine
from raybench.parallel.sharded.zero1 import whole_range
from raybench.parallel.strategy import StateBytes, distinct_bytes, optimizer_tensors


class DeepSpeed1(DeepSpeed0):
    """The engine trains this rank's part of one flat fp32 copy of the parameters."""

    stage = 1

    def lay_out(self) -> None:
        super().lay_out()
        self._parts: list[Tensor] = []
        """This rank's part of the gradient in the last step, as the optimizer got it."""

    def make_engine(self, num_micro_batches: int) -> Any:
        return make_engine(
            self.model,
            self.optimizers[0],
            self.context.mesh,
            num_micro_batches,
            stage=self.stage,
            clip_gradient_norm=self.context.clip_gradient_norm,
        )

    def step(self, batch: Batch) -> Tensor:
        self._parts.clear()
        loss = super().step(batch)
        self.gradient_norm = torch.as_tensor(self.engine.get_global_grad_norm(), device=loss.device)
        limit = self.context.clip_gradient_norm
        if limit is not None:
            self.scale = (limit / (self.gradient_norm + 1e-6)).clamp(max=1.0)
        return loss

    def _before_update(self) -> None:
        groups = self.optimizers[0].param_groups
        self._parts += [p.grad for group in groups for p in group["params"] if p.grad is not None]

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        names = {parameter: name for name, parameter in self.parameters.items()}
        zero = self.engine.optimizer
        for part, parameters, offsets in zip(
            self._parts, zero.round_robin_bit16_groups, zero.round_robin_bit16_offsets, strict=True
        ):
            for parameter, begin in zip(parameters, offsets, strict=True):
                whole = whole_range(part, begin, parameter.shape, self.axis, "gradient")
                yield names[parameter], self._unclipped(whole)

    def state_bytes(self) -> StateBytes:
        trained = [p for group in self.optimizers[0].param_groups for p in group["params"]]
        return StateBytes(
            parameters=self.parameter_bytes(),
            gradients=distinct_bytes(self._parts),
            optimizer=distinct_bytes(optimizer_tensors(self.optimizers)) + distinct_bytes(trained),
        )

    def parameter_bytes(self) -> int:
        return distinct_bytes(self.model.parameters())

    def close(self) -> None:
        self._parts.clear()
        super().close()


class DeepSpeed2(DeepSpeed1):
    """Gradients in parts as well."""

    stage = 2


class DeepSpeed3(DeepSpeed1):
    """Parameters, too, each in equal parts of its own."""

    stage = 3

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        names = {parameter: name for name, parameter in self.parameters.items()}
        for part, parameters in zip(self._parts, self.engine.optimizer.fp16_groups, strict=True):
            sizes = [parameter.partition_numel() for parameter in parameters]
            for parameter, piece in zip(parameters, part.split(sizes), strict=True):
                whole = piece.new_empty(piece.numel() * self.axis.size)
                self.axis.all_gather(whole, piece.contiguous(), label="gradient").wait()
                yield names[parameter], self._unclipped(whole[: parameter.ds_numel].view(parameter.ds_shape))

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        if self.engine is None:
            yield from super().full_parameters()
            return
        from deepspeed.runtime.zero import GatheredParameters

        for name, parameter in self.parameters.items():
            with GatheredParameters([parameter]):
                yield name, parameter.detach().clone()

    def parameter_bytes(self) -> int:
        return distinct_bytes(parameter.ds_tensor for parameter in self.model.parameters())  # type: ignore[attr-defined]
