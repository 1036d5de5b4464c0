"""What torch.distributed.checkpoint has to know of flat shards: which stretch of which parameter a rank holds.

In a checkpoint every parameter is one row of numbers, by its full name, as is each tensor that the optimizer keeps for
it. A rank's shard is a stretch of several such rows, whatever its bucket: the layout that wrote them leaves no trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.optim import Optimizer

from raybench.parallel.strategy import Held

PARAMETER = "parameter"


@dataclass(frozen=True)
class Piece:
    """A stretch of one row."""

    key: str
    length: int
    """Of the whole row."""
    begin: int
    tensor: Tensor
    """[elements of the stretch], a view of what the strategy holds."""

    @property
    def index(self) -> MetadataIndex:
        return MetadataIndex(self.key, torch.Size([self.begin]))

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size([self.begin]), torch.Size([self.tensor.numel()]))


def optimizer_rows(optimizer: Optimizer, trained: nn.Parameter) -> dict[str, Tensor]:
    """The optimizer's tensors for `trained` with as many elements as it has, by name."""
    state = optimizer.state.get(trained, {})
    return {key: value for key, value in state.items() if isinstance(value, Tensor) and value.dim() > 0}


def pieces(held: Iterable[Held]) -> Iterator[Piece]:
    """Every stretch of parameters and optimizer state that this rank holds."""
    for one in held:
        rows = {PARAMETER: one.trained.detach(), **optimizer_rows(one.optimizer, one.trained)}
        end, row_begin = one.begin + one.trained.numel(), 0
        for name, length in one.parameters:
            first, last = max(one.begin, row_begin), min(end, row_begin + length)
            if first < last:
                for kind, row in rows.items():
                    stretch = row.view(-1)[first - one.begin : last - one.begin]
                    yield Piece(f"{kind}/{name}", length, first - row_begin, stretch)
            row_begin += length


class ShardSavePlanner(DefaultSavePlanner):
    """Writes each piece as a chunk of its row."""

    def __init__(self, held: Iterable[Piece]) -> None:
        super().__init__(flatten_state_dict=False)
        self._pieces = {piece.index: piece for piece in held}

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(piece) for piece in self._pieces.values()])

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._pieces[write_item.index].tensor


class ShardLoadPlanner(DefaultLoadPlanner):
    """Reads each piece from whatever chunks its row was written in."""

    def __init__(self, held: Iterable[Piece]) -> None:
        super().__init__(flatten_state_dict=False)
        self._pieces = {piece.index: piece for piece in held}

    def create_local_plan(self) -> LoadPlan:
        metadata = self.metadata
        assert isinstance(metadata, Metadata)
        items: list[ReadItem] = []
        for piece in self._pieces.values():
            row = metadata.state_dict_metadata[piece.key]
            assert isinstance(row, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(piece.key, row, [piece.chunk])
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index
        piece = self._pieces[MetadataIndex(index.fqn, index.offset)]
        return piece.tensor.narrow(0, read_item.dest_offsets[0], read_item.lengths[0])

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """It was read in place."""


def _write_item(piece: Piece) -> WriteItem:
    properties = TensorProperties.create_from_tensor(piece.tensor)
    data = TensorWriteData(chunk=piece.chunk, properties=properties, size=torch.Size([piece.length]))
    return WriteItem(index=piece.index, type=WriteItemType.SHARD, tensor_data=data)
