"""How much an arena holds: every figure found with the budget's own predicate, before a single byte is allocated.

Everything here is a question to `Budget.fits_empty` about the demands that `halocline.memory.demand` prices, so
start-up, calculator and scheduler cannot disagree. The floor (a granule per window pool) is beside every demand.
Worked example, Gemma 3 270M in 256 MiB (1,092 slabs of 240 KiB; 5 full or 1 sliding page each), 2,048 + 128 tokens:
136 full and 33 sliding pages a request; 18 of them take ceil(2448 / 5) + 594 + 1 (floor) = 1085 slabs, 19 take 1145.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from halocline.errors import ConfigError
from halocline.memory.budget import Budget
from halocline.memory.demand import Demand, floor_demand, resident
from halocline.memory.facts import CapacityFacts, ConcurrencyFacts, ModelLength, PoolFacts
from halocline.memory.layout import ArenaLayout, PoolLayout
from halocline.memory.retention import Sliding, State
from halocline.units import GIB, ceil_div, ceil_to, format_bytes

Caps = tuple[int | None, ...]

STATIC_RATIO = 0.8
"""Window tokens per full token in the static split that users know from other engines."""
STATE_RATIO = 0.9
"""Bytes of the state pool per byte of all other pools in such a split."""
SHOWN_LENGTHS = ((256, 64), (2048, 128), (8192, 256), (32768, 512))
"""Prompt and output lengths for which concurrency is printed."""
UNLIMITED_TOKENS = 2**31 - 1
"""The longest length that is told apart: no model reaches it, an arena without full pools may."""

_CPU_SHARE = 4
_CPU_MOST_BYTES = 4 * GIB


@dataclass(frozen=True, slots=True)
class Limits:
    """What start-up must reconcile with the arena."""

    step_tokens: int
    max_running_requests: int
    model_tokens: int | None = None
    """The model's own longest sequence; None when it names none."""
    max_model_len: int | None = None
    """As the operator set it; None: the smaller of the model's and the longest that fits."""
    lookahead_tokens: int = 0
    """k: draft tokens and steps in flight."""
    checkpoints: bool = False
    """Whether saved states are kept, so that the floor holds a spare one."""


def longest_request(
    layout: ArenaLayout, caps: Caps | None = None, lookahead_tokens: int = 0, checkpoints: bool = False
) -> int:
    """Return the most tokens of prompt and output together that an empty arena holds beside the floor; 0 if none.

    Every split of such a length into prompt and output fits: the price is highest for a prompt of one token, because
    then every boundary is a decode. At least 2 (one token in, one out) where anything fits at all.
    """
    budget, floor = Budget(layout, caps), floor_demand(layout, checkpoints)

    def fits(tokens: int) -> bool:
        return budget.fits_empty(resident(layout, 1, tokens - 1, 0, lookahead_tokens).plus(floor))

    most = _largest(2, UNLIMITED_TOKENS, fits)
    return most if most >= 2 else 0


def concurrency(layout: ArenaLayout, caps: Caps | None, prompt_tokens: int, output_tokens: int) -> int:
    """Return how many such requests an empty arena holds together, each with its whole resident demand."""
    budget, floor = Budget(layout, caps), floor_demand(layout)
    one = resident(layout, prompt_tokens, output_tokens)

    def fits(requests: int) -> bool:
        return budget.fits_empty(Demand(pages * requests for pages in one).plus(floor))

    return max(0, _largest(1, layout.slabs * max(pool.pages_per_slab for pool in layout.pools), fits))


def exact_concurrency(layout: ArenaLayout, tokens: int) -> int:
    """Return floor(budget / bytes of one request that holds `tokens`), the yardstick without slabs and floor.

    Such a request holds all its full pages, whole windows with their straddling page, and its state; no padding.
    """
    one = resident(layout, 1, tokens)
    request_bytes = sum(pages * pool.page_bytes for pages, pool in zip(one, layout.pools, strict=True))
    return layout.budget_bytes // request_bytes


def uniform_concurrency(layout: ArenaLayout, tokens: int) -> int:
    """Return how many requests of `tokens` fit the same budget when every layer keeps every position."""
    request_bytes = 0
    for pool in layout.pools:
        kept_tokens = ceil_to(tokens, pool.page_tokens) if pool.is_positional else 1
        request_bytes += pool.page_bytes * kept_tokens // pool.page_tokens
    return layout.budget_bytes // request_bytes


