"""Tokens in, text out: stops, finish reasons, and which tokens are shown."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halocline.engine.detokenize import TextMaker
from halocline.engine.messages import Logprobs, TokenReport
from halocline.engine.sequence import SequenceText
from halocline.params import SamplingParams
from halocline.schedule.events import FinishReason
from testing.engine import EOS, byte_tokenizer, ids_of


@cache
def maker() -> TextMaker:
    return TextMaker(byte_tokenizer())


def sequence(**params: object) -> SequenceText:
    return SequenceText(maker(), [5], SamplingParams(**params))  # type: ignore[arg-type]


def reports(text: str | bytes, finish: FinishReason | None = None, *, eos: bool = False) -> list[TokenReport]:
    ids = ids_of(text) + [EOS] * eos
    made = [TokenReport("a", each, Logprobs(-1.0, 1, ())) for each in ids]
    if finish is not None:
        made[-1] = TokenReport("a", ids[-1], Logprobs(-1.0, 1, ()), finish)
    return made


def test_the_end_of_sequence_token_is_counted_and_has_no_text() -> None:
    text = sequence()
    delta = text.take(reports("hé", "stop", eos=True))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("hé", "stop", None)
    assert delta.token_ids == (*ids_of("hé"), EOS)
    assert len(delta.logprobs) == len(delta.token_ids)
    assert text.completion_tokens == 4


def test_a_stop_token_is_left_out_and_named() -> None:
    text = sequence(stop_token_ids=[ids_of("!")[0]])
    delta = text.take(reports("hey!", "stop"))
    assert (delta.text, delta.stop_reason) == ("hey", ids_of("!")[0])


def test_the_last_token_of_a_limited_output_belongs_to_it() -> None:
    assert sequence().take(reports("hey!", "length")).text == "hey!"


def test_what_was_held_for_a_stop_is_shown_when_the_output_ends() -> None:
    text = sequence(stop=["END"])
    assert text.take(reports("the EN")).text == "the "
    delta = text.take(reports("x", "length"))
    assert (delta.text, delta.finish_reason) == ("ENx", "length")


def test_tokens_after_a_stop_string_are_dropped() -> None:
    text = sequence(stop=["END"])
    delta = text.take(reports("ab END and more"))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("ab ", "stop", "END")
    assert text.completion_tokens == len("ab END")


def test_a_stop_string_ends_the_text_even_in_the_very_last_token() -> None:
    delta = sequence(stop=["END"]).take(reports("ab END", "length"))
    assert (delta.text, delta.finish_reason) == ("ab ", "stop")


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    text = sequence(stop=["b"], min_tokens=3)
    assert text.take(reports("abc")).text == "abc"
    assert text.take(reports("ab")).text == "a"


def test_an_abort_brings_no_token() -> None:
    text = sequence()
    text.take(reports("ab"))
    delta = text.take([TokenReport("a", None, None, "abort")])
    assert (delta.text, delta.finish_reason, delta.token_ids) == ("", "abort", ())
    with pytest.raises(AssertionError, match="after the finish reason"):
        text.take(reports("c"))


@given(data=st.data())
def test_tokens_are_released_exactly_with_their_text(data: st.DataObject) -> None:
    whole = data.draw(st.text(alphabet="abé你😀", max_size=12))
    stop = data.draw(st.sampled_from(["ba", "é", "你a", "😀😀"]))
    text = sequence(stop=[stop], logprobs=0)
    shown, tokens = "", b""
    for report in reports(whole):
        delta = text.take([report])
        shown += delta.text
        for token in delta.tokens:
            assert token.start == len(tokens.decode(errors="ignore")), "a token begins where the text before it ends"
            tokens += token.data or b""
        assert tokens == shown.encode(), "the tokens shown are those of the text shown, not one more"
        if delta.finish_reason is not None:
            break
    assert stop not in shown
    assert shown == whole.split(stop)[0] if stop in whole else whole.startswith(shown)


def test_half_a_character_of_a_stop_is_not_shown_as_a_token() -> None:
    text = sequence(stop=["😀"], logprobs=0)
    delta = text.take(reports("a😀"))
    assert [token.text for token in delta.tokens] == ["a"]
