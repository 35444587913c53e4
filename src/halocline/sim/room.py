"""How much room an arena has: what a request costs, page by page, and how many fit at once under each policy.

Only questions to the functions that the engine asks at start (`halocline.memory`), about layouts and caps that the
policies give; there is no formula of its own here.

    bytes of a request    its resident demand, the most that it holds at any step boundary, times the page strides
    requests at once      so many whole resident demands fit an empty arena beside the floor
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from halocline.errors import ConfigError
from halocline.memory.capacity import Mix, mix_concurrency, mix_of, uniform_request_bytes
from halocline.memory.demand import resident, span
from halocline.memory.layout import ArenaLayout, LayerKV, PoolLayout
from halocline.memory.retention import Full, Sliding, State
from halocline.memory.sizing import static_caps
from halocline.memory.splits import Split, best_split
from halocline.sim.policies import EQUAL_PAGES, PageTokens, policy_named

BEST_STATIC = "static:best"
"""The static split with the best ratio for each row: what somebody would set who knew what comes."""
RATIOS_BETWEEN = 48
"""How many ratios are tried as the one for all rows, beside the best one of each."""
FEW_BETWEEN = 8
"""The same where two ratios are looked for together."""


@dataclass(frozen=True, slots=True)
class Row:
    """Requests to make room for: of one length, or a mix, each length as often as it is named."""

    label: str
    lengths: tuple[tuple[int, int], ...]
    """(prompt, output) in tokens."""


@dataclass(frozen=True, slots=True)
class PoolCost:
    """One pool as the arena cuts it, and what it costs; bytes unless named otherwise."""

    name: str
    layers: int
    page_tokens: int
    page_bytes: int
    """Bytes that the layers use of a page."""
    stride_bytes: int
    """Bytes that a page takes."""
    pages_per_slab: int
    padding_bytes: int
    """Bytes of every page that no layer uses."""
    position_bytes: int | None
    """Bytes of one position in all of the pool's layers; None in a pool of states."""
    tail_bytes: int
    """What a cached prefix keeps here for its last place alone, so that a prompt can go on there: the window before it,
    or its state; 0 in a full pool, whose pages serve every place."""


@dataclass(frozen=True, slots=True)
class RequestCost:
    """What one request holds at most, from its first to its last step."""

    prompt_tokens: int
    output_tokens: int
    pages: tuple[int, ...]
    """By pool, in the order of the layout."""
    bytes_by_pool: tuple[int, ...]
    full_bytes: int
    """What it would hold if every layer kept every position."""

    @property
    def total_bytes(self) -> int:
        """Bytes over all pools, padding included."""
        return sum(self.bytes_by_pool)


@dataclass(frozen=True, slots=True)
class Held:
    """How many requests of a row an arena holds at once under a policy."""

    policy: str
    """The policy by its name; for `static:best` the split that is best for this row."""
    requests: int


@dataclass(frozen=True, slots=True)
class Compromise:
    """The one static split that serves all rows best: its worst row gets the largest share of what one arena holds."""

    policy: str
    worst_label: str
    worst_share: float


def pool_costs(layout: ArenaLayout) -> tuple[PoolCost, ...]:
    """Return what every pool of the layout costs."""
    return tuple(
        PoolCost(
            name=pool.name,
            layers=len(pool.layers),
            page_tokens=pool.page_tokens,
            page_bytes=pool.page_bytes,
            stride_bytes=pool.stride_bytes,
            pages_per_slab=pool.pages_per_slab,
            padding_bytes=pool.padding_bytes,
            position_bytes=sum(place.spec.token_bytes for place in pool.layers) if pool.is_positional else None,
            tail_bytes=_tail_pages(pool) * pool.stride_bytes,
        )
        for pool in layout.pools
    )


def request_cost(layout: ArenaLayout, prompt_tokens: int, output_tokens: int) -> RequestCost:
    """Return what a request of this length holds at most."""
    pages = resident(layout, prompt_tokens, output_tokens)
    return RequestCost(
        prompt_tokens,
        output_tokens,
        pages,
        tuple(count * pool.stride_bytes for count, pool in zip(pages, layout.pools, strict=True)),
        uniform_request_bytes(layout, prompt_tokens, output_tokens),
    )


