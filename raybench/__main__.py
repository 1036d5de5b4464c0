"""`python -m raybench`."""

import sys

from raybench.cli import main

if __name__ == "__main__":
    sys.exit(main())
