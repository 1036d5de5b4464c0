"""The cache of prepared text: whole or not there, made once, and clear about a disk that is full."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import time
from pathlib import Path

import pytest

from raybench.data.cache import prepared
from raybench.errors import RequestError


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("RAYBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _write(folder: Path) -> None:
    (folder / "text").write_text("whole")


def test_what_is_there_is_not_made_again(root):
    assert (prepared("key", _write) / "text").read_text() == "whole"
    prepared("key", lambda folder: pytest.fail("made twice"))


def test_what_fails_leaves_nothing(root):
    def fail(folder: Path) -> None:
        _write(folder)
        raise RequestError("no")

    with pytest.raises(RequestError, match=r"^no$"):
        prepared("key", fail)
    assert [path.name for path in root.iterdir()] == ["key.lock"]
    assert (prepared("key", _write) / "text").exists()


def _slowly(log: Path, folder: Path) -> None:
    with log.open("a") as file:
        file.write("made\n")
    time.sleep(0.5)
    _write(folder)


def _job(root: str, log: str) -> None:
    os.environ["RAYBENCH_CACHE"] = root
    folder = prepared("key", lambda folder: _slowly(Path(log), folder))
    assert (folder / "text").read_text() == "whole"


def test_two_jobs_at_once_make_it_once(root, tmp_path):
    context = multiprocessing.get_context("spawn")
    jobs = [context.Process(target=_job, args=(str(root), str(tmp_path / "log"))) for _ in range(2)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
        assert job.exitcode == 0
    assert (tmp_path / "log").read_text() == "made\n"
    assert sorted(path.name for path in root.iterdir()) == ["key", "key.lock"]


def _dies(root: str) -> None:
    os.environ["RAYBENCH_CACHE"] = root

    def make(folder: Path) -> None:
        _write(folder)
        os.kill(os.getpid(), signal.SIGKILL)

    prepared("key", make)


def test_after_one_that_died_the_next_makes_it(root):
    job = multiprocessing.get_context("spawn").Process(target=_dies, args=(str(root),))
    job.start()
    job.join()
    assert not (root / "key").exists()
    assert (prepared("key", _write) / "text").read_text() == "whole"


def test_a_disk_that_fills_is_said_and_leaves_nothing(root):
    """A limit to the size of files stands in for the disk: writing fails halfway, as it does there."""

    def make(folder: Path) -> None:
        with (folder / "ids").open("wb") as file:
            for _ in range(100):
                file.write(bytes(1 << 16))

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(RequestError, match=r"^RAYBENCH_CACHE: prepared text cannot be written to"):
            prepared("key", make)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in root.iterdir()] == ["key.lock"]


def test_a_cache_that_cannot_be_made_is_said(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RAYBENCH_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(RequestError, match="RAYBENCH_CACHE"):
        prepared("key", _write)
