"""Loss and accuracy on held-out data, whatever the strategy: all ranks together, while the window's clock stands still.

Every rank takes the whole model's parameters from the strategy into a model of its own and evaluates its share of the
samples: one way for all layouts, which needs room for one more copy of the parameters. Buffers keep the values that
the model begins with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raybench.data.batches import IGNORED_LABEL, Batches
from raybench.models.build import build_model, make_loss_sum
from raybench.parallel.strategy import Strategy
from raybench.suite.track import Workload
from raybench.worker.mesh import Mesh


@torch.no_grad()
def evaluate(
    workload: Workload, strategy: Strategy, mesh: Mesh, device: torch.device, *, num_samples: int
) -> dict[str, Any]:
    """Loss a valid token, and the share of them predicted right, over the first `num_samples` held-out sequences.

    Every rank of the case has to call; all get the same columns of `evaluations`. Training goes on as if nothing had
    been: the random state is put back. `accuracy` is None for a model whose outputs are not a score for each label.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        model = _copy(workload, strategy, device)
        own = range(mesh.all.index, num_samples, mesh.all.size)
        sums = _sums(workload, model, own, device)
    parts = mesh.all.gather_objects(sums)
    loss, correct, tokens = (sum(part[index] for part in parts) for index in range(3))
    scored = all(part[3] for part in parts)
    return {"loss": loss / tokens, "accuracy": correct / tokens if scored else None, "num_samples": num_samples}


def _copy(workload: Workload, strategy: Strategy, device: torch.device) -> nn.Module:
    """The model as it is trained so far; what is not trained is as the first rank made it."""
    plain = workload.model_copy(update={"recompute": "none", "compile": False})
    model = build_model(plain, device, workload.seed)
    parameters = dict(model.named_parameters())
    for name, value in strategy.full_parameters():
        parameters[name].copy_(value)
    return model.eval()


def _sums(
    workload: Workload, model: nn.Module, samples: Sequence[int], device: torch.device
) -> tuple[float, int, int, bool]:
    """Summed loss, tokens predicted right, tokens, and whether the outputs tell a prediction."""
    source = Batches(workload, 1)
    loss_sum = make_loss_sum(model, workload.precision)
    loss, correct, tokens, scored = 0.0, 0, 0, True
    for begin in range(0, len(samples), workload.micro_batch_size):
        batch = source.held_out(samples[begin : begin + workload.micro_batch_size]).to(device)
        outputs: list[Any] = []

        def forward(outputs: list[Any] = outputs, **inputs: Tensor) -> Any:
            outputs.append(model(**inputs))
            return outputs[0]

        loss += float(loss_sum(forward, batch.inputs, batch.labels))
        valid = batch.labels != IGNORED_LABEL
        tokens += int(valid.sum())
        scores = outputs[0]
        scored = scored and isinstance(scores, Tensor) and scores.shape[:-1] == batch.labels.shape
        if scored:
            correct += int(((scores.argmax(-1) == batch.labels) & valid).sum())
    return loss, correct, tokens, scored
