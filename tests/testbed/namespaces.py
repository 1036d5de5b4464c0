"""Processes in namespaces of their own, commands and listening sockets inside them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
HERE = Path(__file__).parent
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CLONE_NEWNET = 0x40000000


def why_unavailable(*packages: str) -> str | None:
    """The reason that hosts, or the programs of those packages, cannot be had here, or None."""
    if os.geteuid() != 0:
        return "needs root"
    try:
        subprocess.run(
            ["sh", str(HERE / "setup.sh"), *packages], check=True, capture_output=True, text=True, timeout=300
        )
        script = "mount -t tmpfs x /mnt && mkdir /mnt/u /mnt/w /mnt/m && "
        script += "mount -t overlay x -o lowerdir=/,upperdir=/mnt/u,workdir=/mnt/w /mnt/m && ip link add type veth"
        command = ["unshare", "--net", "--pid", "--fork", "--mount", "--uts", "--ipc", "sh", "-c", script]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        return f"needs network and mount namespaces, sshd and an overlay file system: {str(detail).strip()}"
    return None


class Keeper:
    """One thread that outlives the calls: a child's parent-death signal fires when the *thread* that made it ends."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="testbed-keeper", daemon=True).start()

    def _work(self) -> None:
        while True:
            job, answer = self._jobs.get()
            try:
                answer.put((job(), None))
            except BaseException as error:
                answer.put((None, error))

    def run(self, job: Callable[[], T]) -> T:
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._jobs.put((job, answer))
        result, error = answer.get()
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]


_KEEPER = Keeper()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Namespace:
    """A process tree in fresh namespaces; `pid` is its first process as seen from outside."""

    def __init__(self, name: str, command: Sequence[str], size: str = "2g", keep: Sequence[str] = ()) -> None:
        self.name = name
        self._mountpoint = tempfile.mkdtemp(prefix=f"testbed-{name}-{os.getpid()}-")
        flags = ["--net", "--pid", "--fork", "--mount", "--uts", "--ipc", "--kill-child"]
        init = ["sh", str(HERE / "host_init.sh"), self._mountpoint, name, size, *command]
        hidden = " ".join(path for path in keep if path.startswith("/tmp/"))
        self._process = _KEEPER.run(
            lambda: subprocess.Popen(
                ["unshare", *flags, "--", *init],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={"PATH": PATH, "LANG": "C.UTF-8", "TESTBED_KEEP": hidden},
                preexec_fn=_die_with_parent,
            )
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != "ready":
            assert self._process.stderr is not None
            message = self._process.stderr.read()
            self.close()
            raise RuntimeError(f"host {name} did not start: {message}")
        os.rmdir(self._mountpoint)  # its mount is only in the namespace, which has left it behind
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        self.pid = int(children[0])

    def go(self) -> None:
        """Let the first process become its command."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.close()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def enter(self, command: Sequence[str], env: Mapping[str, str] | None = None, cwd: str = "/") -> list[str]:
        """`command` as it is run inside, as root."""
        variables = {"PATH": PATH, "LANG": "C.UTF-8", "HOME": "/root", **(env or {})}
        pairs = [f"{key}={value}" for key, value in variables.items()]
        return ["nsenter", "-t", str(self.pid), "-m", "-u", "-i", "-n", "-p", "env", "-i", "-C", cwd, *pairs, *command]

    def run(
        self,
        *command: str,
        env: Mapping[str, str] | None = None,
        cwd: str = "/",
        timeout: float = 60,
        check: bool = True,
        stdin: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run to the end; a failure's output is in the error."""
        done = subprocess.run(
            self.enter(command, env, cwd), capture_output=True, text=True, timeout=timeout, check=False, input=stdin
        )
        if check and done.returncode != 0:
            said = f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
            raise RuntimeError(f"{self.name}: {' '.join(command)}: {said}")
        return done

    def sh(self, script: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return self.run("sh", "-euc", script, **options)

    def processes(self) -> list[str]:
        """Command lines of all that runs inside, the first process and this look left out."""
        lines = self.run("ps", "-eo", "pid=,args=", check=False).stdout.splitlines()
        return [line for line in lines if line.split()[0] != "1" and "ps -eo pid=,args=" not in line]

    def path(self, inside: str) -> Path:
        """Where a file of the host is seen from outside, while it lives."""
        return Path(f"/proc/{self.pid}/root") / inside.lstrip("/")

    def listen(self, address: str, port: int) -> socket.socket:
        """A listening socket of *this* process inside the host's network."""
        return _in_network(self.pid, lambda: socket.create_server((address, port), backlog=64))

    def close(self) -> None:
        """End every process inside; namespaces, links and mounts go with them."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                # The first process takes all of its namespace along, and unshare ends with it.
                os.kill(self.pid, signal.SIGKILL) if hasattr(self, "pid") else self._process.kill()
        self._process.wait(timeout=30)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        shutil.rmtree(self._mountpoint, ignore_errors=True)


def _in_network(pid: int, job: Callable[[], T]) -> T:
    """Run `job` in a thread that has moved to the network of `pid` (setns is per thread)."""
    answer: list[Any] = []

    def work() -> None:
        try:
            with open(f"/proc/{pid}/ns/net") as namespace:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "setns")
            answer.extend((job(), None))
        except BaseException as error:
            answer.extend((None, error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if answer[1] is not None:
        raise answer[1]
    return answer[0]  # type: ignore[no-any-return]
