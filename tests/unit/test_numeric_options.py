"""Every numeric option, with every odd number: it is refused in a sentence that names it, or it works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from math import inf, nan
from typing import Any

import pytest

from halocline import replay
from halocline.compose import lay_out_layers
from halocline.config import Config
from halocline.errors import ConfigError
from halocline.plan import plan, read_rows, resolve, resolve_shape
from halocline.sim.settings import ReplaySettings
from halocline.units import GIB

WHOLE = (-(10**30), -1, 0, 1, 2, 3, 2**31, 10**12, 10**30)
FRACTIONS = (nan, inf, -inf, -1.0, 0.0, 1e-320, 1e-9, 0.5, 1e308)
TEXTS = ("", "-1", "0", "1", "0.5", "1.5", "1e9", "nan", "inf", "1.5B", "0.1GiB", "9" * 50 + "GiB", "1TiB", "999999TiB")
BASE: dict[str, Any] = {"kv_bytes": "64GiB", "step_tokens": 2048, "page_tokens": 16}
REPLAYED: dict[str, Any] = {
    "trace": "poisson:requests=3,prompt=50,output=3",
    "model": "gemma-3-27b",
    "page_tokens": "16",
}
LAID_OUT = (
    "kv_bytes",
    "host_bytes",
    "staging_bytes",
    "prefill_delay_low_bytes",
    "page_tokens",
    "step_tokens",
    "max_model_len",
    "max_running_requests",
)
"""Settings of a server that say how memory is cut."""
CHECKED = (
    "port",
    "threads",
    "max_waiting_requests",
    "default_max_tokens",
    "admission",
    "policy",
    "prefill_delay_seconds",
    "prefill_delay_tokens",
    "seed",
    "drain_seconds",
    "health_seconds",
    "link_port",
    "lease_seconds",
    "decode_reserve_tokens",
)
"""All its other numbers."""
REPLAY_NUMBERS = (
    "kv_bytes",
    "host_bytes",
    "time_scale",
    "requests",
    "step_tokens",
    "max_running_requests",
    "max_model_len",
    "leap",
    "processes",
    "ttft_limit",
    "tpot_limit",
    "page_tokens",
    "admission",
    "audit",
)


def odd(kind: str) -> tuple[Any, ...]:
    return (
        *(WHOLE if "int" in kind else ()),
        *(FRACTIONS if "float" in kind else ()),
        *(TEXTS if "str" in kind else ()),
    )


def refusals(make: Callable[[dict[str, Any]], object], name: str, kind: str, base: dict[str, Any]) -> Iterator[Any]:
    """Try all odd values; yield those that were refused. Anything but a ConfigError that names the option fails."""
    for value in odd(kind):
        try:
            make(base | {name: value})
        except ConfigError as error:
            told = " ".join(error.problems)
            known = "the arena of " if name == "kv_bytes" and value not in ("", "0") else name
            assert name in told or known in told, f"{name} is {value!r}, refused with: {told}"
            yield value


def served(values: dict[str, Any]) -> None:
    config = Config(**values)
    shape = resolve_shape("gemma-3-27b")
    if config.arena_budget_bytes is not None:
        lay_out_layers(config, shape.layers, shape.max_model_len, config.arena_budget_bytes)


def replayed(values: dict[str, Any]) -> None:
    replay.prepare(ReplaySettings(**values))


def kind_of(record: type, name: str) -> str:
    return next(str(each.type) for each in fields(record) if each.name == name)


@pytest.mark.parametrize("name", [*LAID_OUT, *CHECKED])
def test_a_server_refuses_odd_numbers_by_name(name: str) -> None:
    make = served if name in LAID_OUT else lambda values: Config(**values)
    refused = list(refusals(make, name, kind_of(Config, name), BASE))
    assert {-1, 10**30, "-1"} & {each for each in refused if each == each} or name == "seed"
    assert not ("1TiB" in refused and name in ("kv_bytes", "host_bytes"))


@pytest.mark.parametrize("name", REPLAY_NUMBERS)
def test_a_replay_refuses_odd_numbers_by_name(name: str) -> None:
    assert list(refusals(replayed, name, kind_of(ReplaySettings, name), REPLAYED | {"kv_bytes": "64GiB"}))


def test_every_number_of_a_server_and_a_replay_is_tried_here() -> None:
    numbers = ("int", "float")
    for record, tried in ((Config, {*LAID_OUT, *CHECKED}), (ReplaySettings, {*REPLAY_NUMBERS, "concurrency", "seed"})):
        typed = {each.name for each in fields(record) if any(word in str(each.type) for word in numbers)}
        assert typed <= tried


@pytest.mark.parametrize("value", ["-1", "0", "nan", "inf", "1e30", "1e-300", "9" * 40, "", "٣", "1_0"])
@pytest.mark.parametrize("name", ["rate", "prompt", "output", "requests", "seed"])
def test_a_workload_refuses_odd_numbers_by_name(name: str, value: str) -> None:
    told = ""
    try:
        replay.prepare(
            ReplaySettings(**REPLAYED | {"kv_bytes": "64GiB", "trace": f"poisson:requests=3,{name}={value}"})
        )
    except ConfigError as error:
        told = str(error)
    works = {("seed", "0"), ("seed", "1e30"), ("seed", "9" * 40), ("rate", "1e30"), ("rate", "9" * 40)}
    assert (name, value) in works if not told else name in told or "ten years" in told


@pytest.mark.parametrize(
    "text",
    [
        "-1+5",
        "0+1",
        "1+0",
        "1.5+2",
        "nan+1",
        "9" * 12 + "+1",
        "9" * 40 + "+1",
        "5+5:0",
        "5+5:99999",
        "1e3+1",
        "+",
        "٣+٤",
        "1_0+5",
    ],
)
def test_a_plan_refuses_odd_lengths(text: str) -> None:
    config = Config(kv_bytes=64 * GIB)
    with pytest.raises(ConfigError, match=r"lengths|never served|is ever served"):
        plan(config, resolve("gemma-3-27b", config), rows=read_rows(text))


def test_a_watermark_above_the_arena_is_refused_with_both_numbers_and_what_to_do() -> None:
    with pytest.raises(ConfigError) as caught:
        served(BASE | {"prefill_delay_low_bytes": 64 * GIB + 1})
    told, hint = caught.value.problems
    assert (
        "prefill_delay_low_bytes is 64 GiB (68719476737 bytes), and the arena has 64 GiB (2016 slabs of 34078720"
        in told
    )
    assert "give at most that, or 0" in told
    assert hint.startswith("this model starts with kv_bytes")


def test_the_whole_arena_is_a_watermark() -> None:
    """Equality fits: a delay then holds back while the arena is full to the last page."""
    served(BASE | {"prefill_delay_low_bytes": 2016 * 34078720})


def test_an_arena_whose_books_fit_no_memory_is_not_replayed() -> None:
    with pytest.raises(
        ConfigError, match=r"host_bytes is 1000 TiB: up to .* pages, and a replay keeps books of at most"
    ):
        replayed(REPLAYED | {"kv_bytes": "64GiB", "host_bytes": "1000TiB"})
