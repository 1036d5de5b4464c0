"""What `raybench compare` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from raybench.analysis.compare import CONFIDENCE, MINIMUM_EFFECT, Comparison
from raybench.report.text import interval, number, percent, plain
from raybench.wording import count

STYLES = {"faster": "green", "slower": "red", "same within noise": "", "not comparable": "yellow"}
COLUMNS = {"track": "left", "case": "left", "BASE\ntokens/s": "right", "NEW\ntokens/s": "right", "NEW ÷\nBASE": "right"}


def comparison_table(found: Sequence[Comparison]) -> Table:
    """One row a case; what stands in the way of a comparison in the last column."""
    grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 1), pad_edge=False)
    for title, side in COLUMNS.items():
        grid.add_column(title, justify="right" if side == "right" else "left", no_wrap=side == "right")
    grid.add_column(f"{percent(CONFIDENCE, 0)}\ninterval", justify="right", no_wrap=True)
    grid.add_column("verdict", min_width=17)
    for row in found:
        style = "red" if row.is_regression else STYLES[row.verdict]
        verdict = row.verdict if row.reason is None else f"{row.verdict}: {plain(row.reason)}"
        numbers = (number(row.base_tokens_per_s, 4), number(row.new_tokens_per_s, 4), number(row.ratio, 4))
        between = interval(row.ratio_low, row.ratio_high, 4)
        grid.add_row(plain(row.track), plain(row.case), *numbers, between, Text(verdict, style=style))
    return grid


def conclusion(found: Sequence[Comparison]) -> str:
    """In a line or two: how many of which, and how it was decided."""
    verdicts = [row.verdict for row in found]
    told = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in STYLES if verdict in verdicts)
    regressions = [f"{plain(row.track)}:{plain(row.case)}" for row in found if row.is_regression]
    lines = [f"{count(len(found), 'case')}: {told}."]
    lines += [f"Regression in {', '.join(regressions)}."] if regressions else []
    lines.append(
        f"All intervals together hold with {percent(CONFIDENCE, 0)}; changes under {percent(MINIMUM_EFFECT, 0)} are "
        "called the same."
    )
    return "\n".join(lines)


def comparison_rows(found: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Plain data for `--json`."""
    return [asdict(row) for row in found]
