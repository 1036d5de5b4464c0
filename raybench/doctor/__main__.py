"""`python -m raybench.doctor topo|nccl|watchdog FILE [--json]`: the readers without the command line of raybench."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from raybench.doctor.read import read_file
from raybench.doctor.render import render
from raybench.errors import RequestError


def main(arguments: list[str] | None = None) -> int:
    """Print the answer for one file; 2 where it cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m raybench.doctor")
    parser.add_argument("kind", choices=("topo", "nccl", "watchdog"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        result = read_file(options.kind, options.file)
    except RequestError as exc:
        print(exc, file=sys.stderr)
        return 2
    print(json.dumps(result, indent=1) if options.json else render(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
