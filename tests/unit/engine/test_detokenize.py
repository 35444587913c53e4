"""Text from tokens, over random splits of random texts, for both kinds of byte tokens and for any other tokenizer."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halocline.engine.detokenize import ByteDetokenizer, TextMaker, WindowDetokenizer
from halocline.engine.pieces import BytePieces
from testing.engine import EOS, FIRST_BYTE, byte_tokenizer, ids_of
from testing.models import tiny_tokenizer

KINDS = ("byte-level", "byte-fallback", "byte-level BPE")
TEXTS = st.text(alphabet=st.one_of(st.sampled_from("ab é你😀\n▁<0x"), st.characters(codec="utf-8")), max_size=40)


@cache
def tokenizer(kind: str) -> Any:
    if kind == "byte-level BPE":
        return tiny_tokenizer()
    return byte_tokenizer(fallback=kind == "byte-fallback")


def window(kind: str, context: tuple[int, ...] = ()) -> WindowDetokenizer:
    return WindowDetokenizer(TextMaker(tokenizer(kind)).decode, context)


def pieces(kind: str) -> ByteDetokenizer:
    found = BytePieces.of(tokenizer(kind))
    assert found is not None
    return ByteDetokenizer(found)


def spelled(kind: str, text: str) -> str:
    """Return `text` as the tokenizer sees it: sentencepiece cannot tell its space mark from a space."""
    return text.replace("▁", " ") if kind == "byte-fallback" else text


def pushed(detokenizer: Any, ids: list[int]) -> list[str]:
    return [detokenizer.push(each) for each in ids]


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
def test_the_pieces_together_are_the_text(kind: str, text: str) -> None:
    ids = tokenizer(kind).encode(text, add_special_tokens=False)
    assert "".join(pushed(pieces(kind), ids)) == spelled(kind, text)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
def test_no_piece_ends_in_half_a_character(kind: str, text: str) -> None:
    text = spelled(kind, text.replace("\ufffd", ""))
    ids = tokenizer(kind).encode(text, add_special_tokens=False)
    parts = pushed(pieces(kind), ids)
    assert all("\ufffd" not in part for part in parts)
    for end in range(len(parts) + 1):
        assert text.startswith("".join(parts[:end])), "what was shown once never changes"


@pytest.mark.parametrize("kind", ["byte-level", "byte-level BPE"])
@given(text=TEXTS, prompt=st.text(alphabet="ab é你", max_size=8))
def test_windows_give_the_same_text_whatever_was_before(kind: str, text: str, prompt: str) -> None:
    text = text.replace("\ufffd", "")
    before = tuple(tokenizer(kind).encode(prompt, add_special_tokens=False))
    ids = tokenizer(kind).encode(text, add_special_tokens=False)
    detokenizer = window(kind, before)
    parts = pushed(detokenizer, ids)
    assert "".join(parts) + detokenizer.flush() == text
    assert all("\ufffd" not in part for part in parts)


@given(text=st.text(alphabet="ab é你😀", min_size=1, max_size=20))
def test_windows_keep_the_space_that_sentencepiece_strips_at_the_start_of_a_text(text: str) -> None:
    ids = tokenizer("byte-fallback").encode(text, add_special_tokens=False)
    detokenizer = window("byte-fallback", tuple(ids_of("ab")))
    assert "".join(pushed(detokenizer, ids)) + detokenizer.flush() == text


@given(data=st.binary(max_size=40))
def test_any_bytes_whatever_give_what_a_lenient_decoder_gives(data: bytes) -> None:
    detokenizer = pieces("byte-level")
    text = "".join(pushed(detokenizer, ids_of(data)))
    whole = data.decode(errors="replace")
    assert whole.startswith(text)
    assert set(whole[len(text) :]) <= {"\ufffd"}, "only a character cut at the end is missing"
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_endless_garbage_is_not_held_back_for_ever(kind: str) -> None:
    garbage = [FIRST_BYTE + 0xE4] * 200
    for detokenizer in (pieces(kind), window(kind)):
        shown = "".join(pushed(detokenizer, garbage))
        assert len(shown) >= 150
        assert set(shown) == {"\ufffd"}


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_good_text_after_garbage_is_good(kind: str) -> None:
    ids = [FIRST_BYTE + 0xFF, *ids_of("好x")]
    assert "".join(pushed(pieces(kind), ids)) == "\ufffd好x"


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_and_unknown_ids_have_no_text(kind: str) -> None:
    hello = tokenizer(kind).encode("hé", add_special_tokens=False)
    ids = [EOS, *hello, 2, 100_000, EOS]
    assert "".join(pushed(pieces(kind), ids)) == "hé"


def test_a_character_cut_at_the_end_is_dropped() -> None:
    for detokenizer in (pieces("byte-level"), window("byte-level")):
        parts = pushed(detokenizer, ids_of("a😀".encode()[:-1]))
        assert parts == ["a", "", "", ""]
        assert detokenizer.is_inside_character
        assert detokenizer.flush() == ""


def test_a_tokenizer_of_word_pieces_is_read_by_windows() -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = {"[UNK]": 0, "play": 1, "##ing": 2, "well": 3}
    backend = Tokenizer(models.WordPiece(vocab=words, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    assert BytePieces.of(wrapped) is None
    detokenizer = TextMaker(wrapped).start([3])
    assert pushed(detokenizer, [1, 2, 3]) == [" play", "ing", " well"]


def test_a_single_token_is_printed_with_its_bytes() -> None:
    maker = TextMaker(tokenizer("byte-level"))
    assert maker.token(FIRST_BYTE + 0xC3) == ("\ufffd", b"\xc3")
    assert maker.token(FIRST_BYTE + ord("a")) == ("a", b"a")
    assert maker.token(EOS) == ("<eos>", b"<eos>")
