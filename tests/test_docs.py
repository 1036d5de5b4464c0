"""docs/troubleshooting.md: its commands exist and parse, its links lead somewhere, its findings are the doctor's."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from raybench.cli import app, main
from raybench.doctor.findings import SEVERITY

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").replace("\\\n", " ")
COMMANDS = [line.removeprefix("$ ").strip() for line in PAGE.splitlines() if re.match(r"(\$| {3}) +raybench ", line)]


def arguments_of(line: str) -> list[str]:
    line = re.sub(r"\$\(printf 'watchdog %s ' (\S+)\)", r"watchdog \1", line).partition("  #")[0]
    return shlex.split(line.partition(" | ")[0])[1:]


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_is_one_that_raybench_takes(line: str):
    name, *rest = arguments_of(line)
    root = typer.main.get_command(app)
    command = root.get_command(None, name)
    assert command is not None, f"there is no command {name}"
    command.make_context(name, rest)  # refuses unknown options, and values that they do not take


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("raybench doctor ")])
def test_the_doctor_knows_what_it_is_asked_to_read(line: str, capsys: pytest.CaptureFixture[str]):
    assert main(arguments_of(line)) == 2
    assert "cannot read" in capsys.readouterr().err  # all that it minds is that no such file is here


def test_every_symptom_has_a_command():
    sections = re.split(r"^##+ ", PAGE, flags=re.MULTILINE)[1:]
    assert len(sections) >= 10
    assert [section.splitlines()[0] for section in sections if "raybench " not in section] == []


def test_links_lead_somewhere():
    titles = {
        re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in re.findall(r"^##+ (.+)$", PAGE, re.MULTILINE)
    }
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        path, _, anchor = target.partition("#")
        assert not path or (ROOT / "docs" / path).is_file(), target
        assert path or anchor in titles, target


def test_the_readme_and_the_doctor_point_to_it():
    assert "(docs/troubleshooting.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "quoted", sorted(set(re.findall(r"^  (?:ERROR|WARNING|INFO) ([a-z0-9-]+):", PAGE, re.MULTILINE)))
)
def test_findings_that_are_shown_exist(quoted: str):
    assert quoted in SEVERITY
