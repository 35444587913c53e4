"""What start-up refuses: settings that cannot work in this arena, all of them at once, each with its arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from halocline.errors import ConfigError
from halocline.memory.budget import Budget
from halocline.memory.capacity import UNLIMITED_TOKENS, Caps, longest_request
from halocline.memory.demand import Demand, floor_demand, resident
from halocline.memory.facts import ModelLength
from halocline.memory.layout import ArenaLayout
from halocline.memory.retention import Sliding, State
from halocline.units import format_bytes


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


def check_start(layout: ArenaLayout, caps: Caps | None, limits: Limits) -> ModelLength:
    """Return the model length that is served. Raises ConfigError with every problem and its arithmetic."""
    problems, length = _start(layout, caps, limits)
    if problems:
        raise ConfigError(problems)
    return length


def start_problems(layout: ArenaLayout, caps: Caps | None, limits: Limits) -> list[str]:
    """Return what makes these settings impossible in this arena, one sentence each; empty when they work."""
    return _start(layout, caps, limits)[0]


def _start(layout: ArenaLayout, caps: Caps | None, limits: Limits) -> tuple[list[str], ModelLength]:
    length, length_problems = _model_length(layout, caps, limits)
    problems = _slot_problems(layout, limits) + _cap_problems(layout, caps) + _window_problems(layout, caps, limits)
    problems += length_problems
    if length.tokens < 2 and not problems:
        problems.append(f"a length of {length.tokens} tokens ({length.reason}) leaves no room for one in and one out")
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
    slabs = Budget(layout).slabs_by_pool(demand.plus(floor))
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
