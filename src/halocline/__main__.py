"""`python -m halocline` is the `halocline` command."""

from __future__ import annotations

import sys


def run() -> int:
    """Run the command line of this process; return the exit code."""
    try:
        from halocline.cli.main import main
    except KeyboardInterrupt:  # while a second's worth of modules is imported
        return 130
    return main()


# The guard matters: a spawned engine process imports this module again.
if __name__ == "__main__":
    sys.exit(run())
