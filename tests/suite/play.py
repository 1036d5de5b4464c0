"""`python -m tests.suite.play …`: raybench, whose ranks run `fake_loop` instead of measuring."""

import sys

from raybench.cli import main
from raybench.suite import launch

_launcher = launch.launcher
launch.launcher = lambda name: _launcher(name, loop="tests.suite.fake_loop:run_job")  # type: ignore[assignment]

if __name__ == "__main__":
    sys.exit(main())
