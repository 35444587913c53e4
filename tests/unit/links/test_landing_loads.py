"""What the host's level of a prefix cache has does not travel: two real workers, real links, a tiny model.

A prompt is received, decoded and cached; others drive it out, and it is written to the host. When it comes again with
some tokens more, only what follows is on the wire, and what was loaded is missing there to the byte.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from halocline.config import Config
from testing.group import Asked, group, leftovers, together
from testing.models import reference_tokens, save_tiny, tiny_model, tiny_prompt

TOKENS = 6
FIRST = tiny_prompt(150, seed=1)
AGAIN = [*FIRST, *tiny_prompt(30, seed=2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("host"), "gemma3")


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return reference_tokens(tiny_model("gemma3"), AGAIN, TOKENS)


def asked(name: str, prompt: list[int], prefill_at: str = "") -> Asked:
    return Asked(name, prompt, TOKENS, "decode", prefill_at)


def second_time(folder: Path, link_kind: str, host_bytes: str) -> tuple[list[int], int, int, int]:
    """Return the tokens of AGAIN, the bytes of pages and all bytes that it took on the wire, and what was loaded."""
    base = Config(
        model=str(folder),
        dtype="float64",
        threads=1,
        kv_bytes="700KiB",
        step_tokens=96,
        max_running_requests=4,
        link_kind=link_kind,
        page_tokens=16,
    )
    configs = {
        "decode": replace(base, role="decode", host_bytes=host_bytes),
        "prefill": replace(base, role="prefill", kv_bytes="4MiB"),
    }
    with group(configs) as made:
        decode = made["decode"]
        together(made, [asked("first", FIRST, "prefill")])
        for number in range(6):
            together(made, [asked(f"crowd {number}", tiny_prompt(200, seed=10 + number))])
        pages, everything = decode.transfers["received_page_bytes"], decode.transfers["received_bytes"]
        before = decode.scheduler.figures().cache
        tokens = together(made, [asked("again", AGAIN, "prefill")])["again"]
        figures = decode.scheduler.figures().cache
        assert before is not None
        assert figures is not None
        loaded = 0
        if figures.tier is not None and before.tier is not None:
            loaded = figures.tier.loaded_bytes - before.tier.loaded_bytes
            assert figures.tier.hit_tokens - before.tier.hit_tokens == figures.hit_tokens - before.hit_tokens
        assert [leftovers(worker) for worker in made.values()] == [[], []]
        wire = decode.transfers["received_bytes"] - everything
        return tokens, decode.transfers["received_page_bytes"] - pages, wire, loaded


@pytest.mark.parametrize("link_kind", ["shm", pytest.param("tcp", marks=pytest.mark.e2e)])
def test_the_bytes_on_the_wire_fall_by_what_was_loaded(folder: Path, expected: list[int], link_kind: str) -> None:
    plain, pages, wire, none = second_time(folder, link_kind, "0")
    tokens, fewer_pages, less_wire, loaded = second_time(folder, link_kind, "4MiB")
    assert plain == tokens == expected
    assert none == 0 < loaded
    assert pages - fewer_pages == loaded
    assert wire - less_wire >= loaded
