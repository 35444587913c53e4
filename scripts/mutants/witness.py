"""Runs pytest after making sure that the module under trial is the copy's and not the checkout's.

python witness.py MODULE FILE PYTEST-ARGUMENTS...
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

WRONG_COPY = 99


def main() -> int:
    """Run the tests; WRONG_COPY when another file would be tested."""
    module, path = sys.argv[1:3]
    sys.path.pop(0)  # this folder: nothing in it belongs to the program
    imported = importlib.import_module(module).__file__
    if imported is None or Path(imported).resolve() != Path(path).resolve():
        print(f"{module} is {imported}, not {path}")
        return WRONG_COPY
    return int(pytest.main(sys.argv[3:]))


if __name__ == "__main__":
    sys.exit(main())
