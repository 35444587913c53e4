"""What changes a row of logits before anything is chosen from it: forbidden stops and penalties for repetition."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from halocline.params import SamplingParams
from halocline.step import Segment


def edits_logits(segment: Segment) -> bool:
    """Whether the segment's logits must be changed at all."""
    return segment.forbids_stop or _has_penalties(segment.params)


def edit_logits(row: NDArray[np.floating], segment: Segment, eos_token_ids: Sequence[int]) -> None:
    """Change `row` (vocab,) in place: first the stops that are not allowed yet, then the penalties."""
    if segment.forbids_stop:
        # A client may name tokens that the model does not have.
        row[[token for token in (*eos_token_ids, *segment.params.stop_token_ids) if token < len(row)]] = -np.inf
    if _has_penalties(segment.params):
        _penalise(row, segment)


def _has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _penalise(row: NDArray[np.floating], segment: Segment) -> None:
    """Repetition looks at prompt and output, presence and frequency at the output only, as vLLM has it."""
    params = segment.params
    history = np.asarray(segment.history, dtype=np.int64)
    if params.repetition_penalty != 1.0:
        seen = np.unique(history)
        values = row[seen]
        row[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    tokens, counts = np.unique(history[segment.prompt_tokens :], return_counts=True)
    row[tokens] -= (params.frequency_penalty * counts + params.presence_penalty).astype(row.dtype)
