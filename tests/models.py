"""Small models of one's own, each with something that strategies have been tripped by."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

VOCABULARY = 31
WIDTH = 12


class Small(nn.Module):
    """Embedding, one layer, projection; odd sizes throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.projection = nn.Linear(WIDTH, VOCABULARY)

    def hidden(self, input_ids: Tensor) -> Tensor:
        return torch.tanh(self.layer(self.embedding(input_ids)))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.projection(self.hidden(input_ids))


class Branches(Small):
    """Two branches; which one a micro-batch takes depends on its content, so that ranks differ."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(self, input_ids: Tensor) -> Tensor:
        branch = self.left if int(input_ids[0, 0]) % 2 else self.right
        return self.projection(branch(self.hidden(input_ids)))


class TurnByTurn(Small):
    """Two branches used in turn, forward pass by forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.turn = 0

    def forward(self, input_ids: Tensor) -> Tensor:
        branch = self.branches[self.turn % 2]
        self.turn += 1
        return self.projection(branch(self.hidden(input_ids)))


class UnusedOutput(Small):
    """A second head whose output the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.hidden(input_ids)
        self.extra(hidden)
        return self.projection(hidden)


class Frozen(Small):
    """A frozen layer, a one-element parameter, a parameter whose memory is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.layer.requires_grad_(False)
        self.temperature = nn.Parameter(torch.ones(1))
        self.offset = nn.Parameter(torch.zeros(()))
        self.turned = nn.Parameter(torch.randn(WIDTH, 7).t() @ torch.eye(WIDTH))
        self.turned.data = self.turned.data.t().contiguous().t()

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.hidden(input_ids)
        hidden = hidden + (hidden @ self.turned.t()).sum(-1, keepdim=True) * 0.1
        return self.projection(hidden) * self.temperature + self.offset * torch.linspace(-1, 1, VOCABULARY)


class Mixed(Small):
    """Matrices in bf16, norms in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.layer.to(torch.bfloat16)
        self.norm = nn.LayerNorm(WIDTH)

    def hidden(self, input_ids: Tensor) -> Tensor:
        return self.layer(self.norm(self.embedding(input_ids)).to(torch.bfloat16)).float()


class Buffers(Small):
    """A running mean that every forward pass in training changes, as batch norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.randn(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def hidden(self, input_ids: Tensor) -> Tensor:
        hidden = super().hidden(input_ids)
        self.mean.mul_(0.9).add_(hidden.detach().mean((0, 1)), alpha=0.1)
        self.count += 1
        return hidden


class _Sleep(torch.autograd.Function):
    """Takes a set time in forward and another in backward, and changes nothing."""

    @staticmethod
    def forward(ctx, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradient, None, None


class Sleepy(Small):
    """Takes set times, in forward longer on every rank but the first."""

    def __init__(self, forward_s: float, late_s: float, backward_s: float) -> None:
        super().__init__()
        late = dist.is_initialized() and dist.get_rank() > 0
        self.times = (forward_s + (late_s if late else 0), backward_s)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.projection(_Sleep.apply(self.hidden(input_ids), *self.times))
