"""What `run`, `run-all` and `verify` were asked for, checked before anything starts."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast

from raybench.errors import RequestError, unknown
from raybench.suite.catalog import Target
from raybench.suite.numbers import whole_number
from raybench.suite.track import ResolvedTrack, Scale
from raybench.suite.track_file import SCALES

LauncherName = Literal["ray", "torchrun"]
LAUNCHERS = ("ray", "torchrun")
DEFAULT_TRACED_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Request:
    """One suite, as it was asked for."""

    targets: tuple[Target, ...]
    results: str
    scale: Scale | None = None
    """None: by the cluster."""
    settings: tuple[str, ...] = ()
    """`key=value` laid over every track."""
    budget_s: float | None = None
    resume: str | None = None
    """None: a new suite; empty: the newest of the same request; else a suite_id."""
    force: bool = False
    launcher: LauncherName = "ray"
    peers: bool = True
    nccl_env: Mapping[str, str] = field(default_factory=dict)
    verify_only: bool = False
    trace_steps: int = 0
    """Steps to trace of every case; 0: none."""
    with_nsys: bool = False

    def tracks(self, scale: Scale) -> list[tuple[ResolvedTrack, tuple[str, ...]]]:
        """Every track at `scale` with the cases asked for, and the names of those asked for one by one."""
        found = []
        for target in self.targets:
            resolved = target.track.resolve(scale, self.settings)
            if target.cases is not None:
                chosen = tuple(resolved.case(name) for name in target.cases)
                resolved = resolved.model_copy(update={"cases": chosen})
            found.append((resolved, target.cases or ()))
        return found

    def check(self) -> None:
        """Refuse what is wrong at any scale that this request may run at.

        Raises:
            RequestError: in one sentence.
        """
        if not self.targets:
            raise RequestError("TRACK: none is named (see raybench list)")
        if self.force and self.resume is None:
            raise RequestError("--force: says that --resume may mix code or versions, and --resume is not given")
        self._check_settings()
        self._check_nsys()
        scales: Sequence[Scale] = ("smoke", "full") if self.scale is None else (self.scale,)
        for scale in scales:
            self.tracks(scale)

    def _check_settings(self) -> None:
        values: dict[str, str] = {}
        for setting in self.settings:
            key, _, value = setting.partition("=")
            if (other := values.setdefault(key, value)) != value:
                raise RequestError(
                    f"--set: {key} is set to {other} and to {value} (--steps, --warmup, --repeats and --timeout-s set "
                    "keys of measure, too)"
                )

    def _check_nsys(self) -> None:
        if not self.with_nsys:
            return
        if self.launcher != "ray":
            raise RequestError(f"--nsys: Ray starts nsys around its workers, and --launcher is {self.launcher}")
        if shutil.which("nsys") is None:
            raise RequestError("--nsys: no nsys on PATH (install NVIDIA Nsight Systems on every node, or use --trace)")
        if os.environ.get("RAY_ADDRESS", "local") == "local" and "RAY_TMPDIR" not in os.environ:
            raise RequestError(
                "--nsys: RAY_TMPDIR is not set, and without it Ray's folder goes at the end, reports too"
            )

    def record(self, scale: Scale) -> dict[str, Any]:
        """What makes two requests the same, as plain data; time limits do not."""
        return {
            "tracks": [
                track.model_dump(mode="json", exclude={"measure": {"timeout_s"}}) for track, _ in self.tracks(scale)
            ],
            "peers": self.peers,
            "launcher": self.launcher,
            "nccl_env": dict(self.nccl_env),
            "verify_only": self.verify_only,
        }


def traced_steps(trace: str | None, *, with_nsys: bool) -> int:
    """Steps that `--trace`, `--trace=N` or `--nsys` ask for."""
    if trace is None:
        return DEFAULT_TRACED_STEPS if with_nsys else 0
    return whole_number("--trace", 1)(trace) if trace else DEFAULT_TRACED_STEPS


def measure_settings(
    *, steps: int | None, warmup: int | None, repeats: int | None, timeout_s: int | None
) -> tuple[str, ...]:
    """The track's keys that `--steps`, `--warmup`, `--repeats` and `--timeout-s` stand for."""
    given = {"num_steps": steps, "num_warmup_steps": warmup, "num_rounds": repeats, "timeout_s": timeout_s}
    return tuple(f"measure.{key}={value}" for key, value in given.items() if value is not None)


def check_scale(text: str | None) -> Scale | None:
    if text not in (None, *SCALES):
        raise unknown("--scale", text, SCALES)
    return cast("Scale | None", text)


def check_launcher(text: str) -> LauncherName:
    if text not in LAUNCHERS:
        raise unknown("--launcher", text, LAUNCHERS)
    return cast("LauncherName", text)


def inside_ray_job() -> bool:
    """Whether this is the entrypoint of a submitted Ray job, whose working directory is thrown away."""
    return bool(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or os.environ.get("RAY_JOB_SUBMISSION_ID"))


def default_results() -> str:
    """Where rows go when nothing is said."""
    return str(Path.home() / "raybench" / "results") if inside_ray_job() else "results"


def new_suite_id() -> str:
    """Sorts by time, and is never the same twice."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