def room(
    layers: Sequence[LayerKV],
    budget_bytes: int,
    page_tokens: PageTokens,
    policies: Sequence[str],
    rows: Sequence[Row],
    checkpoints: bool,
) -> tuple[tuple[Held, ...], ...]:
    """Return for each row, in order, how many requests each policy holds; 0 where not even one fits.

    Policies are as `policy_named` takes them, and `static:best`. Raises ConfigError for one that is not known.
    """
    columns = [_column(layers, budget_bytes, page_tokens, name, rows, checkpoints) for name in policies]
    return tuple(zip(*columns, strict=True))


def compromise(layout: ArenaLayout, rows: Sequence[Row], checkpoints: bool) -> Compromise | None:
    """Return the best static split for all rows together; None where no split holds one request of each.

    Tried are the best ratio of every row and ratios between them, evenly spread by their logarithm.
    """
    mixes = [mix_of(layout, row.lengths) for row in rows]
    splits = [best_split(layout, mix, checkpoints) for mix in mixes]
    whole = [mix_concurrency(layout, None, mix, checkpoints) for mix in mixes]
    found = [split for split in splits if split is not None]
    if not found or not all(whole):
        return None
    best: Compromise | None = None
    for ratios in _ratios(found):
        caps = static_caps(layout, *ratios)
        shares = [
            mix_concurrency(layout, caps, mix, checkpoints) / most for mix, most in zip(mixes, whole, strict=True)
        ]
        worst = min(shares)
        if worst and (best is None or worst > best.worst_share):
            name = ":".join(["static", *(f"{number:g}" for number in ratios)])
            best = Compromise(name, rows[shares.index(worst)].label, worst)
    return best


def _ratios(found: Sequence[Split]) -> Iterator[tuple[float, ...]]:
    """Yield the ratios to try: those found and some between, of windows and, where there are states, of these too."""
    windows = sorted({split.ratio for split in found})
    states = sorted({split.state_ratio for split in found if split.state_ratio is not None})
    # Where both differ there are as many pairs: fewer of each are tried.
    tried = FEW_BETWEEN if len(windows) > 1 and len(states) > 1 else RATIOS_BETWEEN
    for ratio in _between(windows, tried):
        if states:
            yield from ((ratio, state_ratio) for state_ratio in _between(states, tried))
        else:
            yield (ratio,)


def _between(found: Sequence[float], count: int) -> list[float]:
    low, high = found[0], found[-1]
    if low == high:
        return [low]
    return sorted({*found, *(round(low * (high / low) ** (step / count), 4) for step in range(1, count))})


def _column(
    layers: Sequence[LayerKV],
    budget_bytes: int,
    page_tokens: PageTokens,
    name: str,
    rows: Sequence[Row],
    checkpoints: bool,
) -> list[Held]:
    policy = policy_named("shared" if name == BEST_STATIC else name)
    if policy is EQUAL_PAGES and isinstance(page_tokens, Mapping):
        page_tokens = None  # it has one page length, and that of one pool of ours is none of its settings
    try:
        layout = policy.lay_out(layers, budget_bytes, page_tokens)
    except ConfigError:
        return [Held(name, 0) for _ in rows]
    mixes = [mix_of(layout, row.lengths) for row in rows]
    if name == BEST_STATIC:
        return [_best(layout, mix, checkpoints) for mix in mixes]
    caps = policy.split(layout)
    return [Held(name, mix_concurrency(layout, caps, mix, checkpoints)) for mix in mixes]


def _best(layout: ArenaLayout, mix: Mix, checkpoints: bool) -> Held:
    split = best_split(layout, mix, checkpoints)
    return Held(BEST_STATIC, 0) if split is None else Held(split.name, split.requests)


def _tail_pages(pool: PoolLayout) -> int:
    """Return the most pages before a page's border that a prompt which goes on there reads in this pool."""
    retention = pool.retention
    if isinstance(retention, Full | State):
        return int(isinstance(retention, State))
    reach_tokens = retention.window_tokens if isinstance(retention, Sliding) else retention.chunk_tokens
    # The last border inside a chunk has most of it behind itself; P chunks end in every way that there is. For a window
    # any border is as good.
    ends = range(2**20, 2**20 + pool.page_tokens)
    borders = [(end * reach_tokens - 1) // pool.page_tokens * pool.page_tokens for end in ends]
    return max(border // pool.page_tokens - span(pool, border, border + 1)[0] for border in borders)
