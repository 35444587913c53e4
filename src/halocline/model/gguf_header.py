"""The header of a GGUF file, read with every bound checked: a damaged file becomes one sentence and no crash.

    magic, version, counts | key-value pairs | tensor names, shapes, types, offsets | padding | tensor data

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from halocline.errors import ModelError

MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says of itself."""

    architecture: str
    tensors: int
    types: frozenset[str]
    """Names of the tensors' storage types, such as Q4_K or F32."""
    has_tokenizer: bool


def read_gguf_header(path: Path) -> GgufHeader:
    """Read and check the header of `path`.

    Raises ModelError when the file is no GGUF file, is damaged, or is shorter than its header promises.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        if size < 24 or file.read(4) != MAGIC:
            raise ModelError(f"{str(path)!r} is not a GGUF file (it does not start with GGUF; {size} bytes)")
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(data).header(size)
        except (struct.error, UnicodeDecodeError, KeyError, ValueError, OverflowError) as error:
            raise ModelError(f"the GGUF file {str(path)!r} is damaged ({error}); fetch it again") from None


class _Reader:
    """A cursor over the file's bytes; struct.error or ValueError when it would run past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 4

    def header(self, size: int) -> GgufHeader:
        version, tensors, pairs = self._unpack("IQQ")
        if version not in (2, 3):
            raise ValueError(f"version {version}, known are 2 and 3")
        values: dict[str, object] = {}
        for _ in range(pairs):
            key = self._string()
            values[key] = self._value(self._unpack("I")[0])
        if "general.architecture" not in values:
            raise ValueError("general.architecture is missing")
        infos = [self._tensor_end() for _ in range(tensors)]
        alignment = values.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"alignment {alignment!r}")
        promised = math.ceil(self._at / alignment) * alignment + max((end for end, _ in infos), default=0)
        if promised > size:
            raise ValueError(f"it holds {size} bytes but its header promises {promised}")
        names = frozenset(GGMLQuantizationType(kind).name for _, kind in infos)
        return GgufHeader(str(values["general.architecture"]), tensors, names, "tokenizer.ggml.tokens" in values)

    def _tensor_end(self) -> tuple[int, int]:
        """Return where one tensor's bytes end, from the start of the data, and its type."""
        self._string()
        (dims,) = self._unpack("I")
        if dims > 8:
            raise ValueError(f"a tensor of {dims} dimensions")
        shape = self._unpack(f"{dims}Q")
        kind, offset = self._unpack("IQ")
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        return offset + math.prod(shape) // block * block_bytes, kind

    def _value(self, kind: int) -> object:
        if kind in _SCALARS:
            return self._unpack(_SCALARS[kind])[0]
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._skip_array()
        raise ValueError(f"value type {kind}")

    def _skip_array(self) -> None:
        kind, count = self._unpack("IQ")
        if kind in _SCALARS:
            self._advance(count * struct.calcsize("<" + _SCALARS[kind]))
        elif kind == _STRING:
            for _ in range(count):
                self._advance(self._unpack("Q")[0])
        else:
            raise ValueError(f"array of value type {kind}")

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        start = self._at
        self._advance(length)
        return self._data[start : self._at].decode("utf-8")

    def _unpack(self, form: str) -> tuple[int, ...]:
        values = struct.unpack_from("<" + form, self._data, self._at)
        self._at += struct.calcsize("<" + form)
        return values

    def _advance(self, count: int) -> None:
        self._at += count
        if self._at > len(self._data):
            raise ValueError(f"its header runs past the end at byte {len(self._data)}")
