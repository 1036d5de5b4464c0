"""Peer: torch's DTensor tensor parallelism, `parallelize_module` with `loss_parallel`, as torchtitan plans it.

DTensor describes how a tensor is placed and derives communication from that. Here the model's parameters stay plain
tensors, this rank's part, and are seen as DTensors only while a module runs: the arrangement in which torch puts DDP
over DTensor. Optimizer, clipping and data strategies then cost what they cost the hand-written strategies.
"""

from __future__ import annotations

import fnmatch
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

from raybench.data.batches import IGNORED_LABEL
from raybench.models.gpt import GPT, Embedding
from raybench.models.timed import TimedBlock
from raybench.parallel.autograd import applied
from raybench.parallel.parts import Cut
from raybench.parallel.parts import Shard as Part
from raybench.parallel.tensor.cut import sharing_of
from raybench.parallel.tensor.timed import (
    NUM_PAIRS,
    PairTiming,
    ParallelTimedBlock,
    timed_factor_gradient,
    timed_product,
)
from raybench.worker.communication import Axis
from raybench.worker.mesh import Mesh

STACKED = {"query_key_value": 3, "key_value": 2}
"""Linear layers whose outputs are several blocks, each of which is cut by itself."""


def parallelize(model: GPT, mesh: Mesh) -> Cut:
    """Tensor parallelism: activations between the matrices are the same on every rank."""
    plan: dict[str, ParallelStyle] = {
        "embedding.token": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.attention.projection": RowwiseParallel(),
        "blocks.*.feed_forward.projection": RowwiseParallel(),
        "head.projection": ColwiseParallel(),
    }
    return _apply(model, mesh, plan)


def parallelize_sequence(model: GPT, mesh: Mesh) -> Cut:
    """With sequence parallelism: norms and the residual stream on a part of the sequence."""
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan: dict[str, ParallelStyle] = {
        "embedding.token": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.attention_norm": SequenceParallel(),
        "blocks.*.attention": gathered,
        "blocks.*.attention.projection": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.feed_forward_norm": SequenceParallel(),
        "blocks.*.feed_forward": gathered,
        "blocks.*.feed_forward.projection": RowwiseParallel(output_layouts=Shard(1)),
        "head.norm": SequenceParallel(),
        "head.projection": ColwiseParallel(input_layouts=Shard(1)),
    }
    model.embedding = _SequenceEmbedding(model.embedding.token, model.embedding.position, mesh.tensor)
    partial = [name for name, _ in model.named_parameters() if "norm" in name or "position" in name]
    return _apply(model, mesh, plan, partial)


def _apply(model: GPT, mesh: Mesh, plan: dict[str, ParallelStyle], partial: list[str] | None = None) -> Cut:
    axis = mesh.tensor
    is_sequence = partial is not None
    columns = ["attention.query", "attention.key_value", "attention.query_key_value", "feed_forward.expansion"]
    plan.update({f"blocks.*.{name}": ColwiseParallel() for name in columns})
    names = [name for name, _ in model.named_modules()]
    plan = {pattern: style for pattern, style in plan.items() if fnmatch.filter(names, pattern)}
    assert axis.group is not None
    device_mesh = DeviceMesh.from_group(axis.group, mesh.recorder.device.type)
    vocabulary_size = model.embedding.token.num_embeddings
    parallelize_module(model, device_mesh, plan, src_data_rank=None)
    shards: dict[str, Part] = {}
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                whole = f"{prefix}.{name}"
                _keep_local(module, name, parameter, axis, summed_later=whole in (partial or ()))
                (placement,) = parameter.placements
                if isinstance(placement, Shard):
                    blocks = STACKED.get(prefix.rpartition(".")[2], 1)
                    shards[whole] = Part(placement.dim, parameter.shape[placement.dim], blocks)
    for index, block in enumerate(model.blocks):
        if isinstance(block, TimedBlock):
            timed = _TimedBlock(block, axis, sequence=is_sequence, label=f"blocks.{index}")
            timed.device_mesh = device_mesh
            model.blocks[index] = timed
            shards[f"blocks.{index}.weight"] = timed.shards["weight"]
    model.tie_weights()
    model.loss = _ParallelLoss(vocabulary_size, device_mesh)
    return Cut(shards, sharing_of(model, mesh, shards, partial or ()), recorded=False)


