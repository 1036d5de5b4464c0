"""Over 200 steps every strategy learns what one process learns, and what it learns holds on text it has not seen."""

from __future__ import annotations

import numpy as np
import pytest

from raybench.analysis.curves import BOUND
from raybench.data.batches import Batches
from raybench.suite.track import Case, DataConfig, ModelConfig, Workload
from raybench.worker.build import build_strategy
from raybench.worker.evaluate import evaluate
from tests.hub import classified
from tests.pool import Rank

NUM_STEPS = 200
NUM_HELD_OUT = 400
CHANCE = 0.2
LEAST_ACCURACY = 0.6
"""Three times chance: five standard deviations of 400 samples at chance are 0.1."""
SIZES = {"num_layers": 4, "width": 48, "num_heads": 4, "ffn_width": 96, "vocabulary_size": 512}
MODELS = {
    "distilbert": ModelConfig(name="distilbert", **SIZES, options={"max_position_embeddings": 64}),
    "llama": ModelConfig(name="llama", **SIZES, num_kv_heads=2, task="classification"),
}
LEARNING_RATES = {"distilbert": 1e-3, "llama": 2e-4}
"""Both learn within the steps. At higher rates training amplifies rounding: from 5e-4 on the small Llama lets a
difference in the last place grow tenfold every 20 steps."""
STRATEGIES = {  # those that these models run
    "data": ("naive", "accumulated", "hooked", "overlapped", "bucketed", "zero1", "zero2", "zero3"),
    "pipeline": ("naive", "gpipe", "one-f-one-b", "interleaved", "zero-bubble", "zero-bubble-v"),
    "tensor": ("megatron",),
}
CASES = {
    "single": Case(name="single"),
    **{
        f"{axis} {name}": Case(name=name, layout={axis: 2}, strategy={axis: name})
        for axis, names in STRATEGIES.items()
        for name in names
    },
}


def workload(name: str, data_size: int) -> Workload:
    return classified(
        MODELS[name],
        sequence_length=64,
        micro_batch_size=8,
        num_micro_batches=4 // data_size,
        optimizer={"learning_rate": LEARNING_RATES[name]},
        data=DataConfig(name="reviews", num_samples=3200),
    )


def train(rank: Rank, work: Workload, one: Case) -> tuple[list[float], float] | None:
    """The loss of every step, and the accuracy on held-out reviews at the end."""
    mesh = rank.mesh(one.layout)
    if mesh is None:
        return None
    strategy = build_strategy(work, one, mesh, rank.device)
    source = Batches(work, one.layout.data)
    losses = [float(strategy.step(source.batch(step, mesh.data.index))) for step in range(NUM_STEPS)]
    accuracy = evaluate(work, strategy, mesh, rank.device, num_samples=NUM_HELD_OUT)["accuracy"]
    strategy.close()
    return losses, accuracy


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MODELS)
def test_all_strategies_learn_alike_and_well_above_chance(pools, name):
    curves, accuracies = {}, {}
    for case_name, one in CASES.items():
        results = pools(2).run(train, workload(name, one.layout.data), one, timeout_s=280)
        curves[case_name], accuracies[case_name] = results[0]
    control = np.array(curves["single"])
    deviations = {
        case_name: float(np.sqrt(np.mean((np.array(curve) - control) ** 2) / np.mean(control**2)))
        for case_name, curve in curves.items()
    }
    print(f"{name}: accuracy {accuracies} (chance {CHANCE}); deviation from the single process {deviations}")
    assert all(accuracy >= LEAST_ACCURACY for accuracy in accuracies.values()), accuracies
    assert all(deviation <= BOUND for deviation in deviations.values()), deviations
    assert control[-20:].mean() < 0.6 * control[:20].mean()
