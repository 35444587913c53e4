"""Reading the project's own source: for the tests of its shape."""

from __future__ import annotations

import ast
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
PACKAGE = PROJECT / "src" / "halocline"
SOURCES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    """Return `halocline.memory.arena` for its file; a package's `__init__` is the package."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def module_of(path: Path) -> str:
    """Return the layer of a file: its first folder below the package, or its own name."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def modules(*layers: str) -> list[Path]:
    """Return the files of some layers."""
    return [path for path in SOURCES if module_of(path) in layers]


def imported_names(path: Path) -> list[str]:
    """Return every imported module or object in full, also those imported lazily or for typing only."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names
