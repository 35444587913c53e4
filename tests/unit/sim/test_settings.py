"""What `halocline replay` can be asked: every field has its check, and the command says again what was asked."""

from __future__ import annotations

import shlex
from dataclasses import fields
from typing import Any

import pytest

from halocline.errors import ConfigError
from halocline.sim.settings import ReplaySettings, parse_audit, parse_window
from halocline.units import GIB, parse_seconds


def settings(**changes: Any) -> ReplaySettings:
    return ReplaySettings(**({"trace": "t.jsonl", "model": "gemma-3-27b", "kv_bytes": "60GiB"} | changes))


def test_texts_become_typed_values() -> None:
    asked = settings(
        policy=("shared,static:0.8", " full ", "shared"),
        admission="guaranteed",
        page_tokens="full=16",
        ttft_limit="1.5 s",
        tpot_limit="50ms",
        audit="every",
        perfetto="x",
        window="7:9",
    )
    assert asked.policies == ("shared", "static:0.8", "full")
    assert asked.kv_budget_bytes == 60 * GIB
    assert asked.admission_rule == ("guaranteed",)
    assert asked.page_tokens_rule == {"full": 16}
    assert (asked.ttft_limit_seconds, asked.tpot_limit_seconds) == (1.5, 0.05)
    assert asked.audit_every == 1
    assert asked.window_steps == (7, 9)


def test_without_a_trace_file_no_steps_are_kept() -> None:
    assert settings().window_steps is None
    assert settings(perfetto="x").window_steps == (0, 1000)


def test_the_command_says_what_differs_from_the_defaults_and_no_secret() -> None:
    asked = settings(
        trace="a file.jsonl", policy=("shared", "full"), saturated=True, known_lengths=False, requests=5, seed=7
    )
    assert asked.command == (
        "halocline replay 'a file.jsonl' --model gemma-3-27b --kv-bytes 60GiB --policy shared,full --saturated "
        "--requests 5 --no-known-lengths --seed 7"
    )
    live = ReplaySettings(trace="t", server="http://x", api_key="secret")
    assert live.command == "halocline replay t --server http://x"
    assert shlex.split(live.command)[1] == "replay"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10s", 10.0), ("100ms", 0.1), ("2 min", 120.0), ("0.5", 0.5), (3, 3.0), ("250us", 0.00025), ("1h", 3600.0)],
)
def test_durations_are_read_with_their_units(text: str | float, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "-1s", "10 parsecs", "1e3"])
def test_what_is_no_duration_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="10s, 100ms or 2min"):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step_tokens": 1}, "step_tokens is 1; it must be from 2 to 16777216"),
        ({"step_tokens": 10**30}, "from 2 to 16777216"),
        ({"leap": 2**31}, "leap is 2147483648"),
        ({"processes": 10**6}, "from 1 to 4096"),
        ({"seed": -1}, "seed is -1"),
        ({"time_scale": float("nan")}, "time_scale is nan"),
        ({"time_scale": 1e-320}, "from 1e-06"),
        ({"kv_bytes": "1.5"}, "kv_bytes: '1.5' is a fraction of a byte"),
        ({"kv_bytes": "0"}, "kv_bytes: 0 is 0 bytes"),
        ({"host_bytes": "2.5B"}, "host_bytes: '2.5B' is a fraction"),
        ({"host_bytes": "9000000TiB"}, "more bytes than any machine has"),
        ({"ttft_limit": "9" * 400}, "ttft_limit: cannot read"),
        ({"ttft_limit": "1000000h"}, "ttft_limit: '1000000h' is out of bounds"),
        ({"audit": "9" * 30}, "write a number of steps"),
        ({"requests": 0}, "requests is 0"),
        ({"time_scale": float("inf")}, "time_scale is inf"),
        ({"prefix_cache": "yes"}, "write on or off"),
        ({"tpot_limit": "0"}, "tpot_limit: '0' is out of bounds"),
        ({"admission": "expected:2"}, "admission is 'expected:2'"),
        ({"page_tokens": "3"}, "page_tokens"),
        ({"html": "x", "json": "x"}, "one is named twice: x, x"),
        ({"html": "-"}, "only --json prints"),
        ({"html": "./o/a", "json": "o/a"}, "one is named twice: o/a, ./o/a"),
        ({"perfetto": "o/../o/a", "html": "o/a"}, "one is named twice"),
        ({"json": "./t.jsonl"}, "./t.jsonl is read in this run, and a report would take its place"),
        ({"trace": "flip:60:a.jsonl|o/b.csv", "html": "o/../o/b.csv"}, "o/../o/b.csv is read in this run"),
        ({"profile": "x.toml", "device": "h200", "perfetto": "x.toml"}, "x.toml is read in this run"),
        ({"text": True}, "give --server URL as well"),
        ({"profile": "x.toml", "device": "a100"}, "device and profile"),
        ({"server": "127.0.0.1:8000", "kv_bytes": None}, "write a URL"),
        *(
            ({"server": url, "kv_bytes": None}, f"server: {url!r} is no server's address; write a URL such as http://")
            for url in (
                "http://a:99999",
                "http://a:0x",
                "http://[::1",
                "http://",
                "https:///v1",
                "http://a\x01b",
                "ftp://a",
            )
        ),
        ({"server": "http://x", "kv_bytes": None, "perfetto": "x"}, "perfetto is of the simulation"),
        ({"server": "http://x", "kv_bytes": None, "concurrency": 3}, "both --saturated and --concurrency"),
    ],
)
def test_a_value_that_cannot_work_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=r".") as caught:
        settings(**changes)
    assert len(caught.value.problems) == 1
    assert words in caught.value.problems[0]


@pytest.mark.parametrize("text", ["", "5", "5:5", "9:5", "a:b", "1:2:3", "-1:4", "٣:٤", "1:1_0", "1:" + "9" * 30])
def test_a_window_is_two_rising_steps(text: str) -> None:
    with pytest.raises(ValueError, match="1000:1200"):
        parse_window(text)


def test_an_audit_is_a_number_of_steps_or_a_word() -> None:
    assert [parse_audit(text) for text in ("off", "every", "500")] == [0, 1, 500]


def test_every_setting_has_its_help() -> None:
    assert all(len(each.metadata["help"]) > 10 for each in fields(ReplaySettings))
