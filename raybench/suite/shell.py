"""Between the shell and a command: the one message of whatever goes wrong, and a clean stdout for JSON."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO

import typer

from raybench.errors import RequestError, unknown
from raybench.suite.answer import Answer, failure

UsageError: Any = typer.BadParameter.__base__
"""Of typer's own parser, whether it carries click along or imports it."""
OPTIONAL_VALUES = ("--resume", "--trace")
"""Options whose value may be left out."""
INTERRUPTED = 130
LOG_WIDTH = 120
"""Columns of a table where there is no terminal."""


def call(app: Callable[..., Any], arguments: Sequence[str]) -> int:
    """Run one command and print its answer; the exit code."""
    as_json = "--json" in arguments
    with _stdout_for_the_answer(as_json) as stdout:
        answer = _guarded(lambda: _parse_and_run(app, arguments))
        try:
            _print(answer, stdout, as_json=as_json)
        except OSError:  # such as `| head`: the rest is not wanted
            os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
    return answer.exit_code


def _print(answer: Answer, stdout: TextIO, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_plain(answer.document), ensure_ascii=False, allow_nan=False), file=stdout, flush=True)
        return
    if answer.table is not None:
        from raybench.suite.console import console_for

        console_for(stdout, width=None if stdout.isatty() else LOG_WIDTH).print(answer.table)
    if answer.text:
        print(answer.text, file=sys.stderr if answer.is_error else stdout, flush=True)


def _plain(value: Any) -> Any:
    """Plain JSON data: unknown numbers are null."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float):
        return value
    return value.item() if hasattr(value, "item") else str(value)


def _parse_and_run(app: Callable[..., Any], arguments: Sequence[str]) -> Answer:
    spelled = [f"{text}=" if text in OPTIONAL_VALUES else text for text in arguments]
    try:
        answer = app(spelled, prog_name="raybench", standalone_mode=False)
    except UsageError as error:
        raise RequestError(_usage(error)) from None
    if answer == INTERRUPTED:  # typer's own answer to Ctrl-C, without a word
        raise KeyboardInterrupt
    return answer if isinstance(answer, Answer) else Answer(exit_code=answer or 0)


def _usage(error: Any) -> str:
    """The parser's complaint as one sentence."""
    context = getattr(error, "ctx", None)
    option = getattr(error, "option_name", None)
    if context is not None and option and type(error).__name__ == "NoSuchOption":
        names = [name for parameter in context.command.params for name in (*parameter.opts, *parameter.secondary_opts)]
        return str(unknown("option", option, [name for name in names if name.startswith("--")]))
    message = " ".join(error.format_message().split())
    if context is not None and message.startswith("No such command"):
        return str(unknown("command", message.split("'")[1], context.command.list_commands(context)))
    return message


def _guarded(command: Callable[[], Answer]) -> Answer:
    """The command's answer, or the one message that its failure comes down to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return command()
        except RequestError as error:
            return failure(str(error), 2)
        except KeyboardInterrupt:
            return failure("interrupted", INTERRUPTED)
        except Exception as error:
            with tempfile.NamedTemporaryFile("w", prefix="raybench-", suffix=".log", delete=False) as log:
                traceback.print_exc(file=log)
            told = " ".join(str(error).split())[:300]
            return failure(f"unexpected {type(error).__name__}: {told} (more in {log.name})", 1)


@contextmanager
def _stdout_for_the_answer(as_json: bool) -> Iterator[TextIO]:
    """Standard output; for JSON whatever else writes to it, libraries and child processes too, goes to stderr."""
    if not as_json:
        yield sys.stdout
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(kept, "w", encoding="utf-8", closefd=False) as stdout, redirect_stdout(sys.stderr):
            yield stdout
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
