"""Runs the tables of this folder: each row of each markdown table is one test, named after its cells."""

from __future__ import annotations

import re

from halocline.memory.demand import resident, step_price
from halocline.memory.layout import ArenaLayout, PoolLayout, solve_layout
from halocline.memory.retention import Chunked, Full, Retention, Sliding, State
from halocline.memory.sizing import STATIC_RATIO, concurrency, longest_request, static_caps, uniform_concurrency
from halocline.units import parse_bytes
from testing.chunkings import most_held
from testing.golden import Row, table
from testing.layouts import MODEL_LAYERS, model_layout


def retention_of(name: str) -> Retention:
    """Read `full`, `sliding-512`, `chunked-8192` or `state`."""
    kind, _, tokens = name.partition("-")
    match kind:
        case "full":
            return Full()
        case "sliding":
            return Sliding(int(tokens))
        case "chunked":
            return Chunked(int(tokens))
    assert kind == "state", f"{name!r} names no kind of pool"
    return State()


def layout_of(row: Row) -> ArenaLayout:
    """Return an arena of the one pool that `row` names."""
    pool = PoolLayout(row["pool"], retention_of(row["pool"]), (), int(row["P"]), 64, 1, 64)
    return ArenaLayout((pool,), 64, 1, 64)


@table("layouts.md", "Set to 16-token pages")
def test_the_solver_reproduces_the_clean_cases(row: Row) -> None:
    layout = model_layout(row["model"], parse_bytes(row["arena"]), 16)
    assert ", ".join(f"{pool.name} {pool.page_bytes}" for pool in layout.pools) == row["page bytes per pool"]
    assert layout.slab_bytes == int(row["slab bytes"])
    assert ", ".join(str(pool.pages_per_slab) for pool in layout.pools) == row["pages per slab"]
    padding = max(pool.padding_bytes / pool.stride_bytes for pool in layout.pools)
    assert padding == 0 if row["padding"] == "0" else padding <= float(row["padding"])


@table("layouts.md", "Chosen by the solver")
def test_the_solver_chooses_the_page_lengths(row: Row) -> None:
    layout = solve_layout(MODEL_LAYERS[row["model"]], parse_bytes(row["arena"]))
    assert ", ".join(f"{pool.name} {pool.page_tokens}" for pool in layout.pools) == row["page tokens"]
    assert layout.slab_bytes == int(row["slab bytes"])
    assert ", ".join(str(pool.pages_per_slab) for pool in layout.pools) == row["pages per slab"]


@table("prices.md", "Resident: what is held at step boundaries and in decode steps")
def test_the_resident_price_is_as_tabled(row: Row) -> None:
    prompt, new, lookahead, computed = (int(row[name]) for name in ("L", "m", "k", "computed"))
    assert resident(layout_of(row), prompt, new, computed, lookahead) == (int(row["pages"]),)
    if prompt <= 11 and row["pool"] != "state":
        held = most_held(retention_of(row["pool"]), int(row["P"]), prompt, new, lookahead)
        assert held[computed] == int(row["pages"])


@table("prices.md", "Step: what one chunk of C tokens at s holds while it runs")
def test_the_step_price_is_as_tabled(row: Row) -> None:
    assert step_price(layout_of(row), int(row["s"]), int(row["C"])) == (int(row["pages"]),)


@table("sizing.md", "Requests at once")
def test_the_requests_at_once_are_as_tabled(row: Row) -> None:
    layout = model_layout(row["model"], parse_bytes(row["arena"]))
    prompt, output = map(int, re.findall(r"\d+", row["prompt + output"]))
    assert concurrency(layout, None, prompt, output) == int(row["here"])
    assert concurrency(layout, static_caps(layout, STATIC_RATIO), prompt, output) == int(row["static"])
    assert uniform_concurrency(layout, prompt, output) == int(row["uniform"])


@table("sizing.md", "Longest request")
def test_the_longest_request_is_as_tabled(row: Row) -> None:
    assert longest_request(model_layout(row["model"], parse_bytes(row["arena"]))) == int(row["tokens"])