def _keep_local(module: nn.Module, name: str, whole: DTensor, axis: Axis, *, summed_later: bool) -> None:
    """Keep this rank's part, in equal parts after padding, as the module's parameter `name`; a DTensor in forward.

    Args:
        summed_later: leave gradients that are a sum over the ranks as this rank's summand.
    """
    (placement,) = whole.placements
    own = whole.to_local().shape
    padded = list(own)
    if isinstance(placement, Shard):
        padded[placement.dim] = -(-whole.shape[placement.dim] // axis.size)
    module.register_parameter(name, nn.Parameter(torch.empty(padded, dtype=whole.dtype, device=whole.device)))
    device_mesh, shape, stride = whole.device_mesh, whole.shape, whole.stride()
    gradient: list[Placement] = [Partial()] if summed_later else [placement]

    def as_dtensor(module: nn.Module, _: Any) -> None:
        local = cast(Tensor, module._parameters[name])
        if local.shape != own:
            local = local[: own[0]]
        module.__dict__[name] = DTensor.from_local(
            local, device_mesh, [placement], shape=shape, stride=stride, grad_placements=gradient
        )

    module.register_forward_pre_hook(as_dtensor)


class _SequenceEmbedding(Embedding):
    """Adds the positions of this rank's part of the sequence: [batch, sequence / size, width]."""

    def __init__(self, token: nn.Embedding, position: nn.Embedding, axis: Axis) -> None:
        nn.Module.__init__(self)
        self.token = token
        self.position = position
        self.axis = axis

    def forward(self, input_ids: Tensor) -> Tensor:
        length = input_ids.shape[1] // self.axis.size
        embedded: Tensor = self.token(input_ids) + self.position.weight.narrow(0, self.axis.index * length, length)
        return embedded


class _TimedBlock(ParallelTimedBlock):
    """The timed model's block, whose hidden states DTensor moves, here [batch, sequence / size, width]."""

    device_mesh: DeviceMesh

    def forward(self, hidden: Tensor) -> Tensor:
        timing = PairTiming(*(len(hidden) * seconds for seconds in self._seconds_each))
        output = hidden
        for half in self.weight.tensor_split(NUM_PAIRS):
            output = output + self._pair(hidden, half.sum(0) * self.scale, timing)
        return output

    def _pair(self, hidden: Tensor, factor: Tensor, timing: PairTiming) -> Tensor:
        between: list[Placement] = [Shard(1) if self.sequence else Replicate()]
        whole = DTensor.from_local(hidden, self.device_mesh, between).redistribute(placements=[Replicate()])
        product = applied(_TimedProduct, whole.to_local(grad_placements=[Partial()]), factor, timing)
        summed = DTensor.from_local(product, self.device_mesh, [Partial()]).redistribute(placements=between)
        return summed.to_local()


class _TimedProduct(Function):
    """As the product of a matrix: input gradient, then weight gradient; DTensor moves the input gradient afterwards."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, factor: Tensor, timing: PairTiming) -> Tensor:
        ctx.timing = timing
        ctx.save_for_backward(hidden, factor)
        return timed_product(hidden, factor, timing.forward_s)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        hidden, factor = ctx.saved_tensors
        input_gradient = timed_product(gradient, factor, ctx.timing.input_gradient_s)
        return input_gradient, timed_factor_gradient(gradient, hidden, ctx.timing.weight_gradient_s), None


class _ParallelLoss:
    """Summed cross-entropy of this rank's columns of the logits, with backward under `loss_parallel` too."""

    def __init__(self, vocabulary_size: int, device_mesh: DeviceMesh) -> None:
        self.vocabulary_size = vocabulary_size
        self.device_mesh = device_mesh

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        rows = logits.flatten(0, -2)
        shape = torch.Size((len(rows), self.vocabulary_size))
        whole = DTensor.from_local(rows, self.device_mesh, [Shard(1)], shape=shape, stride=(shape[1], 1))
        with loss_parallel():
            loss = F.cross_entropy(whole, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
        backward = ExitStack()
        loss.register_hook(lambda _: backward.enter_context(loss_parallel()))
        whole.register_hook(lambda _: backward.close())
        return cast(DTensor, loss).to_local()
