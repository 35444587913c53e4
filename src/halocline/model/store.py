"""The cache on disk: each entry is built once, whole or not at all, whoever else is building it.

$HALOCLINE_CACHE/                 default ~/.cache/halocline
  gemma3-270m/                    a finished entry; it appears by one rename
  .gemma3-270m.lock               held while one process builds, so that the others wait and then find it
  .gemma3-270m.building/          what an interrupted build left; removed by the next one
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from halocline.errors import ModelError

Build = Callable[[Path], None]
"""Fills the empty folder that it is given."""


def cache_root() -> Path:
    """Return the cache folder, which may not exist yet."""
    return Path(os.environ.get("HALOCLINE_CACHE") or Path.home() / ".cache" / "halocline").expanduser()


def cached_folder(name: str, build: Build) -> Path:
    """Return the finished folder of entry `name`; `build` fills it if it is not there yet.

    Safe against concurrent processes and interruption: what `build` wrote is flushed and renamed into place as its
    last act. Raises ModelError when the cache cannot be written.
    """
    root = cache_root()
    final = root / name
    if final.is_dir():
        return final
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".{name}.lock"):
            if not final.is_dir():
                _build(root / f".{name}.building", final, build)
    except OSError as error:
        raise ModelError(
            f"cannot write {name!r} to the cache {root}: {error}; set HALOCLINE_CACHE to a folder with room"
        ) from error
    return final


def _build(staging: Path, final: Path, build: Build) -> None:
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        build(staging)
        for path in staging.rglob("*"):
            _finish(path)
        staging.rename(final)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _finish(path: Path) -> None:
    if path.is_file():
        # safetensors are written for their owner only, but a cache may be filled by one user and served by another.
        path.chmod(path.stat().st_mode | 0o444)
        # Without this a crash soon after the rename may leave a finished name on unfinished bytes.
        with path.open("rb") as file:
            os.fsync(file.fileno())
