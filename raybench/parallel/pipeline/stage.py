"""Cuts a model into pipeline stages, and leaves a rank the part of it that its stages are.

A model can be cut if it is made of three children: `embedding`, called with the micro-batch's inputs by name, `blocks`,
called one after the other with what the one before gave, and `head`, called with what the last block gave. What a
block wants besides (a mask, a rotary table) comes from the model's `block_inputs(inputs)`, a dictionary that every
stage makes for itself, since every stage has the inputs of its micro-batches. Parameters keep the names of the whole
model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from raybench.errors import RequestError
from raybench.parallel.parts import Sharing
from raybench.parallel.pipeline.balance import balance, placed
from raybench.suite.track import Workload
from raybench.worker.mesh import Mesh

CHILDREN = ("embedding", "blocks", "head")
Inputs = Mapping[str, Tensor]


class Stage(nn.Module):
    """Consecutive layers of a model, with its embedding or head at the ends: inputs or hidden states to hidden states.

    The modules are those of the rank's model; here they only stand in the order in which a micro-batch passes them.
    """

    def __init__(self, model: nn.Module, index: int, num_stages: int, layers: range) -> None:
        super().__init__()
        self.index = index
        self.is_first = index == 0
        self.is_last = index == num_stages - 1
        self.embedding: nn.Module | None = model.get_submodule("embedding") if self.is_first else None
        self.blocks = nn.ModuleList(model.get_submodule(f"blocks.{layer}") for layer in layers)
        self.head: nn.Module | None = model.get_submodule("head") if self.is_last else None
        self.recompute = bool(getattr(model, "recompute", False))
        self._block_inputs: Callable[[Inputs], dict[str, Any]] = getattr(model, "block_inputs", _nothing)

    def forward(self, hidden: Tensor | None, inputs: Inputs, *, recompute: bool | None = None) -> Tensor:
        """What the next stage takes, or the model's output.

        Args:
            hidden: what the stage before gave; None on the first stage.
            inputs: those of the micro-batch, by name.
            recompute: whether every block is checkpointed; by default as the workload says.
        """
        if hidden is None:
            hidden = self.embed(inputs)
        return self.after_embedding(hidden, inputs, recompute=recompute)

    def embed(self, inputs: Inputs) -> Tensor:
        """The embedding alone, on the first stage."""
        assert self.embedding is not None
        embedded: Tensor = self.embedding(**inputs)
        return embedded

    def after_embedding(self, hidden: Tensor, inputs: Inputs, *, recompute: bool | None = None) -> Tensor:
        """All of the stage but the embedding."""
        others = self._block_inputs(inputs) if len(self.blocks) else {}
        for block in self.blocks:
            if self.recompute if recompute is None else recompute:
                hidden = checkpoint(block, hidden, use_reentrant=False, **others)
            else:
                hidden = block(hidden, **others)
        return hidden if self.head is None else self.head(hidden)


@dataclass(frozen=True)
class Cut:
    """What cutting left on one rank."""

    num_stages: int
    layers: Mapping[int, range]
    """Of each stage that the rank holds."""
    sharing: Mapping[str, Sharing]
    """Of parameters with a copy on the other end of the pipeline, by their names here."""
    aliases: Mapping[str, str]
    """The whole model's name of copies that go by another one here."""

    def build(self, model: nn.Module) -> list[Stage]:
        """The rank's stages in order, once the model has its memory."""
        return [Stage(model, index, self.num_stages, layers) for index, layers in sorted(self.layers.items())]


def cut(
    model: nn.Module, workload: Workload, mesh: Mesh, placement: Sequence[int], layers: Sequence[int] | None
) -> Cut:
    """Take away from `model` what is not on this rank.

    Args:
        placement: the place along the pipeline of every stage.
        layers: how many layers each stage is to hold; None to balance them by what they cost.

    Raises:
        RequestError: the model is not made to be cut, has fewer layers than there are stages, or has a parameter that
            stages other than the first and the last share.
    """
    blocks = _blocks(model, workload.model.name)
    if layers is None:
        costs = counted_costs(model, workload)
        plan = balance(costs.blocks, num_stages=len(placement), embedding=costs.embedding, head=costs.head)
    else:
        plan = placed(layers, num_layers=len(blocks), num_stages=len(placement))
    sharing, aliases = _copies(model, plan, placement, mesh)
    own = {index: plan[index] for index, place in enumerate(placement) if place == mesh.pipeline.index}
    model.blocks = nn.ModuleDict({str(layer): blocks[layer] for layers_of in own.values() for layer in layers_of})
    if 0 not in own:
        del model.embedding
    if len(placement) - 1 not in own:
        del model.head
    return Cut(len(placement), own, sharing, aliases)


