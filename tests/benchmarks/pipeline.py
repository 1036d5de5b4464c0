"""Every schedule and its torch peer on the timed model: step, bubble, and what the schedule's own simulation allows.

    python -m tests.benchmarks.pipeline [ROUNDS] [STEPS]
    python -m tests.benchmarks.pipeline gpt [ROUNDS] [STEPS]

The first: 4 ranks over gloo; forward, input gradient and weight gradient of a rank's layers take 20 ms each; 8
micro-batches; activations of 4 x 128 x 768 fp32. The second: a real GPT on two ranks with a thread each, 1F1B against
torch's, in tokens a second. Cases alternate round by round.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import asdict
from typing import Any

import pandas as pd

from raybench.analysis.bubble import COLUMNS, bubble_of
from raybench.analysis.statistics import median_interval
from raybench.data.batches import Batches
from raybench.parallel.pipeline.plan import TWINS, make_plan
from raybench.parallel.strategy import Strategy
from raybench.suite.track import Case, ModelConfig, Workload
from raybench.worker import cores
from raybench.worker.build import build_strategy
from raybench.worker.channel import waits_for_peer
from raybench.worker.clock import ClockOffset
from raybench.worker.heap import keep_freed_memory
from tests.pool import Pool, Rank

PAIRS = {
    "naive": None,
    "gpipe": "torch-gpipe",
    "one-f-one-b": "torch-1f1b",
    "interleaved": "torch-interleaved",
    "zero-bubble": "torch-zero-bubble",
    "zero-bubble-v": "torch-zbv",
}
"""Schedules by hand, and the peer that each is held against."""
NUM_LAYERS = 8
RANK_MS = 20.0
SGD = {"name": "sgd", "learning_rate": 1e-3, "weight_decay": 0.0}
TIMED = Workload(
    model=ModelConfig(
        name="timed",
        num_layers=NUM_LAYERS,
        width=768,
        ffn_width=64,
        vocabulary_size=64,
        options={f"{part}_ms": RANK_MS * 4 / NUM_LAYERS for part in ("forward", "input_gradient", "weight_gradient")},
    ),
    sequence_length=128,
    micro_batch_size=4,
    num_micro_batches=8,
    optimizer=SGD,
)
GPT = Workload(
    model=ModelConfig(num_layers=8, width=256, num_heads=4, ffn_width=1024, vocabulary_size=2048),
    sequence_length=128,
    micro_batch_size=4,
    num_micro_batches=8,
)
Built = dict[str, Strategy]


def case_of(name: str, size: int) -> Case:
    return Case(name="case", layout={"pipeline": size}, strategy={"pipeline": name})


def settle(rank: Rank) -> None:
    """Keep to a core of one's own, or to one shared, and keep freed memory, as ranks of a suite do."""
    keep_freed_memory()
    cores.pin(cores.share_of(cores.available(), rank.rank, rank.world_size))


def window(rank: Rank, work: Workload, name: str, num_steps: int) -> tuple[float, list[dict[str, Any]]]:
    """Mean step in seconds, and the operations of two instrumented steps."""
    case = case_of(name, rank.world_size)
    mesh = rank.mesh(case.layout)
    assert mesh is not None
    strategy = build_strategy(work, case, mesh, rank.device)
    batches = [Batches(work, 1).batch(step, 0) for step in range(3)]
    for batch in batches[:2]:
        strategy.step(batch)
    mesh.all.barrier("before the window")
    begin = time.perf_counter()
    for index in range(num_steps):
        strategy.step(batches[index % 3])
    step_s = (time.perf_counter() - begin) / num_steps
    recorder = rank.recorder
    recorder.operations.clear()
    recorder.spans.found.clear()
    if strategy.instrument():
        for step in range(2):
            mesh.all.barrier("before the step")
            with recorder.recording(step):
                strategy.step(batches[step])
    waits = waits_for_peer(recorder.operations, mesh.pipeline, ClockOffset(0, 0))
    rows = [{**asdict(o), "rank": rank.rank, "wait_ns": waits.get(o.sequence)} for o in recorder.operations]
    rows += [{**asdict(span), "rank": rank.rank} for span in recorder.spans.found]
    strategy.close()
    return step_s, rows


def schedules(pool: Pool, num_rounds: int, num_steps: int) -> None:
    names = [name for pair in PAIRS.items() for name in pair if name is not None]
    steps: dict[str, list[float]] = {name: [] for name in names}
    rows: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in names}
    for _ in range(num_rounds):
        for name in names:
            results = pool.run(window, TIMED, name, num_steps, timeout_s=300)
            steps[name].append(max(step for step, _ in results))
            rows[name].append([row for _, of_rank in results for row in of_rank])
    print(f"{'schedule':<16}{'theory':>8}{'simul.':>8}{'meas.':>8}{'sim. s':>9}{'meas. s':>9}{'ratio':>7}", end="")
    print(f"{'step s':>9}{'torch s':>9}{'torch/ours':>11}")
    for name, peer in PAIRS.items():
        schedule = make_plan(case_of(name, 4), TIMED).schedule
        found = [bubble_of(schedule, pd.DataFrame(of_round, columns=list(COLUMNS))) for of_round in rows[name]]
        theory, simulated, measured, simulated_s, measured_s = (
            statistics.median(values) for values in zip(*(vars(b).values() for b in found), strict=True)
        )
        ours = statistics.median(steps[name])
        theirs = statistics.median(steps[peer]) if peer else float("nan")
        print(
            f"{name:<16}{theory:>8.3f}{simulated:>8.3f}{measured:>8.3f}{simulated_s:>9.4f}{measured_s:>9.4f}"
            f"{measured_s / simulated_s:>7.3f}{ours:>9.4f}{theirs:>9.4f}{theirs / ours:>11.3f}",
            flush=True,
        )


def gpt(pool: Pool, num_rounds: int, num_steps: int) -> None:
    tokens = GPT.micro_batch_size * GPT.num_micro_batches * GPT.sequence_length
    ours, theirs = "one-f-one-b", "torch-1f1b"
    assert TWINS[theirs] == ours
    rates: dict[str, list[float]] = {ours: [], theirs: []}
    for index in range(num_rounds):
        for name in [ours, theirs] if index % 2 else [theirs, ours]:
            results = pool.run(window, GPT, name, num_steps, timeout_s=300)
            rates[name].append(tokens / max(step for step, _ in results))
    ratios = [a / b for a, b in zip(rates[ours], rates[theirs], strict=True)]
    interval = median_interval(ratios)
    assert interval is not None
    for name, values in rates.items():
        print(f"{name:<14}{statistics.median(values):>10.0f} tokens/s")
    print(f"ours / torch {interval.value:.3f} ({interval.low:.3f} to {interval.high:.3f})")


def main() -> None:
    arguments = sys.argv[1:]
    is_gpt = arguments[:1] == ["gpt"]
    numbers = [int(text) for text in arguments[is_gpt:]]
    num_rounds, num_steps = (*numbers, *(5, 5)[len(numbers) :])
    pool = Pool(2 if is_gpt else 4)
    try:
        pool.run(settle)
        (gpt if is_gpt else schedules)(pool, num_rounds, num_steps)
    finally:
        pool.close()


if __name__ == "__main__":
    main()
