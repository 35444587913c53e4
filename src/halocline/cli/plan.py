"""`halocline plan`: what an arena would hold, on one page, without weights."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from halocline.cli.options import with_settings
from halocline.config import Config, parse_policy
from halocline.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from halocline.plan import ArenaPlan, HostPlan, Plan

USED = (
    "model",
    "kv_bytes",
    "kv_dtype",
    "dtype",
    "device",
    "page_tokens",
    "max_model_len",
    "max_running_requests",
    "step_tokens",
    "prefix_cache",
    "host_bytes",
    "trust_remote_code",
)
"""The settings that a plan depends on."""
PLAIN_WIDTH = 100
"""Columns where there is no terminal to ask."""


@with_settings(server=False, model_argument=True, only=USED)
def plan(
    config: Config,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="what to make room for: 4096+256,12000+343 (prompt+output; :3 counts thrice), a trace or a generator"
        ),
    ] = None,
    draft: Annotated[str | None, typer.Option(help="a draft model whose layers live in the same arena")] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="what to compare: shared, static:R, static:R:S, static:best, equal-pages, full; by commas"),
    ] = None,
    list_models: Annotated[bool, typer.Option("--list", help="list the models of the table and their sources")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of tables")] = False,
) -> None:
    """Show how a model's memory would be cut, what a request costs and how many fit, without weights."""
    from halocline import plan as root  # with the engine's own start behind it, which --help must not wait for

    if list_models:
        show_models()
        return
    config, policies = compared(config, policy)
    found = root.plan(
        config,
        root.resolve(config.model, config),
        None if draft is None else root.resolve(draft, config),
        rows=[] if lengths is None else root.read_rows(lengths),
        policies=policies,
    )
    if as_json:
        sys.stdout.write(json.dumps(found.to_dict(), indent=2) + "\n")
    else:
        show(found, console())


def compared(config: Config, text: str | None) -> tuple[Config, tuple[str, ...]]:
    """Return the policies to compare, and `config` with the first of them that a server can have."""
    from halocline.plan import POLICIES

    if text is None:
        return config, tuple(dict.fromkeys((config.policy, *POLICIES)))
    names = tuple(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))
    for name in names:
        try:
            parse_policy(name)
        except ValueError:
            continue
        return replace(config, policy=name), names
    return config, names or POLICIES


def console() -> Console:
    """Return where tables go: as wide as the terminal, or PLAIN_WIDTH."""
    from rich.console import Console

    there = Console(highlight=False)
    return there if there.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def show(found: Plan, out: Console) -> None:
    """Print a plan for a person to read."""
    from rich.padding import Padding
    from rich.text import Text

    out.print(head(found), markup=False)
    out.print(Padding(Text(found.source), (0, 0, 0, 2)))
    for arena in found.arenas:
        out.print(f"\n{arena.model}\n" if len(found.arenas) > 1 else "", markup=False, style="bold")
        for line in arena_lines(found, arena):
            out.print(line, markup=False)
        for table in tables(found, arena):
            out.print()
            out.print(table)
    for number, line in enumerate(tail(found)):
        out.print(line if number else f"\n{line}", markup=False)


def tables(found: Plan, arena: ArenaPlan) -> Iterator[Table]:
    """Yield the tables of one arena: those that have rows."""
    yield pool_table(arena)
    if arena.costs:
        yield cost_table(arena)
    if arena.held:
        yield room_table(found, arena)
    if arena.host is not None:
        yield host_table(found, arena.host)


def head(found: Plan) -> str:
    """Return what the model is."""
    active = ""
    if found.active_parameters not in (None, found.parameters):
        active = f" ({billions(found.active_parameters)} active)"
    size = "" if found.parameters is None else f"{billions(found.parameters)} parameters{active}, "
    own = found.arenas[0]
    layers = ", ".join(f"{pool.layers} {pool.name}" for pool in own.pools)
    return f"{found.model}: {size}layers {layers}, K and V in {found.kv_dtype}"


def arena_lines(found: Plan, arena: ArenaPlan) -> Iterator[str]:
    """Yield the arena's size and the longest request: the lines that a server prints."""
    from halocline.plan import NOMINAL_BYTES

    if arena.facts is not None:
        yield arena.facts.size_line()
        yield arena.facts.length_line()
        yield from host_lines(arena)
        return
    yield (
        f"no arena is given: pages as in one of {format_bytes(NOMINAL_BYTES)}, slabs of "
        f"{format_bytes(arena.slab_bytes)}; how many requests fit needs --kv-bytes"
    )
    if found.max_model_len is not None:
        yield f"longest request of the model {found.max_model_len:,} tokens"
    yield from host_lines(arena)


