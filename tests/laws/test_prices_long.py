"""L9 over larger worlds than `test_prices`: run with `-m laws`."""

from __future__ import annotations

from itertools import product

import pytest

from halocline.memory.demand import resident, step_extra, step_price
from halocline.memory.price import pool_resident
from halocline.memory.retention import Chunked, Full, Retention, Sliding
from testing.chunkings import chunkings, most_held, run
from testing.layouts import small_layout

pytestmark = pytest.mark.laws

RETENTIONS: list[Retention] = [Full(), *(kind(reach) for kind, reach in product((Sliding, Chunked), range(1, 13)))]


@pytest.mark.parametrize("retention", RETENTIONS, ids=str)
def test_l9_the_resident_price_is_exact_over_every_chunking_of_prompts_up_to_nine(retention: Retention) -> None:
    for page_tokens, prompt, new, lookahead in product((1, 2, 4, 8), range(1, 10), (1, 4, 11), (0, 1, 3)):
        most = most_held(retention, page_tokens, prompt, new, lookahead)
        priced = {
            boundary: pool_resident(retention, page_tokens, (prompt, prompt + new - 1, boundary), lookahead)
            for boundary in most
        }
        assert priced == most, f"P={page_tokens} L={prompt} m={new} k={lookahead}"


@pytest.mark.parametrize("retention", RETENTIONS, ids=str)
def test_l9_no_chunking_holds_more_than_resident_and_step_in_prompts_up_to_nine(retention: Retention) -> None:
    for page_tokens, prompt in product((1, 2, 4, 8), range(1, 10)):
        layout = small_layout(retention, page_tokens=page_tokens)
        for chunks in chunkings(prompt):
            for start, tokens, held in run(retention, page_tokens, chunks, 3).steps:
                own = resident(layout, prompt, 3, start)
                assert step_price(layout, start, tokens) == (held,)
                assert held <= own[0] + step_extra(layout, start, tokens, own)[0]
