"""Reading a server's /metrics: every sample by its name, and what those of a Halocline server say of its arena."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

ARENA_BYTES = "halocline_arena_total_bytes"
POOL_BYTES = "halocline_arena_pool_bytes"
CACHED = "cached"


async def read_figures(url: str) -> dict[str, float]:
    """Return all figures of a server's /metrics by `name` or `name{value,value}`, values in order of their labels."""
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        return figures_of((await client.get("/metrics")).text)


def figures_of(text: str) -> dict[str, float]:
    """Return the samples of an exposition by `name` or `name{value,value}`; ValueError when it is none."""
    return {
        sample.name + ("{" + ",".join(sample.labels.values()) + "}" if sample.labels else ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@dataclass(frozen=True, slots=True)
class ArenaLook:
    """Where the bytes of a server's arena were at one moment."""

    total: float
    free: float
    holes: float
    held: Mapping[str, float]
    """By pool: what requests hold or lock, and what is in transfer."""
    cached: Mapping[str, float]
    """By pool."""


def arena_of(figures: Mapping[str, float]) -> ArenaLook | None:
    """Return the arena that a server's figures tell of; None when it is no Halocline server, or its engine is gone."""
    if ARENA_BYTES not in figures:
        return None
    held: dict[str, float] = {}
    cached: dict[str, float] = {}
    for name, value in figures.items():
        if name.startswith(f"{POOL_BYTES}{{"):
            owner, _, pool = name.removeprefix(f"{POOL_BYTES}{{").removesuffix("}").partition(",")
            pools = cached if owner == CACHED else held
            pools[pool] = pools.get(pool, 0) + value
    return ArenaLook(
        figures[ARENA_BYTES],
        figures.get("halocline_arena_free_bytes", 0),
        figures.get("halocline_arena_holes_bytes", 0),
        held,
        cached,
    )
