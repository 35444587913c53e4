"""Row maxima against the definition, in every layout and with many equal values."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from halocline.model.argmax import row_maxima


def contiguous(logits: Tensor) -> Tensor:
    return logits.contiguous()


def transposed(logits: Tensor) -> Tensor:
    return logits.t().contiguous().t()


def every_second(logits: Tensor) -> Tensor:
    return torch.stack([logits, logits], dim=2).flatten(1)[:, ::2]


@pytest.mark.parametrize("layout", [contiguous, transposed, every_second])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 512), (3, 1536), (16, 4096), (5, 320), (4, 997), (64, 1024), (2, 16)])
@pytest.mark.parametrize("values", [2, 50, 10**6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_first_of_the_largest_is_found(
    layout: Callable[[Tensor], Tensor], rows: int, vocab: int, values: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(rows * vocab + values)
    logits = layout(torch.randint(-values, values, (rows, vocab), generator=generator).to(dtype))
    best, tokens = row_maxima(logits)
    for row, value, token in zip(logits.tolist(), best, tokens, strict=True):
        assert value == max(row)
        assert token == row.index(value)


@pytest.mark.parametrize("layout", [contiguous, transposed])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_not_finite_is_seen_and_spoils_no_other(layout: Callable[[Tensor], Tensor], value: float) -> None:
    logits = torch.zeros(4, 1024)
    logits[:, 77] = 1.0
    logits[2, 1000] = value
    best, tokens = row_maxima(layout(logits))
    assert not math.isfinite(best[2])
    assert [tokens[row] for row in (0, 1, 3)] == [77, 77, 77]