@dataclass(frozen=True)
class Costs:
    """What the parts of a model cost, in any one unit."""

    embedding: float
    blocks: Sequence[float]
    head: float


def counted_costs(model: nn.Module, workload: Workload) -> Costs:
    """Multiplications a token: a parameter costs one, an embedding's one a micro-batch (its gradient is dense).

    A transformer's attention adds its scores and their use. The blocks of a timed model cost what they wait, the rest
    nothing.
    """
    config = workload.model
    if config.name == "timed":
        return Costs(0.0, [1.0] * config.num_layers, 0.0)
    tokens = workload.micro_batch_size * workload.sequence_length
    scores = 2.0 * config.width * workload.sequence_length if config.name == "gpt" or config.family else 0.0
    blocks = [_multiplications(block, tokens) + scores for block in _blocks(model, config.name)]
    embedding, head = (_multiplications(model.get_submodule(name), tokens) for name in ("embedding", "head"))
    return Costs(embedding, blocks, head)


def _multiplications(module: nn.Module, tokens: int) -> float:
    return sum(
        parameter.numel() / (tokens if isinstance(part, nn.Embedding) else 1)
        for part in module.modules()
        for parameter in part.parameters(recurse=False)
    )


def _blocks(model: nn.Module, name: str) -> nn.ModuleList:
    """The model's layers.

    Raises:
        RequestError: it is not made to be cut.
    """
    children = dict(model.named_children())
    blocks = children.get("blocks")
    if not isinstance(blocks, nn.ModuleList) or not {"embedding", "head"} <= children.keys():
        raise RequestError(
            f"workload.model.name: {name!r} cannot be cut into pipeline stages (needed: children `embedding`, `head` "
            f"and `blocks`, a ModuleList; it has {', '.join(children) or 'none'})"
        )
    return blocks


def _copies(
    model: nn.Module, plan: Sequence[range], placement: Sequence[int], mesh: Mesh
) -> tuple[dict[str, Sharing], dict[str, str]]:
    """Sharing and aliases of the parameters that both ends of the pipeline hold."""
    stage_of = {layer: stage for stage, layers in enumerate(plan) for layer in layers}
    names: dict[nn.Parameter, list[tuple[str, int]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append((name, _stage(name, stage_of, len(plan))))
    sharing: dict[str, Sharing] = {}
    aliases: dict[str, str] = {}
    for copies in names.values():
        places = {placement[stage] for _, stage in copies}
        if len(places) == 1:
            continue
        first, ends = copies[0][0], {0, len(plan) - 1}
        if not {stage for _, stage in copies} <= ends:
            where = ", ".join(f"{name} on stage {stage}" for name, stage in copies)
            raise RequestError(f"parameter {first} is shared by stages between the first and the last ({where})")
        own = [name for name, stage in copies if placement[stage] == mesh.pipeline.index]
        if own:
            sharing[own[0]] = Sharing(mesh.ends, 1 / len(places))
        if own and own[0] != first:
            aliases[own[0]] = first
    return sharing, aliases


def _stage(name: str, stage_of: Mapping[int, int], num_stages: int) -> int:
    """The stage that holds the parameter of this name."""
    child, _, rest = name.partition(".")
    if child == "blocks":
        return stage_of[int(rest.partition(".")[0])]
    if child not in CHILDREN:
        raise RequestError(f"parameter {name} is outside of embedding, blocks and head: no stage would hold it")
    return 0 if child == "embedding" else num_stages - 1


def _nothing(_: Inputs) -> dict[str, Any]:
    return {}
