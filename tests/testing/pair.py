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
from testing.models import tiny_tokenizer
from testing.server import LiveServer, live_server

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
