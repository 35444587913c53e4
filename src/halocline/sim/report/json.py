"""The report's one record: what was asked, of what program, and each run's figures. Page and table are made of it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from errno import EACCES
from pathlib import Path
from typing import Any

from halocline.errors import ConfigError, FailedError
from halocline.sim.report.figures import mean_bytes


def document(
    version: str, command: str, setup: Mapping[str, str], outcomes: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the record of a replay. `setup` is what was asked, by words that a person reads.

    Each run also gets `mean_bytes`: {"held": {pool: bytes}, "cached": {pool: bytes}}, means over its whole length.
    """
    runs = [{**outcome, "mean_bytes": mean_bytes(outcome)} for outcome in outcomes]
    return {"halocline": version, "command": command, "setup": dict(setup), "outcomes": runs}


def as_json(document: Mapping[str, Any]) -> str:
    """Return the record as JSON: a line for each key of a run, however long its series are."""
    return _lines({**document, "outcomes": _Raw([_lines(outcome) for outcome in document["outcomes"]])}) + "\n"


class _Raw(list[str]):
    """A list whose items are JSON already."""


def _lines(table: Mapping[str, Any]) -> str:
    lines = []
    for key, value in table.items():
        text = f"[{','.join(value)}]" if isinstance(value, _Raw) else json.dumps(value, allow_nan=False)
        lines.append(f"{json.dumps(key)}: {text}")
    return "{" + ",\n".join(lines) + "}"


def check_writable(path: Path) -> None:
    """Raise ConfigError when no file can be put at `path`: before an hour of work, not after it."""
    try:
        if _is_special(path):
            if not os.access(path, os.W_OK):  # opening a pipe would wait for its reader
                raise PermissionError(EACCES, os.strerror(EACCES))
            return
        path = Path(os.path.realpath(path))
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(descriptor)
        os.unlink(name)
    except OSError as error:
        raise ConfigError([f"cannot write {path}: {error.strerror or error}"]) from error
    if path.is_dir():
        raise ConfigError([f"cannot write {path}: it is a folder"])


def write(path: Path, text: str) -> None:
    """Put `text` at `path` as a whole: whoever looks sees the old file or the new one, never a half.

    A link stays, and the file that it names is replaced; a pipe or a device is written to. Raises FailedError when the
    place that was good at the start is no longer, or is full.
    """
    # A trace's path may be no UTF-8; what stands for its bytes in the text is written as `\udcff` is here.
    content = text.encode("utf-8", "backslashreplace")
    try:
        if _is_special(path):
            path.write_bytes(content)
        else:
            _replace(Path(os.path.realpath(path)), content)
    except OSError as error:
        raise FailedError(f"cannot write {path}: {error.strerror or error}") from error


def _is_special(path: Path) -> bool:
    """Whether `path` is a device, a pipe or a socket: to put a file in its place would take it from everybody."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _replace(path: Path, content: bytes) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
