"""Whether a secret is where others can read it, or in a log or a row."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from tests.testbed.bed import Testbed
from tests.testbed.host import Host, Laptop
from tests.testbed.namespaces import Namespace

OWN = ("auth_token", "id_ed25519", "key.pem", "ray_bootstrap_key.pem")
"""Files whose purpose is to hold a secret; they may, where nobody else can read them."""


def secrets_of(bed: Testbed) -> dict[str, str]:
    """Text by which every secret of a cluster is known: Ray's token, the person's keys, what instances sign with."""
    home = bed.laptop.namespace.path(Laptop.HOME)
    mine = {"Ray's token": ".ray/auth_token", "the SSH key": ".ssh/id_ed25519"}
    found = {name: (home / file).read_text().strip() for name, file in mine.items()} | bed.api.identity.secrets
    return {name: _middle(text) for name, text in found.items()}


def _middle(text: str) -> str:
    """The whole of a one-line secret; of a key a line from its middle, which no other key has."""
    lines = text.splitlines()
    return lines[len(lines) // 2]


def leaked(namespace: Namespace, secret: str) -> list[str]:
    """Where a machine has a secret that it should not have: files with their mode, and command lines."""
    script = (
        'grep -rlsF -- "$1" /home /tmp /etc /var /run | while read -r file; do echo "$(stat -c %a "$file") $file"; done'
    )
    found = namespace.run("sh", "-c", script, "look", secret, check=False, timeout=240).stdout.splitlines()
    files = [line for line in found if not _may_have_it(*line.split(" ", 1))]
    return files + [line for line in namespace.processes() if secret in line]


def _may_have_it(mode: str, path: str) -> bool:
    return mode.endswith("00") and path.endswith(OWN)


def in_rows(tables: Mapping[str, pd.DataFrame], secret: str) -> list[str]:
    """Columns of the tables that hold a secret (in the files they are packed, so that no search finds it)."""
    return [
        f"{name}.{column}"
        for name, table in tables.items()
        for column in table.columns
        if table[column].astype(str).str.contains(secret, regex=False).any()
    ]


def assert_no_secret_leaked(
    bed: Testbed, hosts: tuple[Host, ...], tables: Mapping[str, pd.DataFrame], said: str
) -> None:
    """Of all that a run left behind: each machine's files and processes, the rows, and what was printed."""
    for what, secret in secrets_of(bed).items():
        for machine in (bed.laptop.namespace, *(host.namespace for host in hosts)):
            assert leaked(machine, secret) == [], f"{what} on {machine.name}"
        assert in_rows(tables, secret) == [], what
        assert secret not in said, what
