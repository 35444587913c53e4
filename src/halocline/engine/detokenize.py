"""Text from tokens, one at a time: what is returned never changes any more and never holds half a character.

tokens    "Hi"   " "   E4    BD    A0   "!"
text      "Hi"   " "   ""    ""    "你"  "!"
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from halocline.engine.pieces import BytePieces

REPLACEMENT = "\ufffd"
PATIENCE_TOKENS = 8
"""A character has at most 4 bytes and a token at least one, so after this many tokens a half one is garbage."""
CONTEXT_TOKENS = 6


class Detokenizer(Protocol):
    """The growing text of one sequence."""

    @property
    def is_inside_character(self) -> bool:
        """Whether the last tokens are the beginning of a character."""
        ...

    def push(self, token_id: int) -> str:
        """Return the text that this token completes."""
        ...

    def flush(self) -> str:
        """Return what is left at the end, without a character that was cut in half: it is dropped."""
        ...


class ByteDetokenizer:
    """For tokenizers whose tokens are fixed bytes: exact, and one dictionary lookup per token."""

    def __init__(self, pieces: BytePieces) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @property
    def is_inside_character(self) -> bool:
        return bool(self._decoder.getstate()[0])

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._pieces[token_id])

    def flush(self) -> str:
        self._decoder.reset()
        return ""


class WindowDetokenizer:
    """For any other tokenizer: decodes the last few tokens with and without the new ones, and takes the difference.

    anchor ..... read ..... end        `shown` is the text of [anchor, read), all of which has been returned
    """

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int]) -> None:
        self._decode = decode
        self._ids = list(context[-CONTEXT_TOKENS:])
        self._read = len(self._ids)
        self._shown = decode(self._ids)

    @property
    def is_inside_character(self) -> bool:
        return len(self._ids) > self._read

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.endswith(REPLACEMENT) and len(self._ids) - self._read <= PATIENCE_TOKENS:
            return ""
        return self._advance(text)

    def flush(self) -> str:
        return self._advance(self._decode(self._ids)).rstrip(REPLACEMENT) if self.is_inside_character else ""

    def _advance(self, text: str) -> str:
        # Where the new tokens change how the old ones read, the context is of no use.
        fresh = self._ids[self._read :]
        assert fresh, "there is nothing new to show"
        new = text[len(self._shown) :] if text.startswith(self._shown) else self._decode(fresh)
        self._ids, self._read, self._shown = fresh, len(fresh), self._decode(fresh)
        return new


class TextMaker:
    """Makes detokenizers for one transformers tokenizer, and prints single tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._pieces = BytePieces.of(tokenizer)

    def start(self, prompt: Sequence[int]) -> Detokenizer:
        """Return the detokenizer of a sequence that continues `prompt`."""
        if self._pieces is not None:
            return ByteDetokenizer(self._pieces)
        return WindowDetokenizer(self.decode, prompt)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of whole tokens, special ones skipped."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def token(self, token_id: int) -> tuple[str, bytes | None]:
        """Return one token by itself, as text and (where known) as bytes; special tokens by their names."""
        data = self._pieces[token_id] if self._pieces is not None else None
        if data:
            return data.decode(errors="replace"), data
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text, text.encode()
