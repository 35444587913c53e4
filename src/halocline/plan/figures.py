"""The plan itself: an arena's layout, what a request costs in it, and how many fit under each policy.

Memory is laid out by `compose.lay_out_layers`, which also lays it out when a server starts, so both print the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from halocline.compose import Memory, lay_out_layers
from halocline.config import Config
from halocline.memory.facts import CapacityFacts
from halocline.memory.layout import ArenaLayout, solve_layout
from halocline.plan.host import HostPlan, plan_host
from halocline.plan.models import Resolved
from halocline.sim.policies import policy_named
from halocline.sim.room import (
    BEST_STATIC,
    Compromise,
    Held,
    PoolCost,
    RequestCost,
    Row,
    compromise,
    pool_costs,
    request_cost,
    room,
)
from halocline.sim.rows import fitting_rows, shown_rows
from halocline.sim.shapes import Shape
from halocline.units import GIB

POLICIES = ("shared", "static:0.8", BEST_STATIC, "equal-pages", "full")
"""What is compared where nothing else is asked for."""
NOMINAL_BYTES = 64 * GIB
"""The arena whose pages are shown where none is given."""


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """One arena: of the model alone, or of the model with its draft."""

    model: str
    slab_bytes: int
    pools: tuple[PoolCost, ...]
    facts: CapacityFacts | None
    """What a server prints at start; None where no size is given."""
    costs: tuple[RequestCost, ...]
    """Of the rows that are one length, in their order."""
    held: tuple[tuple[Held, ...], ...]
    """By row and policy; empty where no size is given."""
    compromise: Compromise | None
    """The best single split for all rows, where there is more than one."""
    host: HostPlan | None = None
    """The host arena beside it; None without one."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that `halocline plan` shows."""

    model: str
    source: str
    parameters: int | None
    active_parameters: int | None
    kv_dtype: str
    kv_bytes: int | None
    max_model_len: int | None
    """The longest prompt plus output that is served; of the model, where no size is given."""
    max_running_requests: int
    rows: tuple[Row, ...]
    policies: tuple[str, ...]
    arenas: tuple[ArenaPlan, ...]
    """The model alone and, where there is a draft, both together."""
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON has it. A row's lengths are left out where there are many; their number is told."""
        table = asdict(self)
        for row in table["rows"]:
            row["requests"] = len(row["lengths"])
            if len(row["lengths"]) > 1:
                del row["lengths"]
        for arena, own in zip(table["arenas"], self.arenas, strict=True):
            arena["tail_bytes"] = sum(pool.tail_bytes for pool in own.pools)
            for cost, told in zip(own.costs, arena["costs"], strict=True):
                told["total_bytes"] = cost.total_bytes
            if own.host is None:
                del arena["host"]
                continue
            for on_host, told in zip(own.host.costs, arena["host"]["costs"], strict=True):
                told["held_tokens"] = on_host.held_tokens
        return table


def plan(
    config: Config,
    model: Resolved,
    draft: Resolved | None = None,
    *,
    rows: Sequence[Row] = (),
    policies: Sequence[str] = POLICIES,
) -> Plan:
    """Plan the memory of `model`, and of `model` with `draft` in the same arena.

    `config` is what a server would get: `kv_bytes`, `host_bytes`, `page_tokens`, `policy` and the limits are used.
    `rows` are what to make room for; without any, the lengths that a server shows at start. Raises ConfigError with
    every problem.
    """
    for name in policies:
        if name != BEST_STATIC:
            policy_named(name)
    budget_bytes = config.arena_budget_bytes
    shapes_shown = [model.shape] if draft is None else [model.shape, model.shape.with_draft(draft.shape)]
    memories = [
        None if budget_bytes is None else lay_out_layers(config, shape.layers, shape.max_model_len, budget_bytes)
        for shape in shapes_shown
    ]
    limit, reason = _longest(config, model.shape, memories[0])
    rows = fitting_rows(rows, limit, reason) if rows else shown_rows(limit)
    return Plan(
        model=model.shape.name,
        source=model.shape.source,
        parameters=model.shape.parameters,
        active_parameters=model.shape.active_parameters,
        kv_dtype=model.kv_dtype,
        kv_bytes=budget_bytes,
        max_model_len=limit,
        max_running_requests=config.max_running_requests,
        rows=tuple(rows),
        policies=tuple(policies),
        arenas=tuple(
            _arena(config, shape, memory, rows, policies) for shape, memory in zip(shapes_shown, memories, strict=True)
        ),
        notes=_notes(model, draft),
    )


def _arena(
    config: Config, shape: Shape, memory: Memory | None, rows: Sequence[Row], policies: Sequence[str]
) -> ArenaPlan:
    page_tokens, checkpoints = config.page_tokens_rule, config.keeps_prefixes
    held: tuple[tuple[Held, ...], ...] = ()
    quota = config.host_budget_bytes
    if memory is None:
        layout = solve_layout(shape.layers, NOMINAL_BYTES, page_tokens)
    else:
        layout = memory.layout
        held = room(shape.layers, layout.budget_bytes, page_tokens, policies, rows, checkpoints)
    singles = [row.lengths[0] for row in rows if len(set(row.lengths)) == 1]
    return ArenaPlan(
        model=shape.name,
        slab_bytes=layout.slab_bytes,
        pools=pool_costs(layout),
        facts=None if memory is None else memory.facts,
        costs=tuple(request_cost(layout, *length) for length in singles),
        held=held,
        compromise=_compromise(layout, rows, policies, checkpoints) if held else None,
        host=plan_host(layout, quota, rows, keeps_prefixes=checkpoints) if quota else None,
    )


def _longest(config: Config, shape: Shape, memory: Memory | None) -> tuple[int | None, str]:
    """Return the longest prompt plus output that is served, and why; without an arena, as model and operator say."""
    if memory is not None:
        return memory.facts.max_model_len.tokens, memory.facts.max_model_len.reason
    if config.max_model_len is not None:
        return config.max_model_len, "as set"
    return shape.max_model_len, "the model's own limit"


def _compromise(
    layout: ArenaLayout, rows: Sequence[Row], policies: Sequence[str], checkpoints: bool
) -> Compromise | None:
    if len(rows) < 2 or len(layout.pools) < 2 or BEST_STATIC not in policies:
        return None
    return compromise(layout, rows, checkpoints)


def _notes(model: Resolved, draft: Resolved | None) -> tuple[str, ...]:
    notes = [model.shape.note, *model.notes]
    if draft is not None:
        notes += [f"draft {draft.shape.name}: {draft.shape.source}", draft.shape.note, *draft.notes]
    return tuple(note for note in notes if note)
