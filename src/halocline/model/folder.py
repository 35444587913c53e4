"""Model folders: whether one can be served is checked before any weight is read.

config.json                      what the model is
model.safetensors                the weights, or model.safetensors.index.json and the files it names
tokenizer.json (or another)      the tokenizer
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from halocline.errors import ModelError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
_MAX_HEADER_BYTES = 100_000_000
"""The safetensors format's own limit."""


def check_folder(folder: Path) -> None:
    """Raise ModelError, with what to do, when `folder` has no readable config or no whole safetensors weights."""
    read_config(folder)
    for path in weight_files(folder):
        check_safetensors(path)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the folder's config.json as it stands."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(
            f"folder {str(folder)!r} has no config.json; "
            f"a model folder holds config.json, *.safetensors and a tokenizer"
        )
    return _read_json(path)


def weight_files(folder: Path) -> list[Path]:
    """Return the folder's safetensors files; all of them exist."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        return _indexed_files(folder)
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled:
        raise ModelError(
            f"folder {str(folder)!r} has only pickled weights ({', '.join(pickled[:3])}), which may run code when "
            f"read; save the model again with save_pretrained to get safetensors"
        )
    raise ModelError(f"folder {str(folder)!r} has no weights: neither {WEIGHTS} nor {INDEX}")


def check_safetensors(path: Path) -> None:
    """Raise ModelError when the header of a safetensors file is damaged or promises bytes that are not there."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if size < 8 or header_bytes > min(size - 8, _MAX_HEADER_BYTES):
            raise ModelError(f"{str(path)!r} is no safetensors file or is cut off ({size} bytes); fetch it again")
        try:
            header = json.loads(file.read(header_bytes))
            ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            raise ModelError(f"the header of {str(path)!r} is damaged; fetch the file again") from None
    promised = 8 + header_bytes + max(ends, default=0)
    if promised != size:
        raise ModelError(f"{str(path)!r} holds {size} bytes but its header promises {promised}; fetch the file again")


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder holds a tokenizer's vocabulary."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def _indexed_files(folder: Path) -> list[Path]:
    index = _read_json(folder / INDEX)
    names = index.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ModelError(f"{str(folder / INDEX)!r} has no usable weight_map; fetch the file again")
    files = sorted({folder / name for name in names.values()})
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ModelError(
            f"folder {str(folder)!r} lacks {len(missing)} of {len(files)} weight files, the first is {missing[0]!r}"
        )
    return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(content, ensure_ascii=False).encode()  # \ud800 alone is no text: no message could be printed
    except (ValueError, OSError, RecursionError) as error:
        raise ModelError(f"cannot read {str(path)!r} as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{str(path)!r} holds a {type(content).__name__}, not an object")
    return content
