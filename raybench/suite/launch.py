"""How the driver starts the workers of a job, whoever starts them for it: Ray or torchrun."""

from __future__ import annotations

from typing import Literal, Protocol

from raybench.suite.job import RankJob
from raybench.suite.placement import Placement
from raybench.worker.main import LOOP


class Launched(Protocol):
    """A job that was started."""

    def poll(self) -> str | None:
        """None while it runs; then how it ended: empty if well, else one line."""

    def wait(self, timeout: float) -> str | None:
        """Like `poll`, after waiting for the end at most `timeout` seconds."""

    def stop(self) -> None:
        """End all workers if they still run, and remove what starting them made. Returns within about 30 s."""


class Launcher(Protocol):
    """One way of starting jobs."""

    def start(self, job: RankJob, placement: Placement) -> Launched:
        """Have `raybench.worker.main.run` called on every rank of `job`; returns at once."""


def launcher(name: Literal["ray", "torchrun"], *, loop: str = LOOP) -> Launcher:
    """The launcher of that name. `loop` (`module:function`) is what every rank runs."""
    if name == "ray":
        from raybench.suite.launch_ray import RayLauncher

        return RayLauncher(loop=loop)
    from raybench.suite.launch_torchrun import TorchrunLauncher

    return TorchrunLauncher(loop=loop)
