"""The gate fails every strategy that has a fault, and names the worst parameter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from raybench.data.batches import Batch, Batches
from raybench.parallel.data.accumulated import Accumulated
from raybench.parallel.data.bucketed import Bucketed
from raybench.parallel.data.hooked import Hooked
from raybench.parallel.data.replicated import gradient
from raybench.worker.gate import GateResult
from tests.gating import data_case, gate, ragged, workload
from tests.pool import Rank

FORGOTTEN = "blocks.1.feed_forward.expansion.weight"
HEAD = "head.projection.weight"


class OneNotReduced(Accumulated):
    def reduce_gradients(self) -> None:
        for name, parameter in self.parameters.items():
            if name != FORGOTTEN:
                self.axis.all_reduce(gradient(parameter), label=name).wait()


class Averaged(Accumulated):
    """A mean over ranks of gradients that were already scaled by the global number of tokens."""

    def reduce_gradients(self) -> None:
        super().reduce_gradients()
        for parameter in self.parameters.values():
            gradient(parameter).div_(self.axis.size)


class BoundaryOffByOne(Bucketed):
    """Each bucket's last element is left out of what is sent."""

    def _send(self, bucket) -> None:
        for parameter in bucket.views:
            bucket.take(parameter)
        bucket.pending = self.axis.all_reduce(bucket.gradient[:-1], label=bucket.label)


class HookNeverFires(Hooked):
    """One hook is lost, and nobody else sends its gradient."""

    def send(self, name: str) -> None:
        if name != FORGOTTEN:
            super().send(name)


class NotBroadcast(Accumulated):
    def _broadcast_state(self) -> None:
        pass


class OneStepMissingEverywhere(Accumulated):
    """The second optimizer step is left out."""

    steps = 0

    def is_at_fault(self) -> bool:
        return True

    def update(self) -> None:
        self.steps += 1
        if self.steps != 2 or not self.is_at_fault():
            super().update()
            return
        for optimizer in self.optimizers:
            optimizer.step = lambda: None
        super().update()
        for optimizer in self.optimizers:
            del optimizer.step


class OneStepMissing(OneStepMissingEverywhere):
    """Only the second rank leaves it out."""

    def is_at_fault(self) -> bool:
        return self.axis.index == 1


class ClippedByLocalNorm(Accumulated):
    """Clips before reducing, by each rank's own norm."""

    def reduce_gradients(self) -> None:
        gradients = [g for tensors in self.gradients().values() for g in tensors]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        torch._foreach_mul_(gradients, (0.05 / norm).clamp(max=1.0))
        super().reduce_gradients()


class LocalMean(Accumulated):
    """Each rank takes the mean over its own tokens, then the ranks are averaged: a mean of means."""

    def step(self, batch: Batch) -> torch.Tensor:
        own = sum(int((m.labels != -100).sum()) for m in batch.micro_batches)
        return super().step(replace(batch, num_tokens=own * self.axis.size))


class LocalLoss(Accumulated):
    """Right gradients, but each rank shows the loss of its own tokens."""

    def step(self, batch: Batch) -> torch.Tensor:
        super().step(batch)
        with torch.no_grad():
            summed = [self.context.loss_sum(self.model, m.inputs, m.labels) for m in batch.micro_batches]
        return torch.stack(summed).sum() / batch.num_tokens


class OtherOrder(Batches):
    """The second rank trains on the next step's data."""

    def batch(self, step: int, data_index: int) -> Batch:
        return super().batch(step + data_index, data_index)


FAULTS = {
    OneNotReduced: (FORGOTTEN, "gradient of"),
    Averaged: (None, "gradient of"),
    BoundaryOffByOne: (None, "gradient of"),
    HookNeverFires: (FORGOTTEN, "gradient of"),
    NotBroadcast: (None, "gradient of"),
    OneStepMissing: (None, "update of"),
    OneStepMissingEverywhere: (None, "update of"),
    ClippedByLocalNorm: (None, "gradient of"),
    LocalMean: (None, "gradient of"),
    LocalLoss: ("", "loss is not the same"),
}


def run_fault(rank: Rank, fault: type, work) -> GateResult | None:
    options = {"bucket_mib": 0.002} if issubclass(fault, Bucketed) else {}
    case = data_case("bucketed" if options else "accumulated", 2, **options)
    return gate(rank, work, case, make=fault)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_fault_is_found_and_named(pools, fault):
    parameter, words = FAULTS[fault]
    results = pools(2).run(run_fault, fault, workload(num_micro_batches=2, data=ragged(2)))
    assert results[0] == results[1]
    assert not results[0].passed
    assert words in results[0].reason
    if parameter == "":
        return
    assert results[0].worst_parameter in results[0].reason
    if parameter is not None:
        assert results[0].worst_parameter == parameter


def run_other_order(rank: Rank) -> GateResult | None:
    return gate(rank, workload(), data_case("bucketed", 2), batches=OtherOrder)


def test_other_data_order_is_found(pools):
    result = pools(2).run(run_other_order)[0]
    assert not result.passed
    assert "gradient of" in result.reason
    assert result.worst_parameter is not None
