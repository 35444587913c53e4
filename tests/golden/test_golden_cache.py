"""The cache's tables: each match once by the tree and once by a search without one; and in which order units die.

`PYTHONPATH=tests python tests/golden/test_golden_cache.py` writes the order of eviction anew.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from halocline.cache.keys import token_key
from halocline.cache.node import TOMBSTONE, Node
from halocline.memory.demand import Demand
from halocline.memory.evictable import NO_UNIT
from halocline.memory.grant import NO_HANDLES, Handles, Order, Refusal
from halocline.memory.pool import INDEX_MASK
from halocline.memory.retention import Chunked, Full, Positional, Retention, Sliding, State
from testing.cache import CacheWorld, arena_of
from testing.golden import Row, rows, table, write

OTHER = 1_000_000


def pools_of(row: Row) -> list[tuple[Retention, int]]:
    pools: list[tuple[Retention, int]] = []
    for name in row["pools"].split():
        kind, page_tokens = name.split("/")
        word, _, reach = kind.partition("-")
        retention = {"full": Full, "state": State}.get(word)
        made = retention() if retention else {"sliding": Sliding, "chunked": Chunked}[word](int(reach))
        pools.append((made, int(page_tokens)))
    return pools


def gone_of(row: Row) -> list[tuple[int, int, bool]]:
    """Return (pool, page or tokens, whether it is a checkpoint) of what is gone."""
    names = [] if row["gone"] == "-" else row["gone"].split()
    parted = [(name.replace("@", ":").split(":"), "@" in name) for name in names]
    return [(int(pool), int(at), is_state) for (pool, at), is_state in parted]


def world_of(row: Row) -> CacheWorld:
    pools = pools_of(row)
    world = CacheWorld(arena_of(*((kind, tokens, 1) for kind, tokens in pools), slabs=200))
    granule = world.tree.shape.granule_tokens
    if int(row["cached"]):
        has_states = any(isinstance(kind, State) for kind, _ in pools)
        world.serve(range(int(row["cached"])), chunk=granule if has_states else 1 << 30)
    for pool, at, is_state in gone_of(row):
        nodes = sorted(world.tree.forest.nodes.values(), key=lambda node: node.start)
        if is_state:
            (handles,) = [node.pages[pool].copy() for node in nodes if node.end * granule == at]
        else:
            handles = np.concatenate([node.pages[pool] for node in nodes])[at : at + 1]
        handles = handles[handles != TOMBSTONE]  # what no boundary reads was never kept
        world.arena.evict(pool, handles)
        world.forget([handles if number == pool else NO_HANDLES for number in range(len(pools))])
    world.check()
    return world


def searched(row: Row) -> int:
    """Return the boundary by looking at every position, in no tree."""
    pools, gone = pools_of(row), gone_of(row)
    granule = max(tokens for _, tokens in pools)
    best = 0
    for boundary in range(granule, min(int(row["L"]) - 1, int(row["agrees"]), int(row["cached"])) + 1, granule):
        able = True
        for pool, (kind, page_tokens) in enumerate(pools):
            if isinstance(kind, Positional):
                pages = {position // page_tokens for position in range(kind.first_needed(boundary), boundary)}
                able &= not any(pool == p and not is_state and at in pages for p, at, is_state in gone)
            else:
                able &= (pool, boundary, True) not in gone
        best = boundary if able else best
    return best


@table("matches.md", "Boundaries")
def test_a_match_is_as_tabled(row: Row) -> None:
    world = world_of(row)
    agrees, length = int(row["agrees"]), int(row["L"])
    prompt = [*range(min(agrees, length)), *range(OTHER, OTHER + length - min(agrees, length))]
    found = world.tree.match(token_key(prompt))
    assert (found.boundary_tokens, found.reason) == (int(row["boundary"]), row["reason"])
    assert found.boundary_tokens == searched(row)
    runner = world.enter(prompt)
    assert runner is not None
    assert row["full"] == ("-" if not world.tree.locks.full else str(runner.lock.full_tokens))
    world.check()


# ---- the order of eviction

SESSIONS = {"A": 100, "B": 200, "C": 300, "D": 400}


def prompt_of(row: Row) -> list[int]:
    """Return the tokens of a session: its own prefix, then those of this turn."""
    first = SESSIONS[row["session"]] * 1000
    return [*range(first, first + int(row["prefix"])), *range(OTHER * int(row["turn"]), OTHER * int(row["turn"]) + 5)]


def lived() -> tuple[CacheWorld, dict[str, list[int]]]:
    """Let the requests of the history live one after another; return the world and the prefixes by session."""
    world = CacheWorld(arena_of((Full(), 4, 5), (Sliding(9), 4, 1), slabs=100), 4)
    prefixes: dict[str, list[int]] = {}
    for row in rows("eviction_order.md", "History"):
        prompt = prompt_of(row)
        hit = world.serve(prompt, output=int(row["output"]))
        assert hit == int(row["hit"]), f"turn {row['turn']} hits {hit}"
        prefixes[row["session"]] = prompt[: int(row["prefix"])]
    return world, prefixes


class Names:
    """What the tree's pages are called before they die."""

    def __init__(self, world: CacheWorld, prefixes: dict[str, list[int]]) -> None:
        self.pages: dict[tuple[int, int], tuple[str, int]] = {}
        self.whys: dict[tuple[int, int], str] = {}
        keys = {name: token_key(prefix).data for name, prefix in prefixes.items()}
        for node in world.tree.forest.nodes.values():
            name = self._session(node, keys)
            for pool, handles in enumerate(node.pages):
                held = [(at, handle) for at, handle in enumerate(handles.tolist(), node.start) if handle != TOMBSTONE]
                for number, handle in held:
                    self.pages[pool, handle] = name, number
                    self.whys[pool, handle] = self._why(world, pool, handle, name)

    def _session(self, node: Node, keys: dict[str, bytes]) -> str:
        path = b"".join(above.key for above in node.path())
        (name,) = [name for name, data in keys.items() if path.startswith(data[:16])]
        return name

    def _why(self, world: CacheWorld, pool: int, handle: int, name: str) -> str:
        unit = world.arena.ranking.member[pool].item(handle & INDEX_MASK)
        if unit == NO_UNIT:
            return "no tail keeps it"
        for mark in world.tree.marks.marks.values():
            if mark.tail is not None and mark.tail.id == unit:
                rank = "proven" if mark.proven else "returned" if mark.returned else "unproven"
                return f"{rank} tail at {name} {mark.node.end * 4}"
        return f"end of {name}"

    def say(self, pool: int, handles: Handles) -> str:
        """Name pages of one pool by session and page numbers, in order."""
        named: dict[str, list[int]] = {}
        for handle in handles.tolist():
            session, number = self.pages[pool, handle]
            named.setdefault(session, []).append(number)
        return ", ".join(f"{name} {' '.join(map(str, sorted(pages)))}" for name, pages in sorted(named.items())) or "-"


