"""From the name that a person types to a folder that can be loaded.

gemma3-270m               a built-in name          package -> GGUF -> converted once into the cache
./folder                  a model folder           as it is
./model.gguf              a GGUF file              converted once into the cache
owner/model               a Hugging Face id        the hub's cache
"""

from __future__ import annotations

import difflib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from halocline.errors import ModelError
from halocline.model.builtin import BUILTINS, builtin_folder
from halocline.model.folder import INDEX, WEIGHTS, check_folder, read_config
from halocline.model.gguf_convert import STAGES, convert_gguf
from halocline.model.gguf_header import MAGIC, read_gguf_header
from halocline.model.hub import hub_folder, looks_like_id
from halocline.model.progress import Stages
from halocline.model.store import cached_folder
from halocline.paths import existing_path


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that is on this machine, ready to be loaded."""

    name: str
    """What people call it: the built-in name, the hub id, or the folder's or file's own name."""
    folder: Path
    kind: Literal["builtin", "folder", "gguf", "hub"]
    trust_remote_code: bool = False


def resolve(
    name: str,
    *,
    trust_remote_code: bool = False,
    revision: str | None = None,
    weights: bool = True,
    quiet: bool = False,
) -> ModelSource:
    """Find the model called `name`; fetch and convert it if that has not been done yet.

    `weights=False` is enough for config and tokenizer (it spares the download of a hub model's weights); `quiet`
    shows no progress. Raises ModelError with what was looked for and what to do, ConfigError where it may not be read.
    """
    path = None if name in BUILTINS else existing_path(name)
    if name in BUILTINS:
        source = ModelSource(name, builtin_folder(name, quiet=quiet), "builtin")
    elif path is not None and path.is_dir():
        source = ModelSource(path.resolve().name, path.resolve(), "folder", trust_remote_code)
    elif path is not None and path.is_file():
        source = ModelSource(path.stem, _gguf_folder(path.resolve(), quiet=quiet), "gguf")
    elif looks_like_id(name) and not name.endswith(".gguf"):
        folder = hub_folder(name, revision=revision, weights=weights, code=trust_remote_code)
        source = ModelSource(name, folder, "hub", trust_remote_code)
    else:
        raise _unknown(name)
    _check(source, weights=weights)
    return source


def _check(source: ModelSource, *, weights: bool) -> None:
    if source.kind == "folder" and not (source.folder / "config.json").is_file():
        _offer_gguf(source.folder)
    if not weights:
        read_config(source.folder)
        return
    if source.kind == "hub" and not any((source.folder / name).is_file() for name in (WEIGHTS, INDEX)):
        raise ModelError(
            f"{source.name!r} has no safetensors weights on the Hugging Face hub (pickled weights may run code when "
            f"read and are not fetched); look for a converted copy of the model"
        )
    try:
        check_folder(source.folder)
    except ModelError as error:
        if source.kind not in ("builtin", "gguf"):
            raise
        raise ModelError(f"the converted copy is damaged ({error}): remove {str(source.folder)!r}") from None


def _offer_gguf(folder: Path) -> None:
    files = sorted(path.name for path in folder.glob("*.gguf"))
    if files:
        raise ModelError(
            f"folder {str(folder)!r} has no config.json but holds GGUF files; name one of them: {', '.join(files[:5])}"
        )


def _gguf_folder(path: Path, *, quiet: bool) -> Path:
    with path.open("rb") as file:
        start = file.read(4)
    if start != MAGIC:
        raise ModelError(
            f"{str(path)!r} is a file of unknown format; a model is a folder with config.json and *.safetensors, "
            f"a .gguf file, a Hugging Face id or one of {', '.join(BUILTINS)}"
        )
    read_gguf_header(path)

    def build(folder: Path) -> None:
        with Stages(path.name, STAGES, quiet=quiet) as stages:
            convert_gguf(path, folder, stages)

    return cached_folder(f"{path.stem}-{_fingerprint(path)}", build)


def _fingerprint(path: Path) -> str:
    """Return a word that changes when the file at `path` does; reading gigabytes to know would take too long."""
    status = path.stat()
    return hashlib.sha256(f"{path}:{status.st_size}:{status.st_mtime_ns}".encode()).hexdigest()[:12]


def _unknown(name: str) -> ModelError:
    if name.endswith(".gguf") or os.sep in name or name.startswith(("~", ".")):
        return ModelError(f"there is no file or folder {name!r}")
    near = difflib.get_close_matches(name, BUILTINS, n=1)
    guess = f"; did you mean {near[0]!r}?" if near else ""
    return ModelError(
        f"unknown model {name!r}: no folder here and none of the built-in names ({', '.join(BUILTINS)}){guess} "
        f"Give a folder, a .gguf file, or a Hugging Face id such as owner/model"
    )
