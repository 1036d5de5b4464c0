"""The results folder explains itself completely."""

from __future__ import annotations

from pathlib import Path

import pytest

from raybench.results.schema import SCHEMA_MAJOR, SCHEMA_MINOR, TABLES

README = Path(__file__).parents[2] / "results" / "README.md"


@pytest.mark.parametrize("table", TABLES)
def test_every_column_is_explained_under_its_table(table: str) -> None:
    section = README.read_text(encoding="utf-8").split(f"### {table}:")[1].split("\n#")[0]
    names = [name for line in section.splitlines() if line.startswith("| ") for name in line.split("|")[1].split(", ")]
    assert [n.strip() for n in names if n.strip() not in ("columns", "---")] == list(TABLES[table])


def test_the_version_is_told() -> None:
    assert f"now {SCHEMA_MAJOR}.{SCHEMA_MINOR})" in README.read_text(encoding="utf-8")
