"""The errors a user can cause, each a single sentence."""

from __future__ import annotations

from collections.abc import Iterable


class RequestError(Exception):
    """What was asked for is wrong (exit code 2): one message naming the field, the value and what is allowed."""


def unknown(field: str, value: object, allowed: Iterable[str]) -> RequestError:
    """A value outside a closed set, with the nearest allowed one named first."""
    from difflib import get_close_matches  # takes 2 ms, and is for mistakes alone

    choices = list(allowed)
    near = get_close_matches(str(value), choices, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return RequestError(f"{field}: {value!r} is not known{hint} (allowed: {', '.join(choices) or 'none'})")
