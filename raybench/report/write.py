"""Writes a report's files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from raybench.errors import RequestError
from raybench.report import page, summary
from raybench.report.content import Report
from raybench.report.export import export
from raybench.report.plots import figures
from raybench.report.png import write_figures

FOOT_FACTS = ("Device", "Backend", "Scale", "torch", "Measured")


def write_report(report: Report, out: Path, exports: Sequence[str] = ()) -> list[Path]:
    """Write a report into the folder `out`, which is made; the files written.

    Args:
        exports: names of `raybench.report.export.EXPORTS`.

    Raises:
        RequestError: the folder cannot be written, there is no case to export, or an export needs what is
            not installed.
    """
    if exports and not report.sections:
        raise RequestError("--export: there are no cases in these results, only sweeps of `raybench comm`")
    drawn = figures(report)
    foot = " · ".join(report.facts[name] for name in FOOT_FACTS if name in report.facts)
    markdown, html = out / summary.FILE_NAME, out / page.FILE_NAME
    try:
        out.mkdir(parents=True, exist_ok=True)
        pictures = write_figures(drawn, foot[:180], out)
        markdown.write_text(summary.render(report, [picture.name for picture in pictures]), encoding="utf-8")
        html.write_text(page.render(report, drawn), encoding="utf-8")
        exported = [path for name in exports for path in export(name, report, out)]
    except OSError as error:
        raise RequestError(f"-o {out}: cannot be written ({error.strerror or error})") from None
    return [markdown, html, *pictures, *exported]
