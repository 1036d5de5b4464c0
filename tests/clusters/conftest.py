"""The testbed for the tests that bring clusters up, and where the shipped files lie."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testbed.bed import Testbed
from tests.testbed.host import Laptop
from tests.testbed.namespaces import why_unavailable

ROOT = Path(__file__).resolve().parents[2]


def require_testbed(*packages: str) -> None:
    """Skip where the machine cannot make hosts, or has not the packages that a test needs besides, but never in CI."""
    reason = why_unavailable(*packages)
    if reason:
        if os.environ.get("CI") == "true":
            pytest.fail(f"the testbed must work in CI: {reason}")
        pytest.skip(reason)


@pytest.fixture
def bed() -> Iterator[Testbed]:
    """Hosts, a laptop and a cloud."""
    require_testbed()
    with Testbed() as testbed:
        yield testbed
    assert not testbed.failures


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """With -s, how long each step took."""
    run, begin = Laptop.run, time.monotonic()

    def timed(self: Laptop, *command: str, **options: Any) -> Any:
        started = time.monotonic()
        done = run(self, *command, **options)
        print(f"[{started - begin:5.0f} s] {' '.join(command)[:60]!r}: {time.monotonic() - started:.0f} s")
        return done

    monkeypatch.setattr(Laptop, "run", timed)
