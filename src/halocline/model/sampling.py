"""Choosing the next tokens: one row of logits per request that samples in this step.

    logits -> stops, penalties -> [log-probabilities] -> / temperature -> min_p -> top_k -> top_p -> draw

Most rows of most steps are greedy and plain: one maximum over the whole batch serves them. Every other row is
worked on by itself on the host, so that nothing it gets can depend on which requests share its step; a row of
262,144 float32 also stays in the processor's cache, which several together would not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halocline.model.argmax import row_maxima
from halocline.model.noise import gumbel, noise_key
from halocline.model.penalties import edit_logits, edits_logits
from halocline.params import SamplingParams
from halocline.step import Failure, Sampled, Segment, TokenLogprobs

Row = NDArray[np.float32] | NDArray[np.float64]
"""One request's logits, shape (vocab,)."""
BLOCK_TOKENS = 512
"""Tokens per block of the two-stage draw: about the square root of the largest vocabularies."""
MIN_TEMPERATURE = 1e-6
"""Below it nothing changes any more, but float32 would divide by zero."""
_CUTS = (-10.0, -20.0, -math.inf)
"""Where filters look for their threshold, in nats below the best token: mostly among some hundreds of tokens."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """Samples for one model; holds no state."""

    eos_token_ids: tuple[int, ...]

    def sample(self, logits: Tensor, segments: Sequence[Segment]) -> tuple[tuple[Sampled, ...], tuple[Failure, ...]]:
        """Sample one token per row of `logits` (segments, vocab); a row that is not finite becomes a Failure."""
        best, tokens = row_maxima(logits)
        sampled, failures = [], []
        for row, segment in enumerate(segments):
            # A NaN anywhere in the row becomes its maximum.
            if not math.isfinite(best[row]):
                failures.append(_failure(segment))
            elif _is_plain(segment):
                sampled.append(Sampled(segment.request_id, tokens[row]))
            else:
                sampled.append(self._sample_row(logits[row], segment))
        return tuple(sampled), tuple(failures)

    def _sample_row(self, logits: Tensor, segment: Segment) -> Sampled:
        params = segment.params
        # A copy in full precision on the host: the edits are done in place.
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        row = logits.to(dtype, copy=True).cpu().numpy()
        edit_logits(row, segment, self.eos_token_ids)
        if params.is_greedy:
            token = int(row.argmax())
        else:
            token = draw(_filtered(row, params), segment.seed, segment.start + segment.tokens)
        logprobs = None if params.logprobs is None else token_logprobs(row, token, params.logprobs)
        return Sampled(segment.request_id, token, logprobs)


def draw(scores: Row, seed: int, position: int) -> int:
    """Draw a token with probability softmax(scores); `scores` (vocab,) has 0 as its maximum, -inf where forbidden.

    First a block of tokens is drawn by its total probability, then a token within it: exactly the same distribution,
    but noise is needed for one block and not for the whole vocabulary.
    """
    key = noise_key(seed, position)
    start = 0
    if len(scores) > BLOCK_TOKENS:
        mass = _block_sums(np.exp(scores))
        with np.errstate(divide="ignore"):  # a block of forbidden tokens has no mass
            block = np.log(mass)
        # Indices beyond the vocabulary, so that no token shares its noise with a block.
        start = BLOCK_TOKENS * int((block + gumbel(key, len(mass) * BLOCK_TOKENS, len(mass))).argmax())
    within = scores[start : start + BLOCK_TOKENS]
    return start + int((within + gumbel(key, start, len(within))).argmax())


def _block_sums(weights: Row) -> NDArray[np.float64]:
    whole = len(weights) // BLOCK_TOKENS * BLOCK_TOKENS
    sums = weights[:whole].reshape(-1, BLOCK_TOKENS).sum(axis=1)
    if whole < len(weights):
        sums = np.append(sums, weights[whole:].sum())
    return sums.astype(np.float64)


def token_logprobs(row: Row, token: int, top: int) -> TokenLogprobs:
    """Return the log-probability and rank of `token` under `row` (vocab,), and the `top` most probable tokens."""
    best = row.max()
    total = float(best) + math.log(np.exp(row - best).sum(dtype=np.float64))
    # All tokens as probable as the last of the top: of equals, the lowest ids are listed.
    last = np.partition(row, -top)[-top] if 0 < top < len(row) else -math.inf
    ids = np.flatnonzero(row >= last) if top else np.empty(0, np.int64)
    ids = ids[np.argsort(-row[ids], kind="stable")][:top]
    return TokenLogprobs(
        token_logprob=float(row[token]) - total,
        rank=1 + int((row > row[token]).sum()),
        top=tuple((int(i), float(row[i]) - total) for i in ids),
    )


def _is_plain(segment: Segment) -> bool:
    params = segment.params
    return params.is_greedy and params.logprobs is None and not edits_logits(segment)


def _failure(segment: Segment) -> Failure:
    return Failure(
        segment.request_id,
        f"the model's output for position {segment.start + segment.tokens} is not finite; "
        f"try a wider --dtype such as float32",
    )


def _filtered(row: Row, params: SamplingParams) -> Row:
    """Return the row over its temperature, shifted so that its maximum is 0, with all filtered tokens at -inf."""
    # The maximum is taken off first, or a small temperature would overflow.
    scores = row - row.max()
    scores /= max(params.temperature, MIN_TEMPERATURE)
    low = threshold(scores, params)
    if low > -math.inf:
        scores[scores < low] = -np.inf
    return scores


def threshold(scores: Row, params: SamplingParams) -> float:
    """Return the lowest of `scores` (vocab,; maximum 0) that may be drawn; equal scores are kept or dropped together.

    min_p, top_k and top_p apply in this order, each to what the one before has left (top_p to its renormalised
    probabilities).
    """
    low = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
    if not 0 < params.top_k < len(scores) and params.top_p >= 1.0:
        return low
    for cut in _CUTS:
        # Sorting the whole vocabulary would take ten times as long as sorting what lies near the top.
        near = np.sort(scores[scores >= max(low, cut)])[::-1]
        found = _threshold_near(near, scores, low, params, complete=cut <= low)
        if found is not None:
            return found
    raise AssertionError("the last cut leaves nothing out, so a threshold is found among its tokens")


def _threshold_near(near: Row, scores: Row, low: float, params: SamplingParams, *, complete: bool) -> float | None:
    """Return the threshold if it lies within `near` (descending), else None; `complete`: near is all above `low`."""
    if 0 < params.top_k <= len(near):
        low = max(low, float(near[params.top_k - 1]))
        near, complete = near[near >= low], True
    elif params.top_k > 0 and not complete:
        return None
    if params.top_p >= 1.0:
        return low
    reached = np.cumsum(np.exp(near, dtype=np.float64))
    total = reached[-1] if complete else np.exp(scores[scores >= low]).sum(dtype=np.float64)
    count = int(np.searchsorted(reached, params.top_p * total))
    if count == len(near) and not complete:
        return None
    # With all tokens at hand, only rounding can keep the sum below what is wanted: then all are kept.
    return float(near[min(count, len(near) - 1)])
