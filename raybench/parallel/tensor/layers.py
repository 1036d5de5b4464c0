"""The layers that tensor parallelism puts in the place of whole ones, each under the name that it had.

Every layer says in `shards` how its parameters are cut, so that initial values and the gate see whole ones.
`sequence`: between the layers a rank holds a part of the sequence, [sequence / size, batch, width], instead of all.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from raybench.models.gpt import Attention, Embedding
from raybench.parallel.parts import Shard
from raybench.parallel.tensor.functions import column_products, drawn_apart, row_product
from raybench.worker.communication import Axis


class ColumnParallelLinear(nn.Linear):
    """This rank's part of the outputs of a linear layer, `interleaved` stacked blocks (query, key, value) each cut."""

    def __init__(
        self, whole: nn.Linear, axis: Axis, *, sequence: bool, label: str, interleaved: int = 1, copies: int = 1
    ) -> None:
        block = -(-whole.out_features // interleaved * copies // axis.size)
        super().__init__(
            whole.in_features, block * interleaved, bias=whole.bias is not None, device=whole.weight.device
        )
        self.axis = axis
        self.sequence = sequence
        self.label = label
        shard = Shard(0, whole.out_features, interleaved, copies)
        self.shards = {name: shard for name, _ in self.named_parameters()}

    def forward(self, input: Tensor) -> Tensor:
        (columns,) = column_products(
            input, [self.weight], [self.bias], self.axis, sequence=self.sequence, label=self.label
        )
        return columns


class RowParallelLinear(nn.Linear):
    """A linear layer over this rank's part of the inputs, summed over the ranks."""

    def __init__(self, whole: nn.Linear, axis: Axis, *, sequence: bool, label: str) -> None:
        bias = whole.bias is not None
        super().__init__(whole.in_features // axis.size, whole.out_features, bias=bias, device=whole.weight.device)
        self.axis = axis
        self.sequence = sequence
        self.label = label
        self.shards = {"weight": Shard(1, whole.in_features)}

    def forward(self, input: Tensor) -> Tensor:
        return row_product(input, self.weight, self.bias, self.axis, sequence=self.sequence, label=self.label)


class ParallelAttention(Attention):
    """Attention of this rank's heads. Key and value heads that are fewer than the ranks are held by several."""

    def __init__(self, whole: Attention, axis: Axis, *, sequence: bool, label: str) -> None:
        nn.Module.__init__(self)
        self.head_width, self.dropout, self.grouped = whole.head_width, whole.dropout, whole.grouped
        self.axis = axis
        self.sequence = sequence
        self.label = f"{label}.query_key_value"

        def column(name: str, interleaved: int, copies: int = 1) -> ColumnParallelLinear:
            linear = getattr(whole, name)
            own = f"{label}.{name}"
            return ColumnParallelLinear(
                linear, axis, sequence=sequence, label=own, interleaved=interleaved, copies=copies
            )

        if self.grouped:
            num_kv_heads = whole.key_value.out_features // (2 * whole.head_width)
            self.query = column("query", 1)
            self.key_value = column("key_value", 2, copies=max(1, axis.size // num_kv_heads))
        else:
            self.query_key_value = column("query_key_value", 3)
        self.projection = RowParallelLinear(whole.projection, axis, sequence=sequence, label=f"{label}.projection")

    def project(self, hidden: Tensor) -> tuple[Tensor, ...]:
        if not self.grouped:
            return super().project(hidden)
        query, key_value = column_products(
            hidden,
            [self.query.weight, self.key_value.weight],
            [self.query.bias, self.key_value.bias],
            self.axis,
            sequence=self.sequence,
            label=self.label,
        )
        return (query, *key_value.chunk(2, -1))

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.sequence:
            query, key, value = (part.transpose(0, 1) for part in (query, key, value))
        if self.training and self.dropout:
            with drawn_apart(self.axis, query.device):
                mixed = super().mix(query, key, value)
        else:
            mixed = super().mix(query, key, value)
        return mixed.transpose(0, 1).contiguous() if self.sequence else mixed


class SequenceEmbedding(Embedding):
    """Token plus position embedding of this rank's part of the sequence: ids [batch, sequence] to
    [sequence / size, batch, width]."""

    def __init__(self, token: nn.Embedding, position: nn.Embedding, axis: Axis) -> None:
        nn.Module.__init__(self)
        self.token = token
        self.position = position
        self.axis = axis

    def forward(self, input_ids: Tensor) -> Tensor:
        length = input_ids.shape[1] // self.axis.size
        own = self.position.weight.narrow(0, self.axis.index * length, length)
        embedded: Tensor = self.token(input_ids.t()) + own.unsqueeze(1)
        return embedded


class ShardedDropout(nn.Dropout):
    """Dropout where each rank holds another part of the activations: no two draw the same mask."""

    def __init__(self, p: float, axis: Axis) -> None:
        super().__init__(p)
        self.axis = axis

    def forward(self, input: Tensor) -> Tensor:
        if not (self.training and self.p):
            return input
        with drawn_apart(self.axis, input.device):
            return F.dropout(input, self.p)
