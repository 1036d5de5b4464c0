"""What tensor parallelism sends and keeps: theory, the recorder or the meter, and the machine itself, side by side.

    python -m tests.benchmarks.tensor traffic [RANKS]    in a network of its own (unshare, ip); needs root
    python -m tests.benchmarks.tensor memory [RANKS]

`traffic`: bytes of one step of all ranks together, on the loopback interface. `memory`: what one block more keeps on a
rank between forward and backward, in the resident set and as counted.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

from raybench.data.batches import Batches
from raybench.parallel.tensor.theory import Strategy, block_activation_bytes, block_traffic, step_traffic
from raybench.suite.track import Case, Layout, ModelConfig, Workload
from raybench.worker.build import build_strategy, make_context, optimizer_factory
from raybench.worker.memory import ActivationMeter
from raybench.worker.recorder import WIRE_FACTOR
from tests.pool import Pool, Rank

STRATEGIES: tuple[Strategy, ...] = ("megatron", "sequence")
WORKLOAD = Workload(
    model=ModelConfig(num_layers=4, width=512, num_heads=8, ffn_width=2048, vocabulary_size=50257),
    sequence_length=256,
    micro_batch_size=4,
)
NUM_STEPS = 5


def case(strategy: str, size: int) -> Case:
    return Case(name=strategy, layout=Layout(tensor=size), strategy={"tensor": strategy})


def sent_bytes() -> int:
    """What has left through the loopback interface since it came up."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def step_bytes(rank: Rank, workload: Workload, case: Case) -> tuple[Counter[str], Counter[str], float]:
    """Calls and payload of one step over the tensor axis by kind, and what the interface carried in a step."""
    mesh = rank.mesh(case.layout)
    assert mesh is not None
    strategy = build_strategy(workload, case, mesh, rank.device)
    batch = Batches(workload, 1).batch(0, 0)
    strategy.step(batch)
    mesh.all.barrier("begin")
    before = sent_bytes()
    for _ in range(NUM_STEPS):
        strategy.step(batch)
    mesh.all.barrier("end")
    carried = (sent_bytes() - before) / NUM_STEPS
    rank.recorder.operations.clear()
    with rank.recorder.recording(step=0):
        strategy.step(batch)
    calls: Counter[str] = Counter()
    payload: Counter[str] = Counter()
    for operation in rank.recorder.operations:
        if operation.axis == "tensor":
            calls[operation.kind] += 1
            payload[operation.kind] += operation.payload_bytes
    return calls, payload, carried


def kept_bytes(rank: Rank, workload: Workload, case: Case) -> tuple[int, int]:
    """Bytes that a forward pass keeps for backward: as the meter counts them, and by which the resident set grew."""
    mesh = rank.mesh(case.layout)
    assert mesh is not None
    context = make_context(workload, case, mesh, rank.device, optimizer_factory(workload.optimizer))
    micro_batch = Batches(workload, 1).batch(0, 0).micro_batches[0]

    def forward() -> object:
        return context.loss_sum(context.model, micro_batch.inputs, micro_batch.labels)

    with ActivationMeter(list(context.model.parameters())) as meter:
        kept = forward()
        counted = meter.live_bytes
    del kept
    before = resident_bytes()
    kept = forward()
    grown = resident_bytes() - before
    del kept
    return counted, grown


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def traffic(size: int) -> None:
    pool = Pool(size)
    for strategy in STRATEGIES:
        block = ", ".join(
            f"{t.calls} {kind} of {t.payload_bytes // t.calls:,} B"
            for kind, t in block_traffic(strategy, WORKLOAD).items()
        )
        print(f"{strategy} over {size} ranks; a block and micro-batch: {block}")
        calls, payload, carried = pool.run(step_bytes, WORKLOAD, case(strategy, size))[0]
        wire = 0.0
        for kind, expected in step_traffic(strategy, WORKLOAD, size).items():
            factor = WIRE_FACTOR[kind](size)
            wire += size * factor * expected.payload_bytes
            print(
                f"  {kind:<15} theory {expected.calls:>3} calls {expected.payload_bytes:>12,} B   "
                f"recorder {calls[kind]:>3} calls {payload[kind]:>12,} B"
            )
        print(f"  on the wire, all ranks: theory {wire:,.0f} B   interface {carried:,.0f} B   ({carried / wire:.4f})")
    pool.close()


def memory(size: int) -> None:
    pool = Pool(size)
    for strategy in STRATEGIES:
        kept = {}
        for num_layers in (2, 10):
            model = WORKLOAD.model.model_copy(update={"num_layers": num_layers, "vocabulary_size": 1024})
            workload = WORKLOAD.model_copy(update={"model": model})
            kept[num_layers] = pool.run(kept_bytes, workload, case(strategy, size))[0]
        counted, grown = ((more - few) / 8 for more, few in zip(kept[10], kept[2], strict=True))
        theory = block_activation_bytes(strategy, WORKLOAD, size)
        print(
            f"{strategy:<9} over {size} ranks: theory {theory:,} B a block   counted {counted:,.0f} B   "
            f"resident {grown:,.0f} B"
        )
    pool.close()


def main() -> None:
    what, size = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 2
    if what == "memory":
        # Freed blocks go back to the system at once, so that the resident set is what is held.
        if os.environ.get("MALLOC_MMAP_THRESHOLD_") is None:
            os.environ.update(MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="65536")
            os.execv(sys.executable, [sys.executable, "-m", "tests.benchmarks.tensor", *sys.argv[1:]])
        memory(size)
    elif os.environ.get("OWN_NETWORK") is None:
        command = f"ip link set lo up && OWN_NETWORK=1 exec {sys.executable} -m tests.benchmarks.tensor traffic {size}"
        os.execvp("unshare", ["unshare", "--net", "sh", "-c", command])
    else:
        traffic(size)


if __name__ == "__main__":
    main()
