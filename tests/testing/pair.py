"""Two real workers: each an engine process and a live HTTP server before it, joined by a real link.

with pair(base, prefill={...}, decode={...}) as (prefill, decode):
    decode.run(decode.client.submit(prompt, params, prefill_at=link_of(prefill)))
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx

from halocline.compose import prepare
from halocline.config import Config
from halocline.model.chat import chat_template
from halocline.units import ceil_div, floor_to
from testing.models import tiny_tokenizer
from testing.server import LiveServer, live_server, wait_until

TOKEN = "the secret of this group"


@contextmanager
def worker(config: Config) -> Iterator[LiveServer]:
    """Start one worker; the secret is set."""
    prepared = prepare(replace(config, link_token=TOKEN), quiet=True)
    with live_server(spec=prepared.spec, chat=chat_template(tiny_tokenizer()), link_token=TOKEN) as live:
        yield live


@contextmanager
def pair(
    base: Config, prefill: Mapping[str, Any] | None = None, decode: Mapping[str, Any] | None = None
) -> Iterator[tuple[LiveServer, LiveServer]]:
    """Start a prefill and a decode worker that differ from `base` by these settings."""
    with (
        worker(replace(base, role="prefill", **(prefill or {}))) as first,
        worker(replace(base, role="decode", **(decode or {}))) as second,
    ):
        yield first, second


def link_of(server: LiveServer) -> str:
    """Return the address at which a worker takes links."""
    link = server.client.hello.link
    assert link is not None, "the worker belongs to a group"
    return link.address


def metrics(server: LiveServer) -> dict[str, float]:
    """Scrape /metrics: `name{label=value}` to number."""
    return parse(httpx.get(f"{server.url}/metrics").text)


def parse(text: str) -> dict[str, float]:
    found = re.findall(r"^([a-z_]+(?:\{.*?\})?) (\S+)$", text, re.MULTILINE)
    return {name.replace('"', ""): float(value) for name, value in found}


class Client:
    """Asks the decode worker as a router would."""

    def __init__(self, prefill: LiveServer, decode: LiveServer) -> None:
        self.headers = {"x-halocline-prefill": link_of(prefill), "x-halocline-link-token": TOKEN}
        self.http = httpx.Client(base_url=decode.url, timeout=60)

    def ask(self, prompt: list[int] | str, tokens: int, **fields: Any) -> tuple[list[int], dict[str, Any]]:
        """Return the tokens of an answer and its usage."""
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "return_token_ids": True, **fields}
        answer = self.http.post("/v1/completions", json=body, headers=self.headers)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["token_ids"], answer.json()["usage"]


def page_exact_bytes(decode: LiveServer, prompt_tokens: int, start: int, window_tokens: int) -> int:
    """Return the bytes of the pages that must travel."""
    capacity = decode.client.hello.capacity
    assert capacity is not None, "the engine has a real arena"
    total = 0
    for pool in capacity.pools:
        begin = start
        if pool.name != "full":
            begin = max(start, floor_to(max(0, prompt_tokens - window_tokens + 1), pool.page_tokens))
        total += (ceil_div(prompt_tokens, pool.page_tokens) - begin // pool.page_tokens) * pool.page_bytes
    return total


def check_bytes(prefill: LiveServer, decode: LiveServer, exact: int) -> None:
    """Compare what both sides counted with what had to travel."""
    wait_until(lambda: not decode.snapshot.has_work and not prefill.snapshot.has_work, "both workers to be idle")
    there, here = metrics(prefill), metrics(decode)
    assert here["halocline_transfer_received_page_bytes_total"] == exact
    assert there["halocline_transfer_sent_page_bytes_total"] == exact
    wire = here["halocline_transfer_received_bytes_total"] + here["halocline_transfer_sent_bytes_total"]
    assert exact < wire <= 1.02 * exact
