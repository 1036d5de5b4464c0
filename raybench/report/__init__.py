"""Reports: a table on the terminal, and files."""

from __future__ import annotations

from raybench.report.terminal import table, terminal_table
from raybench.report.write import write_report

__all__ = ["table", "terminal_table", "write_report"]
