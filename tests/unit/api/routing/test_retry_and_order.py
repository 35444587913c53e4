"""Small tables: what is tried again, what is read of a request, what a router can be asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halocline.api.routing.order import MOST_OUTPUT_TOKENS, NO_LOAD, UNKNOWN_OUTPUT_TOKENS, load_of
from halocline.api.routing.retry import Attempts, Fault, fault_of_answer, fault_of_event
from halocline.api.routing.settings import RouteSettings
from halocline.errors import ConfigError
from halocline.route import TOKEN_VARIABLE, link_token_of


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (503, "engine_unavailable", "engine"),
        (503, "prefill_lost", "prefill"),
        (429, "overloaded", "overloaded"),
        (503, None, None),
        (500, "prefill_lost", None),
        (500, "request_failed", None),
        (400, "overloaded", None),
        (200, "overloaded", None),
    ],
)
def test_only_faults_that_another_worker_may_not_have_are_tried_again(
    status: int, code: str | None, kind: str | None
) -> None:
    fault = fault_of_answer(status, code, "words")
    assert (fault.kind if fault else None) == kind
    event = fault_of_event(code, "words")
    assert event is None or event.kind in ("engine", "prefill", "overloaded")


def test_a_lost_prompt_excludes_its_prefill_worker_and_every_other_fault_the_decode_worker() -> None:
    attempts = Attempts(4)
    attempts.failed(Fault("prefill", ""), "d", "p")
    assert (attempts.without, attempts.can_prefill, attempts.may_retry) == ({"p"}, True, True)
    attempts.failed(Fault("broken", ""), "d", "p2")
    assert attempts.without == {"p", "d"}
    attempts.failed(Fault("prefill", ""), "d2", "p2")
    assert (attempts.can_prefill, attempts.may_retry) == (False, True), "the last attempt depends on one worker only"
    attempts.failed(Fault("prefill", ""), "d2", None)
    assert attempts.without == {"p", "d", "p2", "d2"}
    assert not attempts.may_retry


def test_the_prompt_is_read_wherever_it_stands_in_the_body() -> None:
    one = load_of(b'{"prompt": "abc", "max_tokens": 3}')
    other = load_of(b'{"temperature": 0, "max_tokens": 3, "prompt":   "abc", "n": 1}')
    assert one == other
    assert one.beginning.prompt_bytes == 5


def test_conversations_that_go_on_begin_alike() -> None:
    first: list[dict[str, str]] = [{"role": "user", "content": "x" * 1000}]
    turns = [*first, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and?"}]
    marks = [load_of(json.dumps({"messages": each}).encode()).beginning.marks for each in (first, turns)]
    assert len(marks[0]) == 4
    assert marks[0] == marks[1][:4]


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({}, UNKNOWN_OUTPUT_TOKENS),
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 8, "n": 3}, 24),
        ({"max_tokens": 10**9}, MOST_OUTPUT_TOKENS),
        ({"prompt": "x" * 398, "max_tokens": 0}, 100),
        ({"max_tokens": -5, "n": -1}, 0),
    ],
)
def test_what_a_request_may_need_is_guessed_from_its_body(body: dict[str, Any], tokens: int) -> None:
    assert load_of(json.dumps(body).encode()).tokens == tokens


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"max_tokens": "x"}', b"\xff", b"[" * 100_000])
def test_a_body_that_cannot_be_read_means_no_load(body: bytes) -> None:
    assert load_of(body) == NO_LOAD


def test_settings_split_lists_and_drop_the_path_that_clients_add() -> None:
    settings = RouteSettings(decode=("http://a:1, http://b:2/", "http://c:3/v1"), prefill=("http://d",))
    assert settings.decode == ("http://a:1", "http://b:2", "http://c:3")
    assert settings.prefill == ("http://d",)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "no decode worker"),
        ({"decode": ("a:1",)}, "'a:1' is no worker's address"),
        ({"decode": ("http://a:99999",)}, "is no worker's address"),
        ({"decode": ("http://a/x",)}, "is no worker's address"),
        ({"decode": ("http://u:p@a",)}, "holds no name and password"),
        ({"decode": ("http://a,http://a",)}, "decode names http://a twice"),
        ({"decode": ("http://a",), "attempts": 0}, "attempts is 0; it must be from 1 to 16"),
        ({"decode": ("http://a",), "log_level": "loud"}, "log_level is 'loud'"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_a_sentence(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RouteSettings(**given)


def test_all_problems_are_listed_at_once_and_no_secret_is_printed() -> None:
    with pytest.raises(ConfigError) as caught:
        RouteSettings(prefill=("x",), port=-1)
    assert len(caught.value.problems) == 3
    assert "s3cret" not in repr(RouteSettings(decode=("http://a",), api_key="s3cret", link_token="s3cret"))


def test_the_token_comes_from_the_flag_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("of-file\n")
    monkeypatch.setenv(TOKEN_VARIABLE, "of-environment")
    assert link_token_of("of-flag") == "of-flag"
    assert link_token_of(f"@{tmp_path / 'token'}") == "of-file"
    assert link_token_of(None) == "of-environment"
    monkeypatch.delenv(TOKEN_VARIABLE)
    for text, words in ((None, "no link token"), ("@/no/such", "cannot read"), ("a\nb", "printable")):
        with pytest.raises(ConfigError, match=words):
            link_token_of(text)
