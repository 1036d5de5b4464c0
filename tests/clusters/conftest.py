"""The testbed for the tests that bring clusters up, and where the shipped files lie."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed.bed import Testbed
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
