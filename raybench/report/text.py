"""Numbers and names as readers see them: with their unit, with digits that mean something, and harmless."""

from __future__ import annotations

import html
import math
import re
from typing import Any

import pandas as pd

MISSING = "–"
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+")


def known(value: Any) -> bool:
    """Whether a cell holds a finite number or a text."""
    return not pd.isna(value) and not (isinstance(value, float) and math.isinf(value))


def has_numbers(row: Any) -> bool:
    """Whether a case was measured: all of its rounds, or some before it was interrupted."""
    return row.status == "ok" or known(row.tokens_per_s)


def number(value: Any, digits: int = 3) -> str:
    """With `digits` significant digits, and never fewer than its whole part; thousands are separated."""
    if not known(value):
        return MISSING
    if value == 0:
        return "0"
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    return f"{value:,.{min(max(0, digits - 1 - exponent), 12)}f}"


def whole(value: Any) -> str:
    return f"{int(value):,}" if known(value) else MISSING


def milliseconds(seconds: Any) -> str:
    return number(seconds * 1e3) if known(seconds) else MISSING


def percent(fraction: Any, digits: int = 1) -> str:
    return f"{fraction:.{digits}%}".replace("%", " %") if known(fraction) else MISSING


def size(num_bytes: Any) -> str:
    """Bytes in the unit that leaves one to four digits before the point."""
    if not known(num_bytes):
        return MISSING
    if num_bytes < 1024:
        return f"{num_bytes} B"
    power = min(int(math.log2(num_bytes) // 10), len(UNITS) - 1)
    return f"{number(num_bytes / 1024**power)} {UNITS[power]}"


def short_size(num_bytes: Any) -> str:
    """Without decimals that say nothing."""
    return size(int(num_bytes)).replace(".00 ", " ").replace(".0 ", " ") if known(num_bytes) else MISSING


def rate(bytes_per_s: Any) -> str:
    """In decimal units, as links are sold."""
    if not known(bytes_per_s):
        return MISSING
    power = min(max(int(math.log10(bytes_per_s) // 3), 0), 3) if bytes_per_s > 0 else 0
    return f"{number(bytes_per_s / 1000**power)} {('B', 'kB', 'MB', 'GB')[power]}/s"


def interval(low: Any, high: Any, digits: int = 3) -> str:
    """`low – high`, or nothing where it is unknown."""
    return f"{number(low, digits)} – {number(high, digits)}" if known(low) and known(high) else ""


def spread(value: Any, low: Any, high: Any) -> str:
    """The longer arm of an interval, in percent of the value; what is wider than the value is no measurement."""
    if not (known(value) and known(low) and known(high)) or value == 0:
        return ""
    arm = max(value - low, high - value) / value
    return "± >100 %" if arm > 1 else f"± {percent(arm, 1 if arm < 0.1 else 0)}"


def plain(text: Any, limit: int = 500) -> str:
    """A text from outside on one line, without characters that steer a terminal."""
    line = _CONTROL.sub(" ", str(text)).strip()
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def markdown(text: Any) -> str:
    """A text from outside that Markdown shows as it is."""
    escaped = html.escape(plain(text), quote=False)
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", escaped)


def words(status: Any) -> str:
    """A status or gate as words."""
    return str(status).replace("_", " ")
