"""Greedy tokens equal transformers' `generate`, for every family under every memory schedule (L11).

Settings are combined by a covering array: every pair of values of any two axes occurs in some run. The whole product
is behind the marker `slow`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from allpairspy import AllPairs

from halocline.model.host_pages import HostPages
from testing.models import FAMILIES
from testing.serving import (
    ARENAS,
    HOSTS,
    LONGEST,
    PAGES,
    SIZES,
    STEP_TOKENS,
    Outcome,
    Setting,
    differences,
    generated,
    serve,
    told_apart,
)

AXES: dict[str, Sequence[Any]] = {
    "family": list(FAMILIES),
    "page_tokens": list(PAGES),
    "step": list(STEP_TOKENS),
    "arena": list(ARENAS),
    "attention": ["cpu", "reference", "blocked"],
    "admission": ["expected", "guaranteed"],
    "policy": ["shared", "static"],
    "cache": ["others", "cold", "hot", "off"],
    "host": list(HOSTS),
    "dtype": [torch.float64, torch.float32],
}
UNEQUAL = ["gemma3", "cohere2", "llama4", "gemma3n", "gemma4", "exaone4", "olmo3"]
"""Families whose pools have pages of different sizes: slabs of several pages, so there are holes to move into."""


def _rows() -> dict[str, list[Setting]]:
    rows: dict[str, list[Setting]] = {family: [] for family in FAMILIES}
    for family, *values in AllPairs(list(AXES.values())):
        setting = Setting(**dict(zip(list(AXES)[1:], values, strict=True)))
        if family == "gpt-oss" and setting.dtype == torch.float64:
            # Its experts have no float64 kernel: another family takes this row's pairs.
            rows["gemma3"].append(setting)
            setting = replace(setting, dtype=torch.float32)
        rows[family].append(setting)
    return rows


ROWS = _rows()


def _check(family: str, setting: Setting) -> Outcome:
    outcome = serve(family, setting)
    for number, tokens in enumerate(outcome.rounds):
        assert differences(generated(family, setting.dtype), tokens) == [], f"{family} under {setting}, round {number}"
    return outcome


def test_every_pair_of_settings_occurs() -> None:
    seen = set()
    for family, settings in ROWS.items():
        for setting in settings:
            values = [family, *(getattr(setting, axis) for axis in list(AXES)[1:])]
            seen |= {(a, x, b, y) for a, x in zip(AXES, values, strict=True) for b, y in zip(AXES, values, strict=True)}
    missing = [
        (a, x, b, y)
        for a, b in product(AXES, AXES)
        for x, y in product(AXES[a], AXES[b])
        if (a != b) and (a, x, b, y) not in seen and {x, y} != {"gpt-oss", torch.float64}
    ]
    assert missing == []


def test_prompts_lie_on_both_sides_of_the_window() -> None:
    prompts, totals = [size[0] for size in SIZES], [sum(size) for size in SIZES]
    assert min(totals) < LONGEST
    assert any(prompt < 12 for prompt in prompts), "shorter than the window"
    assert any(prompt == 12 for prompt in prompts), "exactly the window"
    assert any(prompt > 36 for prompt in prompts), "several windows long"
    assert any(prompt < 12 < total for prompt, total in zip(prompts, totals, strict=True)), "crosses it in decode"


@pytest.mark.parametrize("family", list(FAMILIES))
def test_greedy_tokens_equal_generate(family: str) -> None:
    outcomes = [_check(family, setting) for setting in ROWS[family]]
    assert sum(outcome.mixed_steps for outcome in outcomes) > 0, "prefill and decode were never in one step"


SCARCE = Setting(page_tokens="2 full, 16 local", arena="small", admission="expected", cache="others")


@pytest.mark.parametrize("family", UNEQUAL)
@pytest.mark.parametrize("attention", ["cpu", "reference"])
def test_tokens_survive_retraction_and_moves(family: str, attention: str) -> None:
    outcome = _check(family, replace(SCARCE, attention=attention))
    assert outcome.totals.retractions > 0, "nothing was retracted, so nothing is shown"
    assert outcome.totals.recomputed_tokens > 0
    assert outcome.totals.moves > 0, "nothing was moved, so nothing is shown"


@pytest.mark.parametrize("cache", ["others", "cold"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "llama4", "gpt-oss"])
def test_tokens_survive_retraction_to_the_host_arena_and_nothing_is_computed_again(family: str, cache: str) -> None:
    """Full attention alone, sliding windows, chunked ones, and sinks."""
    pages = "1" if family in ("llama", "gpt-oss") else SCARCE.page_tokens
    setting = replace(SCARCE, page_tokens=pages, cache=cache, host="ample", dtype=FAMILIES[family].dtype)
    outcome = _check(family, setting)
    assert outcome.totals.retractions > 0, "nothing was retracted, so nothing is shown"
    assert outcome.totals.recomputed_tokens == 0
    assert outcome.host is not None
    assert outcome.host.offloaded == outcome.totals.retractions
    if cache == "others":
        assert outcome.host.restored == outcome.totals.retractions


@pytest.mark.parametrize("lost", ["offload", "load"])
def test_host_pages_that_were_not_copied_are_found_out(monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    """The instrument itself: a retracted request whose pages were not copied gets other tokens."""
    monkeypatch.setattr(HostPages, lost, lambda self, work: None)
    assert told_apart("gemma3", replace(SCARCE, cache="off", host="ample"))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gpt-oss"])
def test_tokens_survive_retraction_where_pages_are_equal(family: str) -> None:
    outcome = _check(family, replace(SCARCE, page_tokens="1", dtype=FAMILIES[family].dtype))
    assert outcome.totals.retractions > 0, "nothing was retracted, so nothing is shown"


def test_a_guaranteed_request_is_never_retracted() -> None:
    assert _check("gemma3", replace(SCARCE, admission="guaranteed")).totals.retractions == 0


def test_a_request_ends_where_generate_meets_the_end_of_sequence() -> None:
    whole = generated("gemma3", torch.float64)
    eos = whole[0].tokens[5]
    cut = [one.tokens.index(eos) + 1 if eos in one.tokens else len(one.tokens) for one in whole]
    assert cut[0] <= 6 < len(whole[0].tokens)
    outcome = serve("gemma3", replace(SCARCE, eos=(eos,)))
    assert outcome.tokens == [list(one.tokens[:length]) for one, length in zip(whole, cut, strict=True)]


@pytest.mark.parametrize("attention", ["cpu", "reference"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt-oss"])
def test_bfloat16_differs_from_generate_only_where_it_is_undecided(
    family: str, attention: str, record_property: Callable[[str, object], None]
) -> None:
    expected = generated(family, torch.bfloat16)
    tokens = serve(family, replace(SCARCE, attention=attention, dtype=torch.bfloat16)).tokens
    # Logits are about 8 here, where neighbouring bfloat16 numbers lie 1/32 to 1/16 apart.
    assert differences(expected, tokens, tie=0.25) == []
    pairs = [a == b for one, ours in zip(expected, tokens, strict=True) for a, b in zip(one.tokens, ours, strict=True)]
    record_property("equal_tokens", sum(pairs) / len(pairs))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("page_tokens", list(PAGES))
def test_greedy_tokens_equal_generate_in_the_whole_product(family: str, page_tokens: str) -> None:
    rest = {axis: values for axis, values in AXES.items() if axis not in {"family", "page_tokens"}}
    for values in product(*rest.values()):
        setting = Setting(page_tokens=page_tokens, **dict(zip(rest, values, strict=True)))
        if not (family == "gpt-oss" and setting.dtype == torch.float64):
            _check(family, setting)