def static_caps(layout: ArenaLayout, ratio: float, state_ratio: float = STATE_RATIO) -> Caps:
    """Return the slabs per pool of a static split: each sliding or chunked pool gets `ratio` x the full pool's tokens.

    In whole slabs, rounded down; what rounding leaves goes to the full pool. Where the model has states, their pool
    first gets `state_ratio` bytes per byte of the others. Without a full pool the first window pool is the measure.
    The shares sum to all slabs; one may be 0, which start-up refuses.
    """
    positional = [index for index, pool in enumerate(layout.pools) if pool.is_positional]
    caps = [0] * len(layout.pools)
    left = layout.slabs
    for index, pool in enumerate(layout.pools):
        if not pool.is_positional:
            caps[index] = int(layout.slabs * state_ratio / (1 + state_ratio)) if positional else layout.slabs
            left -= caps[index]
    if not positional:
        return tuple(caps)
    measure, others = positional[0], positional[1:]

    def shares(measure_slabs: int) -> dict[int, int]:
        tokens = measure_slabs * _slab_tokens(layout.pools[measure]) * Fraction(str(ratio))
        return {index: int(tokens / _slab_tokens(layout.pools[index])) for index in others}

    most = max(0, _largest(1, left, lambda slabs: slabs + sum(shares(slabs).values()) <= left))
    for index, slabs in shares(most).items():
        caps[index] = slabs
        left -= slabs
    caps[measure] = left
    return tuple(caps)


