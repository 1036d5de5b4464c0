"""Writes a report's files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from raybench.errors import RequestError
from raybench.report import summary
from raybench.report.content import build
from raybench.report.figures import write_figures

if TYPE_CHECKING:
    from raybench.results.reader import Results


def write_report(results: Results, out: Path) -> list[Path]:
    """Write the report of `results` into the folder `out`, which is made; the files written.

    Raises:
        RequestError: the folder cannot be written.
    """
    report = build(results)
    path = out / summary.FILE_NAME
    try:
        out.mkdir(parents=True, exist_ok=True)
        drawn = write_figures(report, results, out)
        path.write_text(summary.render(report, [figure.name for figure in drawn]), encoding="utf-8")
    except OSError as error:
        raise RequestError(f"-o {out}: cannot be written ({error.strerror or error})") from None
    return [path, *drawn]