def deaths() -> Iterator[Row]:
    """Take one slab after another until nothing is cached; say what dies for it, and why it is its turn."""
    world, prefixes = lived()
    slab = 0
    while any(world.arena.budget.cached):
        names = Names(world, prefixes)
        grant = world.arena.reserve("another", Demand((0, 1)))
        assert not isinstance(grant, Refusal)
        died = list(world.arena.commit([Order(grant, grant.demand)]).evicted)
        beyond = world.tree.forget(died)
        world.check()
        every = [np.concatenate(parts) for parts in zip(died, beyond, strict=True)]
        if not any(map(len, every)):
            continue
        slab += 1
        whys = sorted({names.whys[pool, handle] for pool, of_pool in enumerate(every) for handle in of_pool.tolist()})
        yield {
            "slab": str(slab),
            "full": names.say(0, every[0]),
            "sliding": names.say(1, every[1]),
            "why": ", ".join(whys),
        }


def test_units_die_in_the_order_that_is_tabled() -> None:
    assert list(deaths()) == rows("eviction_order.md", "Order")


@pytest.mark.parametrize("wanted", ["no tail keeps it", "unproven tail", "proven tail", "end of"])
def test_the_table_shows_every_kind_of_choice(wanted: str) -> None:
    whys = [why for row in rows("eviction_order.md", "Order") for why in row["why"].split(", ")]
    assert any(why.startswith(wanted) for why in whys)


if __name__ == "__main__":
    write("eviction_order.md", "Order", list(deaths()))
