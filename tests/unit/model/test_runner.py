"""The torch backend on plans made by hand: moves, packed forward, sampling, failures."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from halocline.errors import ConfigError, InvariantError
from halocline.huge_pages import HUGE_BYTES
from halocline.memory.layout import solve_layout
from halocline.model.layers import kv_layers
from halocline.model.runner import TorchBackend
from halocline.params import SamplingParams
from halocline.step import Copy, Move, StepPlan
from testing.conformance import HandScheduler, make_layout
from testing.models import FAMILIES, VOCAB, reference_tokens, tiny_loaded, tiny_model, tiny_prompt

TOKENS = 12


def backend_of(family: str, page_tokens: int = 4, slabs: int = 64, **settings: object) -> TorchBackend:
    loaded = tiny_loaded(family)
    layout = make_layout(kv_layers(loaded.config, loaded.dtype.itemsize), page_tokens, slabs)
    return TorchBackend(loaded, layout, attention="reference", **settings)


def generate(backend: TorchBackend, prompts: Sequence[Sequence[int]], tokens: int, chunk: int) -> list[list[int]]:
    """Continue all prompts greedily; each step mixes decodes with chunks of prompts that are not computed yet."""
    scheduler = HandScheduler(backend.layout)
    known = {f"r{i}": list(prompt) for i, prompt in enumerate(prompts)}
    done = dict.fromkeys(known, 0)
    wanted = {name: len(history) + tokens for name, history in known.items()}
    for step in range(1000):
        work = [
            (name, t, done[name], min(chunk, len(t) - done[name])) for name, t in known.items() if len(t) < wanted[name]
        ]
        if not work:
            break
        # Decodes first, as the scheduler has them.
        result = backend.run(scheduler.plan(step, sorted(work, key=lambda item: item[3])))
        assert not result.failures
        for name, _, start, count in work:
            done[name] = start + count
            scheduler.applied(name, start + count)
        for sampled in result.sampled:
            known[sampled.request_id].append(sampled.token_id)
    return [history[len(prompt) :] for history, prompt in zip(known.values(), prompts, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_generate(family: str) -> None:
    prompts = [tiny_prompt(length, seed=length) for length in (37, 5, 18)]
    expected = [reference_tokens(tiny_model(family), prompt, TOKENS) for prompt in prompts]
    assert generate(backend_of(family), prompts, TOKENS, chunk=7) == expected


def test_a_step_without_sampling_rows_computes_and_samples_nothing() -> None:
    backend = backend_of("gemma3")
    prompt = tiny_prompt(8)
    result = backend.run(HandScheduler(backend.layout).plan(3, [("a", prompt, 0, 5)]))
    assert result.step == 3
    assert result.sampled == ()
    assert result.failures == ()


def two_chunks(backend: TorchBackend, prompt: Sequence[int]) -> tuple[StepPlan, StepPlan, HandScheduler]:
    scheduler = HandScheduler(backend.layout)
    first, second = scheduler.plan(0, [("a", prompt, 0, 20)]), scheduler.plan(1, [("a", prompt, 20, 4)])
    # Log-probabilities differ where tokens happen to agree.
    params = SamplingParams(temperature=0.0, logprobs=5)
    segment = msgspec.structs.replace(second.segments[0], params=params)
    return first, dataclasses.replace(second, segments=(segment,)), scheduler


def test_moved_pages_give_the_same_tokens_and_the_old_places_are_not_read() -> None:
    backend, prompt = backend_of("gemma3"), tiny_prompt(24)
    first, second, scheduler = two_chunks(backend, prompt)
    backend.run(first)
    plain = backend.run(second)
    moves, tables = [], []
    for pool, table in enumerate(second.tables):
        pages = table.pages.copy()
        for i in range(0, len(pages), 2):
            moves.append(Move(pool, int(pages[i]), int(scheduler.free.pop())))
            pages[i] = moves[-1].target
        tables.append(dataclasses.replace(table, pages=pages))
    moved = dataclasses.replace(second, moves=tuple(moves), tables=tuple(tables))
    backend.run(first)
    assert backend.run(moved).sampled == plain.sampled
    # Without the moves the new places hold nothing of this request: the test would notice moves that do nothing.
    fresh = backend_of("gemma3")
    fresh.run(first)
    lost = fresh.run(dataclasses.replace(moved, moves=()))
    assert lost.sampled != plain.sampled


def test_a_chain_of_moves_across_pools_reads_every_source_before_any_target_is_written() -> None:
    backend = backend_of("gemma3")
    mover = backend._mover
    for pages in mover._pages:
        assert pages.shape[0] == backend.layout.slabs
    a, b = mover._pages
    a[3], b[5], a[7] = 1, 2, 3
    # Pool 1 moves into the slab that pool 0 leaves: page numbers and slabs are the same here.
    mover.move([Move(1, 5, 3), Move(0, 3, 9), Move(0, 7, 11)])
    assert bool((a[9] == 1).all())
    assert bool((b[3] == 2).all())
    assert bool((a[11] == 3).all())


def test_logits_that_are_not_finite_fail_their_request_only() -> None:
    backend = backend_of("llama")
    scheduler = HandScheduler(backend.layout)
    plan = scheduler.plan(0, [("good", tiny_prompt(6), 0, 6), ("bad", tiny_prompt(5, seed=1), 0, 5)])
    expected = backend.run(plan).sampled[0]
    real = backend._model

    def poisoned(**inputs: object) -> SimpleNamespace:
        logits = real(**inputs).logits
        logits[0, 1, 7] = torch.nan
        return SimpleNamespace(logits=logits)

    backend._model = poisoned
    result = backend.run(plan)
    assert result.sampled == (expected,)
    (failure,) = result.failures
    assert failure.request_id == "bad"
    assert "position 5 is not finite" in failure.message


def test_sampling_params_of_each_segment_are_obeyed() -> None:
    backend = backend_of("llama")
    plan = HandScheduler(backend.layout).plan(0, [(name, tiny_prompt(6), 0, 6) for name in "abc"])
    params = (
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(temperature=1.5),
        SamplingParams(temperature=0.0),
    )
    segments = tuple(
        msgspec.structs.replace(segment, params=p, seed=11) for segment, p in zip(plan.segments, params, strict=True)
    )
    sampled = backend.run(dataclasses.replace(plan, segments=segments)).sampled
    assert sampled[0].token_id == sampled[2].token_id
    assert sampled[0].logprobs is not None
    assert sampled[0].logprobs.top[0] == (sampled[0].token_id, sampled[0].logprobs.token_logprob)
    assert sampled[2].logprobs is None


def test_a_leap_is_refused_before_anything_is_computed() -> None:
    """A model computes what it is given; it does not sample for itself and go on."""
    backend = backend_of("llama")
    plan = HandScheduler(backend.layout).plan(0, [("a", tiny_prompt(6), 0, 6), ("b", tiny_prompt(6), 0, 6)])
    ahead = msgspec.structs.replace(plan.segments[1], tokens=7)
    with pytest.raises(InvariantError, match=r"step 0 leaps \(b\)"):
        backend.run(dataclasses.replace(plan, segments=(plan.segments[0], ahead)))


def test_the_plan_is_left_as_it_was() -> None:
    backend = backend_of("gemma3")
    plan = HandScheduler(backend.layout).plan(0, [("a", tiny_prompt(9), 0, 9)])
    arrays = [plan.token_ids, plan.positions, plan.query_starts, *(t.pages for t in plan.tables)]
    for array in arrays:
        array.flags.writeable = False
    copies = [np.array(array) for array in arrays]
    backend.run(plan)
    assert all((a == b).all() for a, b in zip(arrays, copies, strict=True))


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_kv_is_kept_in_its_own_type(kv_dtype: torch.dtype) -> None:
    loaded = tiny_loaded("gemma3", dtype=torch.float32)
    layout = solve_layout(kv_layers(loaded.config, kv_dtype.itemsize), 1 << 20, 4)
    backend = TorchBackend(loaded, layout, kv_dtype=kv_dtype, attention="reference")
    prompt = tiny_prompt(20)
    result = backend.run(HandScheduler(layout).plan(0, [("a", prompt, 0, 20)]))
    assert 0 <= result.sampled[0].token_id < VOCAB


def test_a_closed_backend_lets_another_take_its_model() -> None:
    loaded = tiny_loaded("llama")
    layout = make_layout(kv_layers(loaded.config, 8), 4, 16)
    first = TorchBackend(loaded, layout, attention="reference")
    first.close()
    first.close()
    second = TorchBackend(loaded, layout, attention="reference")
    assert second.run(HandScheduler(layout).plan(0, [("a", tiny_prompt(6), 0, 6)])).sampled


def settlers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "halocline-settler"]


@pytest.fixture
def arena_file(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """An empty file in memory for an arena, on a machine where huge pages are not switched off."""
    monkeypatch.setattr("halocline.huge_pages._is_wanted", lambda: True)
    file = os.memfd_create("arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    yield file
    os.close(file)


def test_a_thread_settles_an_arena_that_others_may_see_as_long_as_its_backend_lives(arena_file: int) -> None:
    backend = backend_of("gemma3", slabs=1024, memory_file=arena_file)
    arena_bytes = len(backend.arena)
    assert os.fstat(arena_file).st_size == arena_bytes >= HUGE_BYTES
    assert len(settlers()) == 1
    backend.arena[-1] = 7
    assert os.pread(arena_file, 1, arena_bytes - 1) == b"\7"
    backend.close()
    assert settlers() == []


def test_a_backend_that_cannot_be_made_leaves_no_thread_that_nobody_could_end(arena_file: int) -> None:
    loaded = tiny_loaded("gemma3")
    layout = make_layout(kv_layers(loaded.config, loaded.dtype.itemsize), 4, 1024)
    with pytest.raises(ConfigError, match="nonsense"):
        TorchBackend(loaded, layout, attention="nonsense", memory_file=arena_file)
    assert os.fstat(arena_file).st_size >= HUGE_BYTES
    assert settlers() == []


def test_checkpoints_are_copied_before_the_forward_and_saved_after_it() -> None:
    backend = backend_of("gemma3")
    full = backend._mover._pages[0]
    plan = HandScheduler(backend.layout).plan(0, [("a", tiny_prompt(9), 0, 9)])
    used = {int(page) for table in plan.tables for page in table.pages}
    source, target, saved = [page for page in range(backend.layout.slabs) if page not in used][:3]
    full[source], full[target], full[saved] = 1, 2, 3
    computed = int(plan.tables[0].pages[0])
    full[computed] = 4  # fresh memory may hold what an earlier backend of the same model computed
    before = full[computed].clone()
    backend.run(dataclasses.replace(plan, copies=(Copy(0, source, target),), saves=(Copy(0, computed, saved),)))
    assert bool((full[target] == 1).all())
    assert bool((full[source] == 1).all()), "a copy, not a move"
    assert torch.equal(full[saved], full[computed])
    assert not torch.equal(full[saved], before), "saved after the forward, with what it computed"
