"""Real jobs whose loop is one of `tests.worker.loops`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from raybench.suite.job import Job, RoundKey
from raybench.suite.launch import Launched, Launcher
from raybench.suite.placement import Placement
from raybench.suite.sink import Sink
from raybench.suite.track import Case, Layout, Measure, ResolvedTrack, StrategyNames, Workload
from raybench.worker.messages import Farewell, Hello, Message, RankFailed, RankLost

ROOT = Path(__file__).parents[2]
NUM_RANKS = 2
DRAIN_S = 10.0
"""How long the last words of a job's ranks may take after its end."""
ANYWHERE = Placement(num_ranks=NUM_RANKS, cpus_per_rank=0.5)


def make_job(
    sink: Sink, *, timeout_s: int = 600, environment: dict[str, str] | None = None, with_nsys: bool = False
) -> Job:
    case = Case(name="one", layout=Layout(data=NUM_RANKS), strategy=StrategyNames(data="naive"))
    return Job(
        suite_id="test",
        attempt=1,
        track=ResolvedTrack(
            track="t",
            title="t",
            question="t",
            scale="smoke",
            workload=Workload(),
            measure=Measure(timeout_s=timeout_s),
            cases=(case,),
        ),
        rounds=(RoundKey(case="one", round=0),),
        world_size=NUM_RANKS,
        sink_address=sink.address,
        sink_key=sink.key,
        environment=environment or {},
        with_nsys=with_nsys,
    )


@dataclass
class Story:
    """What a job's ranks said, and how it ended."""

    messages: list[Message] = field(default_factory=list)
    ending: str | None = None
    seconds: float = 0.0
    """From the last hello to the end."""

    @property
    def failures(self) -> dict[int, RankFailed]:
        return {m.rank: m for m in self.messages if isinstance(m, RankFailed)}

    @property
    def culprits(self) -> list[int]:
        return sorted(m.rank for m in self.failures.values() if m.culprit)

    @property
    def is_told(self) -> bool:
        """Whether every rank that came has told its end."""
        ended = {m.rank for m in self.messages if isinstance(m, Farewell | RankFailed | RankLost)}
        return {m.rank for m in self.messages if isinstance(m, Hello)} <= ended

    def of(self, kind: type) -> list[Message]:
        return [message for message in self.messages if isinstance(message, kind)]


@contextmanager
def started(launcher: Launcher, placement: Placement = ANYWHERE, **options: object) -> Iterator[tuple[Sink, Launched]]:
    """A job that runs; it is stopped at the end."""
    with Sink() as sink:
        launched = launcher.start(
            make_job(sink, **options),  # type: ignore[arg-type]
            placement,
        )
        try:
            yield sink, launched
        finally:
            launched.stop()


def play(launcher: Launcher, placement: Placement = ANYWHERE, *, limit_s: float = 90, **options: object) -> Story:
    """Run a job as a driver would: the first failure stops the rest."""
    story = Story()
    with started(launcher, placement, **options) as (sink, launched):
        deadline = time.monotonic() + limit_s
        stopped = False
        here_s = time.monotonic()
        while (ending := launched.poll()) is None:
            assert time.monotonic() < deadline, f"still running after {limit_s:g} s: {story.messages}"
            message = sink.get(0.1)
            if message is None:
                continue
            story.messages.append(message)
            if isinstance(message, Hello):
                here_s = time.monotonic()
            if isinstance(message, RankFailed | RankLost) and not stopped:
                stopped = True
                sink.stop_ranks("another rank failed")
        story.seconds = time.monotonic() - here_s
        story.ending = ending
        patience = time.monotonic() + DRAIN_S
        while (message := sink.get(0.5)) is not None or not (story.is_told or time.monotonic() > patience):
            story.messages += [] if message is None else [message]
    return story


def wait_for_hellos(sink: Sink, *, limit_s: float = 60) -> list[int]:
    """The process ids of all ranks, once all are there."""
    found: dict[int, int] = {}
    deadline = time.monotonic() + limit_s
    while len(found) < NUM_RANKS:
        assert time.monotonic() < deadline, f"only {len(found)} ranks are there after {limit_s:g} s"
        message = sink.get(0.5)
        if isinstance(message, Hello):
            found[message.rank] = message.pid
    return list(found.values())


def eventually(condition: Callable[[], bool], *, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not so after {limit_s:g} s"
        time.sleep(0.05)


@pytest.fixture(scope="session", autouse=True)
def _ranks_find_the_tests() -> Iterator[None]:
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([before] if before else [])])
    yield
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before