def auto_kv_bytes(free_bytes: int) -> int:
    """Return the arena's bytes on a CPU: a quarter of the free memory, at most 4 GiB."""
    return min(free_bytes // _CPU_SHARE, _CPU_MOST_BYTES)


def auto_device_kv_bytes(memory_bytes: int, weight_bytes: int, activation_bytes: int) -> int:
    """Return a device's memory less weights and measured peak activations; ConfigError when nothing is left."""
    left = memory_bytes - weight_bytes - activation_bytes
    if left <= 0:
        raise ConfigError(
            [
                f"the device has {format_bytes(memory_bytes)}, the weights take {format_bytes(weight_bytes)} and "
                f"a step {format_bytes(activation_bytes)}: nothing is left for the arena; use a larger device or a "
                "smaller model"
            ]
        )
    return left


def check_start(layout: ArenaLayout, caps: Caps | None, limits: Limits) -> ModelLength:
    """Return the model length that is served. Raises ConfigError with every problem and its arithmetic."""
    problems, length = _start(layout, caps, limits)
    if problems:
        raise ConfigError(problems)
    return length


def start_problems(layout: ArenaLayout, caps: Caps | None, limits: Limits) -> list[str]:
    """Return what makes these settings impossible in this arena, one sentence each; empty when they work."""
    return _start(layout, caps, limits)[0]


def capacity_facts(
    layout: ArenaLayout,
    caps: Caps | None,
    limits: Limits,
    lengths: Sequence[tuple[int, int]] = SHOWN_LENGTHS,
    static_ratio: float = STATIC_RATIO,
) -> CapacityFacts:
    """Return the record that log, command line and API print. Raises ConfigError as `check_start`.

    Concurrency is given for those `lengths` (prompt, output) that the model length allows, and for the model length.
    """
    length = check_start(layout, caps, limits)
    shown = sorted({pair for pair in lengths if sum(pair) <= length.tokens})
    if length.tokens < UNLIMITED_TOKENS and length.tokens not in map(sum, shown):
        shown.append((length.tokens - 1, 1))
    static = static_caps(layout, static_ratio)
    return CapacityFacts(
        budget_bytes=layout.budget_bytes,
        arena_bytes=layout.arena_bytes,
        slab_bytes=layout.slab_bytes,
        slabs=layout.slabs,
        remainder_bytes=layout.remainder_bytes,
        granule_tokens=layout.granule_tokens,
        pools=tuple(map(_pool_facts, layout.pools, caps or (None,) * len(layout.pools))),
        longest_request_tokens=longest_request(layout, caps, limits.lookahead_tokens, limits.checkpoints),
        max_model_len=length,
        static_ratio=static_ratio,
        concurrency=tuple(
            ConcurrencyFacts(
                prompt,
                output,
                concurrency(layout, caps, prompt, output),
                concurrency(layout, static, prompt, output),
                uniform_concurrency(layout, prompt + output),
            )
            for prompt, output in shown
        ),
    )


def _start(layout: ArenaLayout, caps: Caps | None, limits: Limits) -> tuple[list[str], ModelLength]:
    length, length_problems = _model_length(layout, caps, limits)
    # An arena too small for one window is too small for the length as well; the window's sentence names the cause.
    window_problems = _window_problems(layout, caps, limits)
    problems = _slot_problems(layout, limits) + _cap_problems(layout, caps) + window_problems + length_problems
    if length.tokens < 2 and not window_problems:
        problems.append(
            f"not even one token in and one out fit: {_arithmetic(layout, caps, limits, 2)}; give more kv_bytes"
        )
    return problems, length


def _model_length(layout: ArenaLayout, caps: Caps | None, limits: Limits) -> tuple[ModelLength, list[str]]:
    """Return the smaller of the model's length and the longest that fits, or the one set if it is possible."""
    longest = longest_request(layout, caps, limits.lookahead_tokens, limits.checkpoints)
    asked, own = limits.max_model_len, limits.model_tokens
    if asked is None:
        if own is not None and own <= longest:
            return ModelLength(own, "model"), []
        return ModelLength(longest, "arena"), []
    problems = []
    if own is not None and asked > own:
        problems.append(f"max_model_len is {asked}, but the model's own limit is {own} tokens; set at most {own}")
    if asked > longest:
        problems.append(
            f"max_model_len is {asked}, but the longest request that fits is {longest} tokens: "
            f"{_arithmetic(layout, caps, limits, asked)}; set at most {longest} or give more kv_bytes"
        )
    return ModelLength(asked, "setting"), problems


def _slot_problems(layout: ArenaLayout, limits: Limits) -> list[str]:
    """A full step of decodes must leave one granule for the most senior prefill."""
    decode = limits.max_running_requests * (1 + limits.lookahead_tokens)
    need = decode + layout.granule_tokens
    if limits.step_tokens >= need:
        return []
    return [
        f"step_tokens is {limits.step_tokens}, below max_running_requests {limits.max_running_requests} x "
        f"(1 + {limits.lookahead_tokens} lookahead) + one granule of {layout.granule_tokens} = {need} tokens; "
        f"raise step_tokens to {need} or lower max_running_requests"
    ]


def _cap_problems(layout: ArenaLayout, caps: Caps | None) -> list[str]:
    return [
        f"the static split leaves pool {pool.name} {cap} of {layout.slabs} slabs; every pool needs at least one"
        for pool, cap in zip(layout.pools, caps or (), strict=False)
        if cap is not None and cap < 1
    ]


def _window_problems(layout: ArenaLayout, caps: Caps | None, limits: Limits) -> list[str]:
    """Each sliding pool must hold one window, its straddling page and the floor, beside one full page.

    A request whose length never fills the window (max_model_len, or the model's own limit) needs less.
    """
    wanted_tokens = min(limits.model_tokens or UNLIMITED_TOKENS, limits.max_model_len or UNLIMITED_TOKENS)
    whole = resident(layout, 1, max(1, wanted_tokens - 1), 0, limits.lookahead_tokens)
    demand = Demand(
        pages if isinstance(pool.retention, Sliding | State) else 1
        for pages, pool in zip(whole, layout.pools, strict=True)
    )
    budget, floor = Budget(layout, caps), floor_demand(layout, limits.checkpoints)
    if budget.fits_empty(demand.plus(floor)):
        return []
    names = ", ".join(
        f"a window of {pool.retention.window_tokens} in pages of {pool.page_tokens}"
        for pool in layout.pools
        if isinstance(pool.retention, Sliding)
    )
    return [
        f"the arena cannot hold one request: {names + ' and ' if names else ''}one page of every other pool need "
        f"{_terms(layout, caps, demand, floor)}; give more kv_bytes, or set a smaller max_model_len"
    ]


def _arithmetic(layout: ArenaLayout, caps: Caps | None, limits: Limits, tokens: int) -> str:
    demand = resident(layout, 1, tokens - 1, 0, limits.lookahead_tokens)
    return f"{tokens} tokens need {_terms(layout, caps, demand, floor_demand(layout, limits.checkpoints))}"


def _terms(layout: ArenaLayout, caps: Caps | None, demand: Demand, floor: Demand) -> str:
    """Write a demand and the floor as slabs: `sliding-128: 2 + 1 (floor) pages, 1 per slab = 3 slabs of at most 1`."""
    slabs = [ceil_div(a + b, pool.pages_per_slab) for a, b, pool in zip(demand, floor, layout.pools, strict=True)]
    parts = [
        f"{pool.name}: {own} + {spare} (floor) pages, {pool.pages_per_slab} per slab = {need} slabs"
        + ("" if cap is None else f" of at most {cap}")
        for pool, own, spare, need, cap in zip(
            layout.pools, demand, floor, slabs, caps or (None,) * len(slabs), strict=True
        )
    ]
    return (
        f"{'; '.join(parts)}; together {sum(slabs)} slabs of {format_bytes(layout.slab_bytes)} where {layout.slabs} are"
    )


def _pool_facts(pool: PoolLayout, cap: int | None) -> PoolFacts:
    return PoolFacts(
        pool.name, len(pool.layers), pool.page_tokens, pool.page_bytes, pool.stride_bytes, pool.pages_per_slab, cap
    )


def _slab_tokens(pool: PoolLayout) -> int:
    return pool.pages_per_slab * pool.page_tokens


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """Return the largest of low ... high that `fits`, which is downward closed; low - 1 if none does."""
    if not fits(low):
        return low - 1
    step = 1
    while low + step <= high and fits(low + step):  # gallop first: high may be far beyond
        low, step = low + step, 2 * step
    high = min(high, low + step - 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
