"""Every backend computes attention by the definition, over every shape of model and step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from allpairspy import AllPairs

from halocline.config import Config
from halocline.errors import ConfigError
from halocline.memory.retention import Chunked, Full, Sliding
from halocline.model.attention import BACKENDS, AttentionBackend
from testing.attention import Case, Pages, by_definition, over_pages

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}

DECODES = [(0, 1), (3, 1), (4, 1), (37, 1), (15, 1)]
CHUNK = [(0, 33)]
LATER_CHUNK = [(29, 41)]
MIXED = [(12, 1), (40, 1), (0, 7), (16, 20), (3, 2)]

AXES = {
    "segments": [DECODES, CHUNK, LATER_CHUNK, MIXED],
    "heads": [(1, 1), (4, 1), (4, 4), (6, 2), (7, 1), (16, 2), (80, 1)],
    "dims": [(8, 8), (16, 16), (20, 12), (64, 64), (24, 40), (256, 256)],
    "page_tokens": [1, 4, 16, 64],
    "retention": [Full(), Sliding(1), Sliding(5), Sliding(16), Chunked(6), Chunked(16)],
    "softcap": [None, 2.0],
    "sinks": [False, True],
    "dtypes": [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
    ],
}


def test_settings_name_the_backends_that_there_are() -> None:
    with pytest.raises(ConfigError, match="one of auto, ") as refused:
        Config(model="any", attention="magic")
    assert set(str(refused.value).rpartition("one of ")[2].split(", ")) == {"auto", *BACKENDS}


def _cases() -> Iterator[Case]:
    for row in AllPairs(list(AXES.values())):
        at = dict(zip(AXES, row, strict=True))
        yield Case(
            segments=at["segments"],
            heads=at["heads"][0],
            kv_heads=at["heads"][1],
            k_dim=at["dims"][0],
            v_dim=at["dims"][1],
            page_tokens=at["page_tokens"],
            retention=at["retention"],
            softcap=at["softcap"],
            sinks=at["sinks"],
            kv_dtype=at["dtypes"][0],
            query_dtype=at["dtypes"][1],
        )


@pytest.fixture(params=sorted(BACKENDS))
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return BACKENDS[request.param]()


def _error(case: Case, backend: AttentionBackend) -> float:
    got, wanted = over_pages(case, backend), by_definition(case)
    assert got.dtype == case.dtype
    assert got.shape == wanted.shape
    assert got.is_contiguous()
    return float((got.double() - wanted).abs().max())


def test_attention_over_pages_is_attention_by_the_definition(backend: AttentionBackend) -> None:
    cases = list(_cases())
    assert len(cases) >= 42, "the covering array has all pairs of the two longest axes"
    wrong = []
    for case in cases:
        error = _error(case, backend)
        if not error < TOLERANCE[case.dtype]:  # also when it is NaN
            wrong.append((error, case))
    assert not wrong


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["reference", "blocked"])
def test_attention_over_pages_on_a_gpu_is_attention_by_the_definition(name: str) -> None:
    for case in list(_cases())[::3]:
        got = over_pages(case, BACKENDS[name](), "cuda").cpu()
        assert float((got.double() - by_definition(case)).abs().max()) < TOLERANCE[case.dtype], case


@pytest.mark.parametrize("retention", [Full(), Sliding(700), Chunked(1000)])
@pytest.mark.parametrize("sinks", [False, True])
def test_long_contexts_are_cut_and_joined(
    backend: AttentionBackend, retention: Full | Sliding | Chunked, sinks: bool
) -> None:
    decodes = [(511, 1), (512, 1), (1023, 1), (1300, 1), (1999, 1)]
    assert _error(Case(decodes, retention=retention, sinks=sinks, page_tokens=16), backend) < 1e-12


def test_a_long_prefill_is_cut_and_joined(backend: AttentionBackend) -> None:
    case = Case([(4090, 40)], heads=2, kv_heads=1, k_dim=8, v_dim=8, page_tokens=64, sinks=True)
    assert _error(case, backend) < 1e-12


def test_large_scores_do_not_overflow(backend: AttentionBackend) -> None:
    case = Case([(40, 1), (0, 30)], kv_dtype=torch.float32, k_dim=256)
    q, k, v = case.inputs()[0]
    case.inputs = lambda: [(q * 40, k * 40, v), (q[:30] * 40, k[:30] * 40, v[:30])]  # type: ignore[method-assign]
    assert torch.isfinite(over_pages(case, backend)).all()


def test_bytes_never_written_are_never_seen(backend: AttentionBackend) -> None:
    # The arena starts as NaN in every byte, and 5 positions leave most of a 64-token page unwritten.
    assert torch.isfinite(over_pages(Case([(4, 1), (0, 3)], page_tokens=64), backend)).all()


def test_a_layer_that_shares_reads_what_another_wrote(backend: AttentionBackend) -> None:
    case = Case([(9, 1), (0, 6)])
    wrote = over_pages(case, backend)

    class Shares:
        name = "shares"

        def attend(self, query, new, layer, step, scores):  # type: ignore[no-untyped-def]
            backend.attend(query, new, layer, step, scores)
            return backend.attend(query, None, layer, step, scores)

    assert torch.equal(over_pages(case, Shares()), wrote)


SHARED = [(9, 12), (0, 7), (7, 9), (31, 1)]
"""Of these, so many positions are the prefix cache's: a part of a chunk, none, a whole chunk, all of a decode."""
WRITE_FROM = [16, 0, 16, 32]


@pytest.mark.parametrize("page_tokens", [1, 4, 16])
@pytest.mark.parametrize("retention", [Full(), Sliding(5), Chunked(6)])
def test_positions_of_the_prefix_cache_are_read_and_never_written(
    backend: AttentionBackend, retention: Full | Sliding | Chunked, page_tokens: int
) -> None:
    case = Case(SHARED, retention=retention, page_tokens=page_tokens)
    pages = Pages(case, backend)
    pages.run([(i, 0, end) for i, end in enumerate(WRITE_FROM) if end])
    before = pages.arena.clone()
    spans = [(i, start, count) for i, (start, count) in enumerate(SHARED)]
    got = pages.run(spans, WRITE_FROM)
    assert float((got - by_definition(case)).abs().max()) < 1e-12, "what was shared was read where it lies"
    rows = before.view(pages.layout.slabs, -1)
    changed = (rows != pages.arena.view(pages.layout.slabs, -1)).any(dim=1)
    shared = [
        page
        for i, end in enumerate(WRITE_FROM)
        for at, page in pages.scheduler.pages[f"r{i}", 0].items()
        if (at + 1) * page_tokens <= end
    ]
    assert not changed[shared].any(), "not a bit of a shared page has changed"
    assert changed.any(), "what is not shared was written"


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_decode_does_not_depend_on_its_company_or_on_threads(dtype: torch.dtype, two_threads: None) -> None:
    backend = BACKENDS["cpu"]()
    company = Case([(1300, 1), (7, 1), (600, 1), (0, 40)], kv_dtype=dtype)
    together = over_pages(company, backend)
    torch.set_num_threads(1)
    assert torch.equal(over_pages(company, backend), together)
    alone = Case([(1300, 1)], kv_dtype=dtype)
    assert torch.equal(over_pages(alone, backend), together[:1])
