"""B7 and C1: what is printed at start is what the memory holds, and every figure comes from one source."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from halocline.compose import lay_out_layers, prepare
from halocline.config import Config
from halocline.memory.arena import Arena
from halocline.memory.capacity import uniform_concurrency
from halocline.memory.demand import resident
from halocline.memory.facts import CapacityFacts
from halocline.memory.grant import Grant
from halocline.memory.layout import ArenaLayout
from halocline.model.builtin import is_installed
from halocline.plan import plan, resolve
from halocline.schedule.rules import Admission
from halocline.sim.device import device_named
from halocline.sim.setup import Setup
from halocline.sim.simulation import simulate
from halocline.sim.workload import Job, Workload
from halocline.units import GIB, MIB, ceil_div

GUARANTEED: Admission = ("guaranteed",)
REAL, REAL_BYTES = "gemma3-270m", 256 * MIB
"""The model that is served here, and the arena of the documents' worked example."""
CASES = [
    (REAL, REAL_BYTES, (256, 64)),
    (REAL, REAL_BYTES, (2048, 128)),
    (REAL, REAL_BYTES, (8192, 256)),
    ("gpt-oss-20b", 2 * GIB, (2048, 128)),
]


def printed(name: str, kv_bytes: int) -> CapacityFacts:
    """Return what a server with this model and arena prints at start, its prefix cache off."""
    shape = resolve(name).shape
    return lay_out_layers(Config(prefix_cache="off"), shape.layers, shape.max_model_len, kv_bytes).facts


# --- B7: the printed concurrency, and what a replay reaches


def reached(name: str, kv_bytes: int, length: tuple[int, int], requests: int) -> int:
    """Return the most that ran at once of so many identical requests that all stand in line, each with its text."""
    prompt, output = length
    jobs = tuple(Job(f"job {number}", 0.0, ((number, prompt),), output, 2**20 + number) for number in range(requests))
    setup = Setup(
        shape=resolve(name).shape,
        kv_bytes=kv_bytes,
        policy="shared",
        device=device_named("h200"),
        admission=GUARANTEED,
        prefix_cache=False,
    )
    return simulate(setup, Workload("same", "made for a test", jobs), saturated=True).concurrency.peak


def requests_printed(name: str, kv_bytes: int, length: tuple[int, int]) -> int:
    rows = printed(name, kv_bytes).concurrency
    return next(row.requests for row in rows if (row.prompt_tokens, row.output_tokens) == length)


def tokens_of_all_layers(name: str, kv_bytes: int, length: tuple[int, int]) -> int:
    """Count as calculators do that know one size of a token: every layer keeps every position."""
    shape = resolve(name).shape
    layout = lay_out_layers(Config(), shape.layers, shape.max_model_len, kv_bytes).layout
    return uniform_concurrency(layout, *length)


def full_layers_alone(name: str, kv_bytes: int, length: tuple[int, int]) -> int:
    """Count as calculators do that take the bytes of a token from the full layers, as if windows cost nothing."""
    shape = resolve(name).shape
    layout = lay_out_layers(Config(), shape.layers, shape.max_model_len, kv_bytes).layout
    full = layout.pools[0]
    return kv_bytes // (ceil_div(sum(length) - 1, full.page_tokens) * full.stride_bytes)


def check_b7(
    count: Callable[[str, int, tuple[int, int]], int], name: str, kv_bytes: int, length: tuple[int, int]
) -> None:
    said = count(name, kv_bytes, length)
    peak = reached(name, kv_bytes, length, requests_printed(name, kv_bytes, length) + 5)
    assert abs(said - peak) <= 0.01 * peak, f"{said} were printed and {peak} ran"


@pytest.mark.parametrize(("name", "kv_bytes", "length"), CASES)
def test_b7_the_printed_concurrency_is_what_a_replay_reaches(name: str, kv_bytes: int, length: tuple[int, int]) -> None:
    check_b7(requests_printed, name, kv_bytes, length)


