"""What each token is in bytes, where a tokenizer's decoder is of a kind that tells.

Nearly all language models use one of two decoders, in which every token stands for fixed bytes:

    byte-level BPE     each character of the token is one byte of GPT-2's table       "Ġhé" -> 20 68 C3 A9
    sentencepiece      "▁" is a space, "<0xE4>" is one byte, the rest is UTF-8         "▁hé" -> 20 68 C3 A9

For others (word pieces, decoders written in Python) `BytePieces.of` returns None and text is found by decoding windows.
"""

from __future__ import annotations

import json
import re
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"


def _byte_characters() -> dict[int, str]:
    """Return GPT-2's table: printable bytes stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


BYTE_CHARACTERS = _byte_characters()
_BYTES_OF = {character: byte for byte, character in BYTE_CHARACTERS.items()}


class BytePieces:
    """The bytes of each token id; special tokens and ids outside the vocabulary have none."""

    def __init__(self, backend: Any, special: frozenset[int], *, is_byte_level: bool) -> None:
        self._backend = backend
        self._special = special
        self._read = _byte_level_bytes if is_byte_level else _sentencepiece_bytes
        self._known: dict[int, bytes] = {}

    @classmethod
    def of(cls, tokenizer: Any) -> BytePieces | None:
        """Return the pieces of a transformers tokenizer, or None when its decoder is of another kind."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = getattr(backend, "decoder", None)
        if decoder is None:
            return None
        steps = _steps(json.loads(decoder.__getstate__()))
        is_byte_level = [step["type"] for step in steps if step["type"] != "Fuse"] == ["ByteLevel"]
        if not is_byte_level and not all(map(_is_sentencepiece, steps)):
            return None
        special = frozenset(each for each, token in tokenizer.added_tokens_decoder.items() if token.special)
        return cls(backend, special, is_byte_level=is_byte_level)

    def __getitem__(self, token_id: int) -> bytes:
        piece = self._known.get(token_id)
        if piece is None:
            name = None if token_id in self._special else self._backend.id_to_token(token_id)
            piece = self._known[token_id] = b"" if name is None else self._read(name)
        return piece


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _is_sentencepiece(step: dict[str, Any]) -> bool:
    """Whether a step keeps bytes as they are, apart from the marked space and the start of the whole text."""
    if step["type"] == "Replace":
        return bool(step["pattern"] == {"String": _SPACE} and step["content"] == " ")
    if step["type"] == "Strip":
        return bool(step["content"] == " " and step["start"] <= 1 and step["stop"] == 0)
    if step["type"] == "Metaspace":
        return bool(step["replacement"] == _SPACE)
    return step["type"] in ("ByteFallback", "Fuse")


def _byte_level_bytes(name: str) -> bytes:
    # An added token with characters outside the table stands for itself.
    if all(character in _BYTES_OF for character in name):
        return bytes(_BYTES_OF[character] for character in name)
    return name.encode()


def _sentencepiece_bytes(name: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(name)
    return bytes([int(byte.group(1), 16)]) if byte else name.replace(_SPACE, " ").encode()
