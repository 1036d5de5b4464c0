"""Numbers as options give them; quick to import, as every command needs it."""

from __future__ import annotations

from collections.abc import Callable

from raybench.errors import RequestError


def whole_number(option: str, least: int) -> Callable[[str], int]:
    """A parser of the option's value."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise RequestError(f"{option}: {text!r} is not allowed (a whole number of at least {least})")
        return number

    return parse


def seconds(option: str) -> Callable[[str], float]:
    """A parser of the option's value."""
    return above_zero(option, "seconds")


def above_zero(option: str, unit: str) -> Callable[[str], float]:
    """A parser of the option's value, a finite number above 0."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = 0.0
        if not 0 < number < float("inf"):
            raise RequestError(f"{option}: {text!r} is not allowed (a number of {unit} above 0)")
        return number

    return parse
