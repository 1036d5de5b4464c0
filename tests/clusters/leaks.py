"""Whether a secret is where others can read it, or in a log or a row."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import pandas as pd

from tests.testbed.bed import Testbed
from tests.testbed.host import Host, Laptop
from tests.testbed.namespaces import Namespace

OWN = (".ray/auth_token", ".ssh/id_ed25519", ".oci/key.pem", "ray_bootstrap_key.pem", ".aws/credentials")
"""Files whose purpose is to hold a secret; they may, where nobody else can read them."""


def secrets_of(bed: Testbed) -> dict[str, str]:
    """Text by which every secret of a cluster is known: Ray's token, the person's keys, what instances sign with."""
    home = bed.laptop.namespace.path(Laptop.HOME)
    mine = {
        "Ray's token": ".ray/auth_token",
        "the SSH key": ".ssh/id_ed25519",
        "the key to a bucket": ".aws/credentials",
    }
    found = {name: (home / file).read_text().strip() for name, file in mine.items() if (home / file).exists()}
    found |= bed.api.identity.secrets
    return {name: _middle(text) for name, text in found.items()}


def _middle(text: str) -> str:
    """The whole of a one-line secret; of a key a line from its middle, which no other key has."""
    lines = text.splitlines()
    return lines[len(lines) // 2]


def leaked(namespace: Namespace, secrets: Collection[str], since: float) -> list[str]:
    """Where a machine has a secret that it should not have: files written after `since` with their mode, commands."""
    script = (
        'since=$1; shift; find /home /root /tmp /etc /var /run /opt -xdev -type f -newerct "@$since" -print0 '
        '| xargs -0 -r grep -lsF "$@" -- /dev/null | while read -r file; do echo "$(stat -c %a "$file") $file"; done'
    )
    patterns = [word for secret in secrets for word in ("-e", secret)]
    found = namespace.run("sh", "-c", script, "look", str(since), *patterns, check=False, timeout=240).stdout
    files = [line for line in found.splitlines() if not _may_have_it(*line.split(" ", 1))]
    return files + [line for line in namespace.processes() if any(secret in line for secret in secrets)]


def _may_have_it(mode: str, path: str) -> bool:
    return mode.endswith("00") and path.endswith(OWN)


def in_rows(tables: Mapping[str, pd.DataFrame], secrets: Collection[str]) -> list[str]:
    """Columns of the tables that hold a secret (in the files they are packed, so that no search finds it)."""
    return [
        f"{name}.{column}"
        for name, table in tables.items()
        for column in table.columns
        if any(table[column].astype(str).str.contains(secret, regex=False).any() for secret in secrets)
    ]


def assert_no_secret_leaked(bed: Testbed, hosts: Iterable[Host], tables: Mapping[str, pd.DataFrame], said: str) -> None:
    """Of all that a run left behind: each machine's files and processes, the rows, and what was printed."""
    secrets = secrets_of(bed)
    since = bed.laptop.namespace.path(f"{Laptop.HOME}/.ssh").stat().st_ctime  # everything here is younger than its keys
    for machine in (bed.laptop.namespace, *(host.namespace for host in hosts)):
        places = leaked(machine, secrets.values(), since)
        assert not places, f"on {machine.name}: {places}"
    columns = in_rows(tables, secrets.values())
    assert not columns, f"in {columns}"
    names = [name for name, secret in secrets.items() if secret in said]
    assert not names, f"printed: {names}"
