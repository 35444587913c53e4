"""Whether the pure core runs as Python or as the machine code that `make compiled` made of the same sources.

    make compiled                     sources of the core --mypyc--> C --gcc--> build/core/, with a manifest
    HALOCLINE_CORE=compiled           use it; refused with a warning unless it was made of exactly these sources

A build can never shadow an edited source: its manifest holds the hash of everything that went into it, and a build of
another hash is not used. Without the variable nothing here runs and the core is Python.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Sequence
from hashlib import blake2b
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).parent
BUILD = PACKAGE.parents[1] / "build" / "core"
MANIFEST = "manifest.json"

INTERPRETED = frozenset({"memory/demand.py"})
"""Sources of the core that stay Python: mypyc (2.4) compares instances of a subclass of tuple by identity where it
compiles their class, and `Demand` is one."""


def core_sources() -> list[str]:
    """Return the sources that are compiled, as paths within the package, in order."""
    found = [path for folder in ("memory", "cache", "schedule") for path in (PACKAGE / folder).glob("*.py")]
    names = {str(path.relative_to(PACKAGE)) for path in found if path.name != "__init__.py"}
    return sorted(names - INTERPRETED | {"errors.py", "step.py", "units.py"})


def sources_hash() -> str:
    """Return the hash of all that a build is made of: the sources, what they are compiled beside, the interpreter."""
    digest = blake2b(sys.version.encode(), digest_size=16)
    for name in (*core_sources(), *sorted(INTERPRETED), "params.py"):
        text = (PACKAGE / name).read_bytes()
        digest.update(f"{name} {len(text)} ".encode())
        digest.update(text)
    return digest.hexdigest()


def core() -> str:
    """Return which core runs in this process: `compiled` or `python`."""
    return "compiled" if any(isinstance(finder, CoreFinder) for finder in sys.meta_path) else "python"


class CoreFinder:
    """Finds the compiled modules of the core by name, before their sources are found."""

    def __init__(self, files: dict[str, str]) -> None:
        self._files = files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a compiled module lies; None for any other."""
        del path, target
        if fullname not in self._files:
            return None
        file = str(BUILD / self._files[fullname])
        return spec_from_file_location(fullname, file, loader=ExtensionFileLoader(fullname, file))


def use_if_wanted() -> None:
    """Put the compiled core in front where HALOCLINE_CORE asks for it and the build is of these sources."""
    if os.environ.get("HALOCLINE_CORE", "python") != "compiled" or core() == "compiled":
        return
    try:
        manifest = json.loads((BUILD / MANIFEST).read_text(encoding="utf-8"))
        files, made_of = dict(manifest["modules"]), manifest["hash"]
    except (OSError, ValueError, KeyError, TypeError):
        files, made_of = {}, ""
    if made_of != sources_hash():
        why = "was made of other sources" if made_of else "does not exist"
        warnings.warn(f"the compiled core {why}; Python's is used: run `make compiled`", RuntimeWarning, stacklevel=2)
        return
    sys.meta_path.insert(0, CoreFinder(files))
