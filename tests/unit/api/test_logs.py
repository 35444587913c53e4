"""The log: one line per event, key=value, with the request's id; no prompt text and no secrets."""

from __future__ import annotations

import logging
import re

import httpx
import msgspec
import pytest

from testing.engine import fake_spec
from testing.server import live_server

SECRET, PROMPT = "sesame-7391", "zebra-prompt-5527"
LINE = re.compile(r'event=\w+( \w+=("(\\.|[^"\\])*"|\'(\\.|[^\'\\])*\'|\S+))*')


def test_lines_are_events_and_hold_neither_prompts_nor_keys(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG, logger="halocline")
    spec = msgspec.structs.replace(fake_spec(reply="{prompt}"), log_level="debug")
    with (
        live_server(spec=spec, api_key=SECRET) as server,
        httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {SECRET}"}) as http,
    ):
        done = http.post("/v1/completions", json={"prompt": PROMPT}).json()["id"]
        http.post("/v1/completions", json={"prompt": PROMPT + "FAIL"})
        http.post("/v1/completions", json={"prompt": PROMPT, "stop": [PROMPT, ""]})
        http.post("/v1/completions", json={"prompt": {PROMPT: PROMPT}, PROMPT: 1})
        http.post("/v1/chat/completions", json={"messages": [{"role": PROMPT, "content": PROMPT}]})
        http.post("/v1/completions", json={"prompt": PROMPT}, headers={"authorization": f"Bearer {SECRET}x"})
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("halocline")]
    assert all(LINE.fullmatch(line) for line in lines), lines
    everything = "\n".join(lines) + "".join(capfd.readouterr())
    assert PROMPT not in everything
    assert SECRET not in everything
    assert f"event=request_start request={done}-0 prompt_tokens={len(PROMPT)} " in everything
    tokens = len(PROMPT) + 1
    assert re.search(rf"event=request_end request={done}-0 reason=stop .*completion_tokens={tokens} ", everything)
    assert re.search(r"event=refused request=req-\w+ route=completions status=401 code=invalid_api_key ", everything)
    assert re.search(r"event=refused request=req-\w+ route=chat status=400 code=None param=messages", everything)


def test_settings_do_not_stand_on_the_command_line() -> None:
    import psutil

    with live_server(reply=SECRET) as server:
        assert server.client.pid is not None
        assert SECRET not in " ".join(psutil.Process(server.client.pid).cmdline())
