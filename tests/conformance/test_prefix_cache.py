"""With the prefix cache the tokens are those of `generate` as well (L11): cold, hot, evicted under its feet, retracted.

The covering array of test_generate.py has the cache as one of its axes. Here are the cases that it must have met, each
on purpose: every length of a prompt that is cached, windows that are gone while full pages are there, and faults in
either that must be noticed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from halocline.memory.retention import Chunked, Full
from halocline.model.attention import BACKENDS, AttentionStep, LayerView, Scores, facts
from halocline.model.attention.reference import ReferenceAttention
from halocline.model.layers import kv_layers
from testing.models import FAMILIES, tiny_model
from testing.serving import LONG, Run, Setting, differences, engine, generated, layout_for, prompts, serve

UNEQUAL = ["gemma3", "cohere2", "llama4", "gemma3n", "gemma4", "exaone4", "olmo3"]
WINDOWED = [family for family in FAMILIES if family not in ("llama", "deepseek-v3", "gpt2")]
SCARCE = Setting(page_tokens="2 full, 16 local", arena="small", admission="expected", cache="hot")
ROOMY = Setting(page_tokens="4", arena="roomy", admission="guaranteed", cache="cold")
RESTORED = [
    (family, list(BACKENDS)[(i + turn) % len(BACKENDS)], first_page)
    for i, family in enumerate(WINDOWED)
    for turn, first_page in enumerate((0, 6))
]
"""Every family twice, from the start and from its middle on, with the backends taking turns."""
LONGER = 10
"""New tokens of the long request."""


@pytest.mark.parametrize("family", UNEQUAL)
@pytest.mark.parametrize("attention", ["cpu", "reference"])
def test_tokens_survive_eviction_and_retraction(family: str, attention: str) -> None:
    outcome = serve(family, replace(SCARCE, attention=attention))
    for tokens in outcome.rounds:
        assert differences(generated(family, torch.float64), tokens) == []
    assert outcome.cache is not None
    assert outcome.totals.retractions > 0, "nothing was retracted, so nothing is shown"
    assert sum(outcome.cache.evicted_pages) > 0, "nothing was evicted, so nothing is shown"
    assert outcome.cache.hit_tokens > 0, "nothing was found, so nothing is shown"


@cache
def next_tokens(family: str) -> list[int]:
    """After every part of the long prompt, the most probable next token: one forward of the model as it is."""
    model = tiny_model(family)
    with torch.inference_mode():
        return [int(token) for token in model(torch.tensor([prompts()[LONG]])).logits[0].argmax(-1)]


@pytest.mark.parametrize(
    ("family", "page_tokens"), [(family, ("4", "16 full, 4 local")[i % 2]) for i, family in enumerate(FAMILIES)]
)
def test_a_prompt_resumes_at_every_boundary_inside_and_outside_windows(family: str, page_tokens: str) -> None:
    prompt, setting = prompts()[LONG], replace(ROOMY, page_tokens=page_tokens, dtype=FAMILIES[family].dtype)
    order = [int(n) for n in np.random.default_rng(len(family)).permutation(np.arange(1, len(prompt) + 1))]
    with engine(family, setting) as run:
        found = [run.together(f"cut{n}-", [prompt[:n]], [1])[0][0] for n in order]
        resumed = {run.cached[f"cut{n}-0"] for n in order}
    assert found == [next_tokens(family)[n - 1] for n in order]
    granule = 16 if page_tokens.startswith("16") else 4
    assert len(resumed) > (len(prompt) - 1) // granule // 2, f"only {sorted(resumed)} were boundaries"


def _restored(run: Run, family: str, first_page: int) -> tuple[list[int], int]:
    """Answer the long prompt, drop its windows from a page on, and answer it again; return tokens and what it found."""
    prompt = prompts()[LONG]
    run.together("before", [prompt], [LONGER])
    assert run.drop_windows(first_page) > 0
    run.spoil_what_nobody_has()
    full = [number for number, pool in enumerate(run.arena.layout.pools) if isinstance(pool.retention, Full)]
    held = [run.backend._mover._pages[number].clone() for number in full]
    (tokens,) = run.together("after", [prompt], [LONGER])
    figures = run.scheduler.figures()
    assert figures.cache is not None
    assert figures.cache.lookups.get("window gone", 0) == 1, figures.cache.lookups
    for number, before in zip(full, held, strict=True):
        _assert_shared_pages_unchanged(run, number, before)
    return tokens, run.cached["after0"]


def _assert_shared_pages_unchanged(run: Run, pool: int, before: Tensor) -> None:
    """The full pages of the prompt, which the second request shared, have not a bit of difference."""
    tree, layout = run.scheduler._sharing.tree, run.arena.layout.pools[pool]
    whole = len(prompts()[LONG]) // tree.shape.granule_tokens * tree.shape.granule_tokens // layout.page_tokens
    path = max((node.path() for node in tree.forest.nodes.values()), key=lambda nodes: nodes[-1].end if nodes else 0)
    handles = np.concatenate([node.pages[pool] for node in path])[:whole]
    places = torch.from_numpy(run.arena.physical(pool, handles).astype(np.int64))
    after = run.backend._mover._pages[pool]
    assert len(places) > 0
    assert torch.equal(before[places], after[places]), "a page that others read was written again"


@pytest.mark.parametrize(("family", "attention", "first_page"), RESTORED)
def test_windows_are_restored_under_full_pages_that_stay_as_they_are(
    family: str, attention: str, first_page: int
) -> None:
    setting = replace(ROOMY, attention=attention, dtype=FAMILIES[family].dtype)
    kinds = [type(pool.retention) for pool in _pools(family, setting)]
    if Full not in kinds:
        pytest.skip(f"{family} has windows only")
    with engine(family, setting) as run:
        tokens, cached = _restored(run, family, first_page)
    assert differences((generated(family, setting.dtype)[LONG],), [tokens]) == []
    # Where a chunk begins nothing before is read, so a chunked pool resumes there without a page.
    assert (cached > 0) is (first_page > 0 or Chunked in kinds)


def _pools(family: str, setting: Setting):  # type: ignore[no-untyped-def]
    return layout_for(kv_layers(tiny_model(family).config, setting.dtype.itemsize), setting)[0].pools


class NothingToRewrite(ReferenceAttention):
    """Gets NaN for what is shared and computed again, so that whoever writes or reads it is found out."""

    def attend(
        self, query: Tensor, new: tuple[Tensor, Tensor] | None, layer: LayerView, step: AttentionStep, scores: Scores
    ) -> Tensor:
        tables, rows = facts.pool_facts(step, layer).tables, torch.arange(step.tokens)
        segment_of = np.repeat(np.arange(step.segments), np.diff(step.rows))
        positions = rows.numpy() - np.array(step.rows)[segment_of] + np.array(step.first_positions)[segment_of]
        shared = torch.from_numpy(positions < tables.write_from[segment_of])
        if new is not None:
            new = (
                new[0].masked_fill(shared[:, None, None], torch.nan),
                new[1].masked_fill(shared[:, None, None], torch.nan),
            )
        return super().attend(query, new, layer, step, scores)


@pytest.fixture
def suspicious(monkeypatch: pytest.MonkeyPatch) -> Setting:
    monkeypatch.setitem(BACKENDS, "suspicious", NothingToRewrite)
    return replace(ROOMY, attention="suspicious")


def _is_wrong(run: Run) -> bool:
    """Whether a restored prompt is found out: by a check on the way, or by its tokens."""
    try:
        tokens, _ = _restored(run, "gemma3", 0)
    except AssertionError:
        return True
    return differences((generated("gemma3", torch.float64)[LONG],), [tokens]) != []


def test_what_is_shared_is_not_needed_again(suspicious: Setting) -> None:
    with engine("gemma3", suspicious) as run:
        assert not _is_wrong(run)


@pytest.mark.parametrize("granules", [-99, 1])
def test_a_wrong_write_map_is_found(monkeypatch: pytest.MonkeyPatch, suspicious: Setting, granules: int) -> None:
    """Shared pages are written again, or pages of its own are not."""
    real = facts._pool_facts

    def wrong(pool, tables, plan, device):  # type: ignore[no-untyped-def]
        shifted = np.where(tables.write_from > 0, np.maximum(tables.write_from + 4 * granules, 0), 0).astype(np.int32)
        made = real(pool, replace(tables, write_from=shifted), plan, device)
        return replace(made, tables=tables)

    monkeypatch.setattr(facts, "_pool_facts", wrong)
    with engine("gemma3", suspicious) as run:
        assert _is_wrong(run)


def test_a_wrong_boundary_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A granule too many is taken for equal, as by a hash that collides."""
    from halocline.cache import forest

    real = forest.common_granules
    monkeypatch.setattr(
        forest,
        "common_granules",
        lambda edge, data, at, unit: min(real(edge, data, at, unit) + 1, len(edge) // unit, (len(data) - at) // unit),
    )
    with engine("gemma3", replace(ROOMY, cache="hot")) as run:
        outcome = run.run(generated("gemma3", torch.float64))
    assert any(differences(generated("gemma3", torch.float64), tokens) for tokens in outcome.rounds)


def test_a_window_that_is_not_whole_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever resumes where the window is gone reads pages of nobody: stopped by an assertion, or by other tokens."""
    from halocline.cache.match import Resume

    with engine("gemma3", ROOMY) as run:
        run.together("before", [prompts()[LONG]], [LONGER])
        run.drop_windows()
        monkeypatch.setattr(Resume, "missing", lambda self, walk, granules: None)
        with pytest.raises(Exception):  # noqa: B017, PT011 - which of the checks comes first does not matter
            run.together("after", [prompts()[LONG]], [LONGER])
