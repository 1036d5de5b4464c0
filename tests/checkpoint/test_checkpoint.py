"""A checkpoint of one layout goes on under another as if nothing had happened, or says why it cannot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from raybench import checkpoint
from raybench.data.batches import Batches
from raybench.errors import RequestError
from raybench.parallel.strategy import Strategy
from raybench.suite.track import Layout, Workload
from raybench.worker.build import build_control, build_strategy
from tests.gating import TINY, data_case, workload
from tests.pool import Rank

SEQUENCES = 12
"""Of a global batch, whatever the layout."""
SCHEDULE = {"schedule": "cosine", "warmup_steps": 1, "schedule_steps": 8}


def work_of(size: int, **changes: object) -> Workload:
    return workload(
        TINY.model_copy(update={"tied_head": True}),
        micro_batch_size=1,
        num_micro_batches=SEQUENCES // size,
        clip_gradient_norm=0.5,
        optimizer=SCHEDULE,
        **changes,
    )


def build(rank: Rank, strategy: str, size: int, work: Workload) -> Strategy | None:
    options = {"num_shards": 2} if strategy == "hybrid-sharded" else {}
    options |= {"bucket_mib": 0.003} if strategy in ("zero1", "zero2", "bucketed") else {}
    case = data_case(strategy, size, **options)
    mesh = rank.mesh(case.layout, options.get("num_shards"))
    return None if mesh is None else build_strategy(work, case, mesh, rank.device)


def train(strategy: Strategy, work: Workload, size: int, index: int, steps: range) -> list[float]:
    source = Batches(work, size)
    return [float(strategy.step(source.batch(step, index))) for step in steps]


def save_and_go_on(rank: Rank, strategy: str, size: int, folder: Path) -> list[float] | None:
    work = work_of(size)
    built = build(rank, strategy, size, work)
    if built is None:
        return None
    train(built, work, size, rank.rank, range(2))
    checkpoint.save(built, folder, step=2, axis=built.context.mesh.all)
    losses = train(built, work, size, rank.rank, range(2, 5))
    built.close()
    return losses


def resume(rank: Rank, strategy: str, size: int, folder: Path) -> tuple[int, list[float]] | None:
    work = work_of(size, seed=8)  # other values to begin with
    built = build(rank, strategy, size, work)
    if built is None:
        return None
    step = checkpoint.load(built, folder, axis=built.context.mesh.all)
    losses = train(built, work_of(size), size, rank.rank, range(step, 5))
    built.close()
    return step, losses


@pytest.mark.parametrize(
    ("saved", "size", "resumed", "new_size"),
    [
        ("zero1", 4, "zero3", 2),
        ("zero3", 3, "zero1", 4),
        ("zero2", 2, "bucketed", 3),
        ("bucketed", 2, "hybrid-sharded", 4),
        ("hybrid-sharded", 4, "zero2", 3),
    ],
)
def test_another_layout_goes_on_with_the_same_loss(pools, tmp_path, saved, size, resumed, new_size):
    expected = pools(4).run(save_and_go_on, saved, size, tmp_path)[0]
    for result in pools(4).run(resume, resumed, new_size, tmp_path)[:new_size]:
        step, losses = result
        assert step == 2
        assert losses == pytest.approx(expected, rel=1e-5)


def alone(folder: Path, work: Workload, *, steps: int) -> None:
    """One process trains and saves."""
    rank = Rank(0, 1)
    control = build_control(work, 0, rank.device, rank.recorder)
    train(control, work, 1, 0, range(steps))
    checkpoint.save(control, folder, step=steps, axis=control.context.mesh.all)


def load_alone(folder: Path, work: Workload) -> int:
    rank = Rank(0, 1)
    control = build_control(work, 0, rank.device, rank.recorder)
    return checkpoint.load(control, folder, axis=control.context.mesh.all)


KILLED = """
import os, sys
from pathlib import Path
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from tests.checkpoint.test_checkpoint import alone, work_of

def finish(*_, **__):
    os._exit(9)

FileSystemWriter.finish = finish
alone(Path(sys.argv[1]), work_of(1), steps=2)
"""


def test_a_save_that_is_killed_leaves_the_last_good_one(tmp_path):
    alone(tmp_path, work_of(1), steps=1)
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=Path(__file__).parents[2], check=False)
    assert killed.returncode == 9
    assert [p.name for p in sorted(tmp_path.iterdir())] == [".step-000000002.unfinished", "step-000000001"]
    assert list((tmp_path / ".step-000000002.unfinished").glob("*.distcp"))
    assert load_alone(tmp_path, work_of(1)) == 1
    alone(tmp_path, work_of(1), steps=2)  # what is left of it is in nobody's way
    assert load_alone(tmp_path, work_of(1)) == 2


def test_what_cannot_be_loaded_is_named(tmp_path):
    with pytest.raises(RequestError, match=r"holds no complete one"):
        load_alone(tmp_path, work_of(1))
    alone(tmp_path, work_of(1), steps=1)
    other = workload(TINY.model_copy(update={"tied_head": True, "ffn_width": 32}))
    with pytest.raises(RequestError, match=r"another model: blocks\.0\.feed_forward\.expansion\.weight has 384 .* 512"):
        load_alone(tmp_path, other)
    data = next((tmp_path / "step-000000001").glob("*.distcp"))
    content = data.read_bytes()
    data.write_bytes(content[: len(content) // 2])
    with pytest.raises(RequestError, match=rf"{data.name}' is cut short: {len(content) // 2} bytes"):
        load_alone(tmp_path, work_of(1))
    data.unlink()
    with pytest.raises(RequestError, match=rf"{data.name}' is missing"):
        load_alone(tmp_path, work_of(1))
    (tmp_path / "step-000000001" / ".metadata").write_bytes(b"\x80")
    with pytest.raises(RequestError, match=r"cannot be read"):
        load_alone(tmp_path, work_of(1))


def refused(rank: Rank) -> str:
    work = workload()
    case = data_case("torch-fsdp2", 2)
    built = build_strategy(work, case, rank.mesh(Layout(data=2)), rank.device)
    with pytest.raises(RequestError) as caught:
        checkpoint.save(built, Path("nowhere"), step=0, axis=built.context.mesh.all)
    return str(caught.value)


def test_a_peer_is_refused(pools):
    for message in pools(2).run(refused):
        assert "FSDP2 cannot be saved (allowed: hand-written data strategies)" in message