def host_lines(arena: ArenaPlan) -> Iterator[str]:
    """Yield the host arena's size, where there is one."""
    if arena.host is not None:
        host = arena.host
        size = f"{format_bytes(host.arena_bytes)} = {host.slabs:,} slabs of {format_bytes(arena.slab_bytes)}"
        yield f"host arena {size} (quota {format_bytes(host.quota_bytes)})"


def pool_table(arena: ArenaPlan) -> Table:
    """Return the pools."""
    table = _table("pool", "layers", "page", "positions", "per slab", "padding", "a position", "a cached tail")
    for pool in arena.pools:
        table.add_row(
            pool.name,
            f"{pool.layers}",
            format_bytes(pool.stride_bytes),
            f"{pool.page_tokens}" if pool.position_bytes is not None else "one state",
            f"{pool.pages_per_slab}",
            f"{pool.padding_bytes / pool.stride_bytes:.2%}",
            "-" if pool.position_bytes is None else f"{pool.position_bytes:,} B",
            format_bytes(pool.tail_bytes) if pool.tail_bytes else "-",
        )
    return table


def cost_table(arena: ArenaPlan) -> Table:
    """Return what a request of each length holds at most: bytes and pages by pool, beside all layers at full length."""
    names = [pool.name for pool in arena.pools]
    table = _table("a request, prompt + output", *names, "together", "every layer full")
    for cost in arena.costs:
        parts = [
            f"{format_bytes(size)} ({pages:,})" for size, pages in zip(cost.bytes_by_pool, cost.pages, strict=True)
        ]
        share = f"{cost.full_bytes / cost.total_bytes:.2f}x"
        together = format_bytes(cost.total_bytes)
        label = f"{cost.prompt_tokens:,} + {cost.output_tokens:,}"
        table.add_row(label, *parts, together, f"{format_bytes(cost.full_bytes)} {share}")
    return table


def room_table(found: Plan, arena: ArenaPlan) -> Table:
    """Return how many requests each policy holds at once."""
    from halocline.plan import BEST_STATIC

    table = _table("requests at once", *found.policies)
    for row, held in zip(found.rows, arena.held, strict=True):
        cells = [
            f"{each.requests:,}" + (f" ({each.policy})" if asked == BEST_STATIC and each.requests else "")
            for asked, each in zip(found.policies, held, strict=True)
        ]
        table.add_row(row.label, *cells)
    return table


def host_table(found: Plan, host: HostPlan) -> Table:
    """Return what requests of each row leave on the host and how many fit, and what prefixes of their prompts take."""
    table = _table("on the host", "a retracted one", "at once", "its prompt cached", "such prompts", "tokens")
    costs = {(cost.prompt_tokens, cost.output_tokens): cost for cost in host.costs}
    for row, requests in zip(found.rows, host.retracted, strict=True):
        cost = costs.get(row.lengths[0]) if len(set(row.lengths)) == 1 else None
        copy, cached = "-", ("-", "-", "-")
        if cost is not None:
            copy = format_bytes(cost.copy_bytes)
        if cost is not None and cost.prefix_tokens:
            cached = (format_bytes(cost.prefix_bytes), f"{cost.prefixes:,}", f"{cost.held_tokens:,}")
        table.add_row(row.label, copy, f"{requests:,}", *cached)
    return table


def tail(found: Plan) -> Iterator[str]:
    """Yield what else is to be said."""
    for arena in found.arenas:
        best = arena.compromise
        if best is not None:
            yield (
                f"{arena.model}: no static split suits all of these; {best.policy} suits them best, and holds "
                f"{best.worst_share:.0%} of what the shared arena does at {best.worst_label}"
            )
    most = max((each.requests for arena in found.arenas for held in arena.held for each in held), default=0)
    if most > found.max_running_requests:
        yield f"a server runs at most {found.max_running_requests} requests at once: --max-running-requests"
    for note in found.notes:
        yield f"note: {note}"


def show_models() -> None:
    """Print the table of shapes."""
    from halocline.plan import shapes

    out = console()
    table = _table("model", "parameters", "longest", "source", right=False)
    for shape in shapes():
        longest = "" if shape.max_model_len is None else f"{shape.max_model_len:,}"
        size = "" if shape.parameters is None else billions(shape.parameters)
        table.add_row(shape.name, size, longest, shape.source)
    out.print(table)


def billions(count: int | None) -> str:
    """Print a number of parameters, as `27.0 B` or `268 M`."""
    assert count is not None, "a number of parameters that is known"
    return f"{count / 1e9:.1f} B" if count >= 0.95e9 else f"{count / 1e6:.0f} M"


def _table(first: str, *others: str, right: bool = True) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right" if right else "left")
    return table
