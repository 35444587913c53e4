"""G1 with real processes: how many retracted requests come back into exactly so many pages.

A prefill and a decode worker, a model with as many full as sliding layers of equal width (W = 2047), pages of 128
tokens, so that a slab is a page in both pools; the decode worker grants nothing in advance (`decode_reserve_tokens` 0).

    1. a senior takes all pages but four (beside the floor) and goes on decoding
    2. each of four juniors gets its four pages for 512 tokens, asks for the fifth, and gives way: nobody helps it to;
       the next one, more senior than the last, comes after it
    3. the senior leaves: as many juniors come back as have their whole life of 641 tokens, five pages, granted; the
       rest waits, says why, and comes back when one of them has ended
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from halocline.config import Config
from halocline.engine.stream import TokenStream
from halocline.params import SamplingParams
from testing.models import FULL, SLIDING, reference_tokens, save_tiny, tiny_model, tiny_prompt
from testing.pair import link_of, metrics, pair
from testing.server import PATIENCE_SECONDS, LiveServer

PAGE = 128
PROMPT, END = 512, 641
OTHERS = 4
MODEL = {
    "layer_types": [SLIDING, FULL],
    "num_hidden_layers": 2,
    "sliding_window": 2047,
    "max_position_embeddings": 4096,
    # Many words make a step slow and a prompt no slower: the senior must outlast four transfers.
    "vocab_size": 100_000,
}
PAGE_BYTES = PAGE * 2 * 2 * 16 * 8
"""K and V of two heads of 16 float64 of one layer."""
POOLS = ("full", "sliding-2047")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("equal"), "gemma3", **MODEL)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What `generate` says of every junior."""
    model = tiny_model("gemma3", **MODEL)
    return [reference_tokens(model, prompt, END - PROMPT) for prompt in prompts()]


def prompts() -> list[list[int]]:
    return [tiny_prompt(PROMPT, seed=10 + number) for number in range(OTHERS)]


def config(folder: Path, pages: int, policy: str, link_kind: str) -> tuple[Config, dict[str, object]]:
    base = Config(
        model=str(folder),
        dtype="float64",
        threads=1,
        kv_bytes="64MiB",
        page_tokens=PAGE,
        step_tokens=640,
        max_running_requests=8,
        audit="every",
        log_level="error",
        link_kind=link_kind,
        lease_seconds=60.0,
    )
    own = {
        "kv_bytes": 2 * pages * PAGE_BYTES,
        "policy": policy,
        "prefix_cache": "off",
        "decode_reserve_tokens": 0,
        "max_model_len": min(2048, (pages - 1) * PAGE),
    }
    return base, own


class Reader:
    """Reads one stream in the background."""

    def __init__(self, stream: TokenStream) -> None:
        self.stream = stream
        self.tokens: list[int] = []
        self.task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        async for batch in self.stream:
            self.tokens += [each.token_id for each in batch if each.token_id is not None]

    async def has(self, tokens: int) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(self.tokens) < tokens:
            assert not self.task.done(), f"the stream ended after {len(self.tokens)} tokens: {self.task}"
            assert time.monotonic() < deadline, f"{len(self.tokens)} of {tokens} tokens came"
            await asyncio.sleep(0.002)


async def submit(server: LiveServer, prompt: list[int], new: int, priority: int, at: str) -> Reader:
    params = SamplingParams(max_tokens=new, min_tokens=new, temperature=0.0)
    stream = await server.client.submit(tuple(prompt), params, priority=priority, prefill_at=at)
    return Reader(stream)


async def retract_four(server: LiveServer, at: str, pages: int) -> tuple[Reader, list[Reader]]:
    """Let a senior and four juniors meet, until all four have given way."""
    held = pages - 1 - PROMPT // PAGE  # all but the floor and one junior's prompt
    senior = await submit(server, tiny_prompt((held - 1) * PAGE + 1), PAGE - 1, 0, at)
    await senior.has(1)
    readers = []
    for number, prompt in enumerate(prompts()):
        reader = await submit(server, prompt, END - PROMPT, OTHERS - number, at)
        # Its first token needs no page beyond its prompt's; to go on it needs the fifth.
        await reader.has(1)
        readers.append(reader)
    assert not senior.task.done(), "the senior left before the juniors had given way"
    return senior, readers


def resumed(server: LiveServer, count: int) -> dict[str, float]:
    """Wait for the figures of a moment in which so many run and hold all their pages."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        seen = metrics(server)
        if seen["halocline_requests{state=decoding}"] == count and seen["halocline_retractions_total"] >= OTHERS:
            return seen
        time.sleep(0.02)
    raise AssertionError(f"{count} requests never ran at once")


def check(folder: Path, expected: list[list[int]], pages: int, policy: str, link_kind: str, count: int) -> None:
    base, own = config(folder, pages, policy, link_kind)
    with pair(base, decode=own) as (prefill, decode):
        senior, readers = decode.run(retract_four(decode, link_of(prefill), pages))
        decode.loop.call_soon_threadsafe(senior.stream.close)
        seen = resumed(decode, count)
        left = pages - 5 * count
        if policy == "shared":
            assert seen["halocline_arena_free_bytes"] == 2 * left * PAGE_BYTES
        for pool in POOLS:
            assert seen[f"halocline_pool_pages{{pool={pool},state=live}}"] == 5 * count
            assert seen[f"halocline_pool_pages{{pool={pool},state=free}}"] == (left if policy != "shared" else 2 * left)
        assert seen["halocline_requests{state=retracted}"] == OTHERS - count
        # The first of them waits for memory, whoever is behind it for its turn.
        assert seen.get("halocline_waiting{reason=memory}", 0) == min(1, OTHERS - count)

        async def ends() -> None:
            await asyncio.wait_for(asyncio.gather(*(reader.task for reader in readers)), PATIENCE_SECONDS)

        decode.run(ends())
        assert [reader.tokens for reader in readers] == expected
        decode.wait_idle()
        prefill.wait_idle()
        end = metrics(decode)
        assert end["halocline_violations_total"] == 0
        assert end["halocline_transfer_received_total"] == OTHERS + 1


@pytest.mark.parametrize(
    ("policy", "link_kind"), [("static:1.0", "shm"), pytest.param("shared", "tcp", marks=pytest.mark.e2e)]
)
def test_exactly_three_of_four_come_back_into_18_pages_per_pool(
    folder: Path, expected: list[list[int]], policy: str, link_kind: str
) -> None:
    check(folder, expected, 18, policy, link_kind, 3)


@pytest.mark.e2e
@pytest.mark.parametrize("policy", ["static:1.0", "shared"])
@pytest.mark.parametrize(("beside_floor", "count"), [(14, 2), (15, 3), (19, 3), (20, 4)])
def test_one_page_more_or_less_decides_how_many_come_back(
    folder: Path, expected: list[list[int]], policy: str, beside_floor: int, count: int
) -> None:
    check(folder, expected, beside_floor + 1, policy, "shm", count)
