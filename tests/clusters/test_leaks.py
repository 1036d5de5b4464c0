"""The search for secrets finds them where they must not be."""

from __future__ import annotations

import subprocess

import pandas as pd
import pytest

from tests.clusters.leaks import assert_no_secret_leaked, in_rows, leaked, secrets_of
from tests.testbed.bed import Testbed
from tests.testbed.host import Laptop


def test_rows() -> None:
    runs = pd.DataFrame({"environment": ['{"token": "hidden"}', None], "reason": pd.Categorical(["hidden", "x"])})
    assert in_rows({"runs": runs}, ["hidden"]) == ["runs.environment", "runs.reason"]
    assert in_rows({"runs": runs}, ["other"]) == []


@pytest.mark.netns
@pytest.mark.slow
def test_files_and_commands(bed: Testbed) -> None:
    host = bed.add_host("one")
    bed.laptop.write(".ray/auth_token", "not-to-be-seen\n")
    since = bed.laptop.namespace.path(f"{Laptop.HOME}/.ssh").stat().st_ctime
    assert "not-to-be-seen" in secrets_of(bed).values()

    def found() -> list[str]:
        return leaked(host.namespace, ["not-to-be-seen", "nowhere"], since)

    def plant(path: str, mode: str) -> None:
        host.namespace.sh(f"mkdir -p $(dirname {path}); echo a not-to-be-seen b > {path}; chmod {mode} {path}")

    plant("/home/ubuntu/.ray/auth_token", "600")
    assert found() == []
    assert_no_secret_leaked(bed, [host], {}, "nothing")
    for path, mode in (("/home/ubuntu/.ray/auth_token", "644"), ("/tmp/ray/raylet.out", "600"), ("/var/log/x", "640")):
        plant(path, mode)
        assert f"{mode} {path}" in found()
    with pytest.raises(AssertionError, match="on one: "):
        assert_no_secret_leaked(bed, [host], {}, "nothing")
    host.run("rm", "/home/ubuntu/.ray/auth_token", "/tmp/ray/raylet.out", "/var/log/x")
    with pytest.raises(AssertionError, match=r"printed: .*Ray's token"):
        assert_no_secret_leaked(bed, [host], {}, "it said not-to-be-seen")
    talker = subprocess.Popen(host.namespace.enter(["sh", "-c", "sleep 60; : not-to-be-seen"]))
    try:
        assert any("sleep 60" in line for line in found())
    finally:
        talker.kill()
        talker.wait()
