"""Reports: a table on the terminal, and files."""

from __future__ import annotations

from raybench.report.content import build
from raybench.report.terminal import table, terminal_table
from raybench.report.write import write_report

__all__ = ["build", "table", "terminal_table", "write_report"]
