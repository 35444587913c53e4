"""`python -m halocline` is the `halocline` command."""

from __future__ import annotations

import sys

from halocline.cli.main import main

# The guard matters: a spawned engine process imports this module again.
if __name__ == "__main__":
    sys.exit(main())
