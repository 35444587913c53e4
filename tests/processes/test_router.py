"""A router before real workers: what they say of themselves is what it reads, and its answers are generate's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from halocline.api.routing.app import create_router_app
from halocline.api.routing.desk import Desk
from halocline.api.routing.settings import RouteSettings
from halocline.api.server import Server, listen
from halocline.config import Config
from testing.models import reference_tokens, save_tiny, tiny_model, tiny_prompt
from testing.pair import TOKEN, metrics, pair
from testing.server import LiveServer

TOKENS = 6


async def ask_all(prefill: LiveServer, decode: LiveServer, prompts: list[list[int]]) -> list[list[int]]:
    """Return what a router over two workers answers to each prompt, all asked at once."""
    desk = Desk(RouteSettings(prefill=(prefill.url,), decode=(decode.url,), probe_timeout_seconds=60), TOKEN)
    await desk.start()
    assert [(each.state, each.reason) for each in desk.book.workers] == [("up", ""), ("up", "")]
    for each in desk.book.workers:
        assert each.report is not None
        # Idle, but for the floor, of which its first figures tell.
        assert 0.9 * each.report.total_bytes < each.free_bytes <= each.report.total_bytes
        assert each.report.token_bytes > 0
    server = Server(create_router_app(desk), desk, listen("127.0.0.1", 0))
    serving = asyncio.create_task(server.serve())
    host, port = server.address
    body = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    try:
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=120) as http:
            answers = await asyncio.gather(
                *(http.post("/v1/completions", json=body | {"prompt": prompt}) for prompt in prompts)
            )
    finally:
        server.stop()
        await serving
        await desk.close()
    assert [each.status_code for each in answers] == [200] * len(prompts), [each.text for each in answers]
    return [each.json()["choices"][0]["token_ids"] for each in answers]


def test_prompts_are_computed_on_one_worker_and_answers_on_the_other(tmp_path: Path) -> None:
    base = Config(
        model=str(save_tiny(tmp_path, "gemma3")), dtype="float64", threads=1, kv_bytes="4MiB", log_level="error"
    )
    prompts = [tiny_prompt(length, seed=length) for length in (40, 130, 300)]
    expected = [reference_tokens(tiny_model("gemma3"), prompt, TOKENS) for prompt in prompts]
    with pair(base) as (prefill, decode):
        assert asyncio.run(ask_all(prefill, decode, prompts)) == expected
        decode.wait_idle()
        prefill.wait_idle()
        assert metrics(decode)["halocline_transfer_received_total"] == len(prompts)
