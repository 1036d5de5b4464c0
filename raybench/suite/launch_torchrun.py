"""Jobs started by torchrun on this node: the same loop without Ray."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from raybench.suite import processes
from raybench.suite.job import RankJob
from raybench.suite.placement import Placement
from raybench.worker.main import LOOP, threads_per_rank

_ERROR = re.compile(r"(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)(?::.*)?)$")
WITNESSES_S = 10.0
"""How long what the ranks started may take to notice that they are gone."""


class TorchrunLauncher:
    """Starts jobs on this node by `torch.distributed.run`."""

    def __init__(self, *, loop: str = LOOP) -> None:
        self._loop = loop

    def start(self, job: RankJob, placement: Placement) -> TorchrunJob:
        return TorchrunJob(job, placement.num_ranks, self._loop)


class TorchrunJob:
    """A job under torchrun."""

    def __init__(self, job: RankJob, num_ranks: int, loop: str) -> None:
        self._end: str | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="raybench-torchrun-"))
        job_file = self._folder / "job.json"
        descriptor = os.open(job_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)  # it holds the sink's key
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(job.model_dump_json())
        self._log = self._folder / "log"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        command += [f"--nproc-per-node={num_ranks}", "--max-restarts=0"]
        command += [f"--log-dir={self._folder}", "-m", "raybench.worker.main"]  # else torchrun leaves a folder behind
        with self._log.open("wb") as log:
            self._torchrun = subprocess.Popen(
                [*command, str(job_file), loop],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={"OMP_NUM_THREADS": str(threads_per_rank(num_ranks)), **os.environ, **job.environment},
                start_new_session=True,
            )

    def poll(self) -> str | None:
        if self._end is None and (code := self._torchrun.poll()) is not None:
            self._end = self._describe(code)
        return self._end

    def wait(self, timeout: float) -> str | None:
        try:
            self._torchrun.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        return self.poll()

    def log(self) -> str:
        """The last 20,000 characters that torchrun and the ranks printed."""
        try:
            return self._log.read_text(encoding="utf-8", errors="replace")[-20_000:]
        except OSError:
            return ""

    def stop(self) -> None:
        if self._torchrun.poll() is None:
            started = processes.descendants(self._torchrun.pid)
            self._torchrun.kill()
            self._torchrun.wait()
            ranks = [process for process, parent in started if parent == self._torchrun.pid]
            for rank in ranks:
                processes.kill(rank)
            processes.end([process for process, _ in started], patience_s=WITNESSES_S)
        self.poll()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _describe(self, code: int) -> str:
        if code == 0:
            return ""
        if code < 0:
            return f"torchrun was ended by {signal.Signals(-code).name}"
        return f"torchrun ended with exit code {code}{self._first_error()}"

    def _first_error(self) -> str:
        """The first error in the log that is a rank's own, as `: …`."""
        for line in self.log().splitlines():
            match = _ERROR.match(line)
            if match and "ChildFailedError" not in line:
                return f": {match[1][:300]}"
        return ""
