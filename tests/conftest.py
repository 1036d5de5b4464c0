"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.pool import Pool


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
