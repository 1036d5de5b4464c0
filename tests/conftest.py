"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from tests.pool import Pool


@pytest.fixture(scope="session", autouse=True)
def _own_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Prepared text, and what Hugging Face's libraries keep, stay in the tests' own folder; no hub is asked."""
    folder = tmp_path_factory.mktemp("caches")
    own = {"RAYBENCH_CACHE": str(folder / "raybench"), "HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], Pool]]:
    """Gloo ranks by world size, started once and shared."""
    started: dict[int, Pool] = {}

    def get(world_size: int) -> Pool:
        if world_size not in started or not started[world_size].alive:
            started[world_size] = Pool(world_size)
        return started[world_size]

    yield get
    for pool in started.values():
        pool.close()
