"""What one rank holds of a model that pipeline and tensor parallelism have cut, and how the whole is seen again.

Data strategies work on a rank's own parameters whatever they are a part of. Three things cross the cut: gradients that
ranks outside the data axis still have to sum (tied copies, norms under sequence parallelism), the global gradient norm,
and the whole tensors that the gate asks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from raybench.parallel.norm import global_norm
from raybench.worker.communication import Axis
from raybench.worker.mesh import Mesh


@dataclass(frozen=True)
class Sharing:
    """How a parameter is held by ranks that the data axis does not connect."""

    axis: Axis | None = None
    """The ranks with a copy of it whose gradients are to be summed, beside the sum over data; None: nothing to sum."""
    share: float = 1.0
    """What this rank counts of the gradient's squares in the global norm: over all copies it comes to 1."""


@dataclass(frozen=True)
class Shard:
    """A parameter cut along one dimension over the tensor axis, in equal parts after padding."""

    dim: int
    size: int
    """Length of that dimension in the whole parameter; what the last parts hold beyond it is padding."""
    interleaved: int = 1
    """How many stacked blocks (query, key, value) are each cut by themselves."""
    copies: int = 1
    """How many consecutive ranks hold the same part: key and value heads that are fewer than the ranks."""


ALONE = Sharing()


@dataclass(frozen=True)
class Cut:
    """What parallelizing an outlined model over an axis made of its parameters, by name."""

    shards: Mapping[str, Shard] = field(default_factory=dict)
    sharing: Mapping[str, Sharing] = field(default_factory=dict)
    """Only of those that are not held alone."""
    recorded: bool = True
    """Whether all of its communication goes through the mesh's axes; a library's does not."""


class Parts:
    """A rank's part of the model over the pipeline and tensor axes; with both of size one, the whole model.

    Args:
        mesh: where this rank stands.
        sharing: by parameter name, for those that are not held alone.
        shards: by parameter name, for those that are cut over the tensor axis.
        aliases: the name in the whole model of parameters that go by another one here (a tied copy).
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        sharing: Mapping[str, Sharing] | None = None,
        shards: Mapping[str, Shard] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.mesh = mesh
        self.shards = shards or {}
        self._sharing = sharing or {}
        self._aliases = aliases or {}

    def sharing(self, name: str) -> Sharing:
        return self._sharing.get(name, ALONE)

    def norm(self, gradients: Mapping[Sharing, Sequence[Tensor]], *axes: Axis) -> Tensor:
        """The 2-norm of the whole model's gradient, the same on every rank of the replica.

        Args:
            gradients: what this rank holds, each element once, by how it is shared.
            axes: further axes over which the gradients are cut (shards over data).
        """
        axes = tuple(axis for axis in (self.mesh.model, *axes) if axis.size > 1)
        if not axes and list(gradients) == [ALONE]:
            return global_norm(gradients[ALONE])
        squares = [global_norm(tensors).square() * sharing.share for sharing, tensors in gradients.items() if tensors]
        total = torch.stack(squares).sum() if squares else torch.zeros((), device=self.mesh.recorder.device)
        for axis in axes:
            axis.all_reduce(total, label="gradient norm").wait()
        return total.sqrt()

    def whole(self, own: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor of every parameter of the model, one at a time, from each rank's own parts.

        All ranks of the replica iterate together; each gets every tensor, in the order of the stages, tied copies once.
        """
        gathered = ((self.whole_name(name), self._over_tensor(name, tensor)) for name, tensor in own)
        if self.mesh.pipeline.size == 1:
            yield from gathered
            return
        seen: set[str] = set()
        for place in range(self.mesh.pipeline.size):
            for name, tensor in self._over_pipeline(gathered, place):
                if name not in seen:
                    seen.add(name)
                    yield name, tensor

    def _over_pipeline(self, own: Iterator[tuple[str, Tensor]], place: int) -> Iterator[tuple[str, Tensor]]:
        """What the rank at `place` of the pipeline holds, given to all of its ranks."""
        axis = self.mesh.pipeline
        while True:
            mine = next(own, None) if axis.index == place else None
            head = None if mine is None else (mine[0], mine[1].shape, mine[1].dtype)
            head = axis.gather_objects(head)[place]
            if head is None:
                return
            name, shape, dtype = head
            tensor = torch.empty(shape, dtype=dtype, device=self.mesh.recorder.device) if mine is None else mine[1]
            tensor = tensor.detach().contiguous()
            axis.broadcast(tensor, label=name, place=place).wait()
            yield name, tensor

    def _over_tensor(self, name: str, tensor: Tensor) -> Tensor:
        """A parameter's parts over the tensor axis put together, without padding."""
        shard, axis = self.shards.get(name), self.mesh.tensor
        if shard is None or axis.size == 1:
            return tensor
        pieces = []
        for place in range(axis.size):
            piece = tensor.detach().clone(memory_format=torch.contiguous_format)
            axis.broadcast(piece, label=name, place=place).wait()
            if place % shard.copies == 0:
                pieces.append(piece)
        blocks = zip(*(piece.chunk(shard.interleaved, shard.dim) for piece in pieces), strict=True)
        length = shard.size // shard.interleaved
        return torch.cat([torch.cat(block, shard.dim).narrow(shard.dim, 0, length) for block in blocks], shard.dim)

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of the whole parameter that it calls `name`, zeros where it is padded."""
        shard, axis = self.shards.get(name), self.mesh.tensor
        if shard is None:
            return whole
        num_parts, index = axis.size // shard.copies, axis.index // shard.copies
        blocks = whole.chunk(shard.interleaved, shard.dim)
        return torch.cat([_part(block, shard.dim, num_parts, index) for block in blocks], shard.dim)

    def whole_name(self, name: str) -> str:
        """What the parameter is called in the whole model."""
        return self._aliases.get(name, name)

    def whole_shape(self, name: str, part: Tensor) -> list[int]:
        """The shape of the whole parameter that `part` is this rank's part of."""
        shape = list(part.shape)
        if name in self.shards:
            shape[self.shards[name].dim] = self.shards[name].size
        return shape


def _part(block: Tensor, dim: int, num_parts: int, index: int) -> Tensor:
    """One of equal parts of `block` along `dim`, padded with zeros at its end."""
    size = -(-block.shape[dim] // num_parts)
    begin = min(index * size, block.shape[dim])
    part = block.narrow(dim, begin, min(size, block.shape[dim] - begin))
    missing = size - part.shape[dim]
    if not missing:
        return part
    padding = list(part.shape)
    padding[dim] = missing
    return torch.cat([part, part.new_zeros(padding)], dim)