@pytest.mark.parametrize("wrong", [tokens_of_all_layers, full_layers_alone], ids=lambda each: each.__name__)
def test_b7_calculators_that_do_not_know_windows_fail_this_check(wrong: Callable[..., int]) -> None:
    with pytest.raises(AssertionError, match=r"were printed and 18 ran"):
        check_b7(wrong, REAL, REAL_BYTES, (2048, 128))


def test_b7_the_allocator_grants_as_many_as_were_printed_and_not_one_more() -> None:
    shape = resolve(REAL).shape
    memory = lay_out_layers(Config(prefix_cache="off"), shape.layers, shape.max_model_len, REAL_BYTES)
    for row in memory.facts.concurrency:
        arena = Arena(memory.layout)
        demand = resident(memory.layout, row.prompt_tokens, row.output_tokens)
        answers = [arena.reserve(f"request {number}", demand) for number in range(row.requests + 1)]
        assert [isinstance(answer, Grant) for answer in answers] == [True] * row.requests + [False]


# --- C1: one source


def claims(facts: CapacityFacts, length: tuple[int, int]) -> dict[str, int]:
    """Return every figure that says how many requests of this length fit, by the place where it stands."""
    name = f"{length[0]} + {length[1]}"
    row = next(each for each in facts.concurrency if (each.prompt_tokens, each.output_tokens) == length)
    found = plan(Config(kv_bytes=REAL_BYTES, prefix_cache="off"), resolve(REAL))
    place = [each.lengths for each in found.rows].index((length,))
    line = next(line for line in facts.lines() if line.startswith(name))
    return {
        "the log's table": int(line.removeprefix(name).split()[0]),
        "the record": row.requests,
        "the calculator": found.arenas[0].held[place][0].requests,
    }


def check_c1(said: dict[str, int]) -> None:
    assert len(set(said.values())) == 1, f"lines disagree: {said}"


def by_pool(layout: ArenaLayout, length: tuple[int, int]) -> dict[str, int]:
    """Return what a log says that gives each pool's capacity as if it had the whole arena."""
    return {
        pool.name: layout.arena_bytes // (ceil_div(sum(length) - 1, pool.page_tokens) * pool.stride_bytes)
        for pool in layout.pools
    }


@pytest.mark.parametrize("length", [(256, 64), (2048, 128), (8192, 256)])
def test_c1_all_lines_say_the_same_of_one_arena(length: tuple[int, int]) -> None:
    check_c1(claims(printed(REAL, REAL_BYTES), length))


def test_c1_capacities_told_pool_by_pool_fail_this_check() -> None:
    shape = resolve(REAL).shape
    layout = lay_out_layers(Config(), shape.layers, shape.max_model_len, REAL_BYTES).layout
    said = by_pool(layout, (2048, 128))
    # 40 by the full layers and 8 by the others: off by 5 within one log, and neither is 18.
    assert max(said.values()) == 5 * min(said.values())
    with pytest.raises(AssertionError, match="lines disagree"):
        check_c1(claims(printed(REAL, REAL_BYTES), (2048, 128)) | said)


@pytest.mark.skipif(not is_installed(REAL), reason=f"the package of {REAL} is not installed")
def test_c1_the_start_of_a_server_prints_what_the_calculator_does() -> None:
    config = Config(model=REAL, kv_bytes=REAL_BYTES, dtype="bfloat16", device="cpu")
    start = prepare(config, quiet=True).memory
    assert start is not None
    assert plan(config, resolve(REAL, config)).arenas[0].facts == start.facts


def test_c1_bytes_add_up_in_every_place_they_are_told() -> None:
    facts = printed(REAL, REAL_BYTES)
    found = plan(Config(kv_bytes=REAL_BYTES, prefix_cache="off"), resolve(REAL))
    assert found.arenas[0].facts == facts
    assert facts.slabs * facts.slab_bytes + facts.remainder_bytes == facts.budget_bytes == REAL_BYTES
    assert (
        facts.lines()[0]
        == facts.size_line()
        == "arena 256 MiB = 1092 slabs of 240 KiB (budget 256 MiB, remainder 64 KiB)"
    )
    for pool in facts.pools:
        assert pool.pages_per_slab * pool.stride_bytes == facts.slab_bytes
