"""Ways to divide the arena's bytes between the kinds of memory, over the shipped arena and scheduler.

    shared           one arena, as the program has it
    static:R[:S]     a cap per pool (`halocline.memory.sizing.static_caps`), as `--policy` of the server has it
    equal-pages      every kind padded to one page size, kinds cut into groups of equally many layers
    full             every layer keeps every position: one pool

The first two are the program's own. The last two are what other engines do, laid out as they lay it out and then served
by the same scheduler: what differs between two runs is the layout and the caps, never the code that decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from halocline.config import parse_policy
from halocline.errors import ConfigError
from halocline.memory.arena import Arena
from halocline.memory.demand import Demand
from halocline.memory.layout import ArenaLayout, LayerKV, PoolLayout, solve_layout
from halocline.memory.retention import Full, Retention, State, describe
from halocline.memory.sizing import Caps, static_caps
from halocline.units import ceil_div, ceil_to

Layers = Sequence[LayerKV]
PageTokens = Mapping[str, int] | int | None
"""Positions per page: of all pools, or of some by name; what is not set is solved."""

EQUAL_PAGE_TOKENS = 16
"""Page length of equal pages where none is set: the usual one of engines that have them."""
STRIDE_UNIT_BYTES = 64


@dataclass(frozen=True)
class Policy:
    """How an arena is cut and split. `name` is as `policy_named` takes it."""

    name: str
    lay_out: Callable[[Layers, int, PageTokens], ArenaLayout]
    """(layers, budget bytes, page tokens) -> layout; raises ConfigError as `solve_layout`."""
    split: Callable[[ArenaLayout], Caps | None] = lambda layout: None
    """The most slabs per pool; None: as many as there are."""

    def make(self, layers: Layers, budget_bytes: int, page_tokens: PageTokens = None) -> Arena:
        """Return the policy's arena of so many bytes."""
        layout = self.lay_out(layers, budget_bytes, page_tokens)
        return Arena(layout, self.split(layout))


def policy_named(text: str) -> Policy:
    """Return the policy `shared`, `static:R`, `static:R:S`, `equal-pages` or `full`; ConfigError with these otherwise.

    `static:R` gives each window pool R times the full pool's tokens; `static:R:S` also gives the state pool S bytes per
    byte of the others.
    """
    if text == FULL.name:
        return FULL
    if text == EQUAL_PAGES.name:
        return EQUAL_PAGES
    try:
        rule = parse_policy(text)
    except ValueError as error:
        raise ConfigError([f"{error}; a replay also knows equal-pages and full"]) from error
    if rule[0] == "shared":
        return SHARED
    ratios = rule[1:]
    return Policy(text, solve_layout, lambda layout: static_caps(layout, *ratios))


SHARED = Policy("shared", solve_layout)


# ---- every layer at full length


def all_full(layers: Layers) -> tuple[LayerKV, ...]:
    """Return the layers as if no position were ever given up; states stay what they are."""
    return tuple(layer if isinstance(layer.retention, State) else replace(layer, retention=Full()) for layer in layers)


def by_full(layers: Layers, budget_bytes: int, page_tokens: PageTokens = None) -> ArenaLayout:
    """Return the layout in which every layer keeps every position; page lengths of windows are of no interest."""
    if isinstance(page_tokens, Mapping):
        page_tokens = {name: tokens for name, tokens in page_tokens.items() if name == describe(Full())}
    return solve_layout(all_full(layers), budget_bytes, page_tokens)


FULL = Policy("full", by_full)


# ---- equal pages


@dataclass(frozen=True)
class Group:
    """Layers of one retention that share a page table; `filled` of its places hold a layer, the others pad."""

    retention: Retention
    page_tokens: int
    filled: int
    layer_bytes: int
    """What one layer uses of its place in a page."""


def equal_groups(layers: Layers, page_tokens: int = EQUAL_PAGE_TOKENS) -> tuple[tuple[Group, ...], int, int]:
    """Return the groups, the layers that each has room for, and the bytes of one layer's place.

    The rule of an engine with equal pages: a group has as many layers as the smallest kind (as the largest one where
    they differ by less than half), a kind with more is cut into several groups, the last one padded with empty layers.
    Kinds whose positions are narrower get longer pages; where a state does not fit into a layer's place, all positional
    pages become as long as it takes, in multiples of `page_tokens`.
    """
    kinds: dict[tuple[Retention, int], int] = {}
    for layer in layers:
        size = layer.state_bytes if isinstance(layer.retention, State) else layer.token_bytes
        kinds[layer.retention, size] = kinds.get((layer.retention, size), 0) + 1
    states = [size for (retention, size) in kinds if isinstance(retention, State)]
    widest = max((size for (retention, size) in kinds if not isinstance(retention, State)), default=0)
    longest = max(page_tokens, ceil_div(max(states, default=0), widest)) if widest else 0
    place = widest * ceil_to(longest, page_tokens) if widest else max(states)
    fewest, most = min(kinds.values()), max(kinds.values())
    room = most if most < 1.5 * fewest else fewest
    groups: list[Group] = []
    for (retention, size), count in kinds.items():
        tokens = 1 if isinstance(retention, State) else place // size // page_tokens * page_tokens
        groups += [Group(retention, tokens, min(room, count - at), size * tokens) for at in range(0, count, room)]
    return tuple(groups), room, place


def by_equal_pages(layers: Layers, budget_bytes: int, page_tokens: PageTokens = None) -> ArenaLayout:
    """Return an arena in which a slab is one page of whichever group takes it. Raises ConfigError when it is too small.

    A page length by pool name has no meaning here: there is one for all.
    """
    if isinstance(page_tokens, Mapping):
        raise ConfigError(["equal pages have one page length; give one number of page tokens, not one per pool"])
    groups, room, place = equal_groups(layers, page_tokens or EQUAL_PAGE_TOKENS)
    page_bytes = ceil_to(room * place, STRIDE_UNIT_BYTES)
    if budget_bytes < page_bytes * len(groups):
        raise ConfigError(
            [
                f"the arena of {budget_bytes} bytes is below one page per group: {len(groups)} groups x {page_bytes} "
                f"bytes = {len(groups) * page_bytes} bytes; give at least as many"
            ]
        )
    pools = tuple(
        PoolLayout(
            f"{describe(group.retention)}.{number}",
            group.retention,
            (),
            group.page_tokens,
            group.filled * group.layer_bytes,
            1,
            page_bytes,
        )
        for number, group in enumerate(groups)
    )
    return ArenaLayout(pools, page_bytes, budget_bytes // page_bytes, budget_bytes)


EQUAL_PAGES = Policy("equal-pages", by_equal_pages)


def padding_share(layout: ArenaLayout, demand: Demand) -> float:
    """Return the bytes of `demand` that no layer uses, over those that layers do use."""
    used = sum(pages * pool.page_bytes for pages, pool in zip(demand, layout.pools, strict=True))
    taken = sum(pages * pool.stride_bytes for pages, pool in zip(demand, layout.pools, strict=True))
    return taken / used - 1
