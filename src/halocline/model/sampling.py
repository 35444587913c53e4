"""Choosing the next tokens: one row of logits per request that samples in this step.

    logits -> stops, penalties -> [log-probabilities] -> / temperature -> min_p -> top_k -> top_p -> draw

Most rows of most steps are greedy and plain: one maximum over the whole batch serves them. Every other row is
worked on by itself, so that nothing it gets can depend on which requests share its step; a row of 262,144 float32
also stays in the processor's cache, which several together would not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halocline.model.noise import gumbel, noise_key
from halocline.model.penalties import edit_logits, edits_logits
from halocline.params import SamplingParams
from halocline.step import Failure, Sampled, Segment, TokenLogprobs

BLOCK_TOKENS = 512
"""Tokens per block of the two-stage draw: about the square root of the largest vocabularies."""
_CUTS = (-10.0, -20.0, -math.inf)
"""Where filters look for their threshold, in nats below the best token: mostly among some hundreds of tokens."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """Samples for one model; holds no state."""

    eos_token_ids: tuple[int, ...]

    def sample(self, logits: Tensor, segments: Sequence[Segment]) -> tuple[tuple[Sampled, ...], tuple[Failure, ...]]:
        """Sample one token per row of `logits` (segments, vocab); a row that is not finite becomes a Failure."""
        best, tokens = (values.tolist() for values in logits.max(dim=-1))
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
        # A copy in full precision: the edits are done in place.
        row = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32, copy=True)
        edit_logits(row, segment, self.eos_token_ids)
        if params.is_greedy:
            token = int(row.max(dim=-1).indices)
        else:
            token = draw(_filtered(row, params), segment.seed, segment.start + segment.tokens)
        logprobs = None if params.logprobs is None else token_logprobs(row, token, params.logprobs)
        return Sampled(segment.request_id, token, logprobs)


def draw(scores: Tensor, seed: int, position: int) -> int:
    """Draw a token with probability softmax(scores); `scores` (vocab,) has 0 as its maximum, -inf where forbidden.

    First a block of tokens is drawn by its total probability, then a token within it: exactly the same distribution,
    but noise is needed for one block and not for the whole vocabulary.
    """
    key = noise_key(seed, position)
    blocks = -(-scores.shape[0] // BLOCK_TOKENS)
    start = 0
    if blocks > 1:
        mass = torch.nn.functional.pad(scores.exp(), (0, blocks * BLOCK_TOKENS - scores.shape[0]))
        block = mass.view(blocks, BLOCK_TOKENS).sum(dim=1).double().log().cpu().numpy()
        # Indices beyond the vocabulary, so that no token shares its noise with a block.
        start = BLOCK_TOKENS * int((block + gumbel(key, blocks * BLOCK_TOKENS, blocks)).argmax())
    within = scores[start : start + BLOCK_TOKENS].double().cpu().numpy()
    return start + int((within + gumbel(key, start, len(within))).argmax())


def token_logprobs(row: Tensor, token: int, top: int) -> TokenLogprobs:
    """Return the log-probability and rank of `token` under `row` (vocab,), and the `top` most probable tokens."""
    total = torch.logsumexp(row, dim=-1)
    values, ids = row.topk(min(top, row.shape[0]))
    best = zip(ids.tolist(), (values - total).tolist(), strict=True)
    return TokenLogprobs(
        token_logprob=float(row[token] - total),
        rank=1 + int((row > row[token]).sum()),
        top=tuple(sorted(best, key=lambda pair: (-pair[1], pair[0]))),
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


def _filtered(row: Tensor, params: SamplingParams) -> Tensor:
    """Return the row over its temperature, shifted so that its maximum is 0, with all filtered tokens at -inf."""
    # The maximum is taken off first, or a tiny temperature would overflow.
    scores = (row - row.max()) / params.temperature
    low = threshold(scores, params)
    return scores if low == -math.inf else scores.masked_fill_(scores < low, -torch.inf)


def threshold(scores: Tensor, params: SamplingParams) -> float:
    """Return the lowest of `scores` (vocab,; maximum 0) that may be drawn; equal scores are kept or dropped together.

    min_p, top_k and top_p apply in this order, each to what the one before has left (top_p to its renormalised
    probabilities).
    """
    low = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
    if not 0 < params.top_k < scores.shape[0] and params.top_p >= 1.0:
        return low
    for cut in _CUTS:
        # Sorting the whole vocabulary would take twenty times as long as sorting what lies near the top.
        near = scores[scores >= max(low, cut)].double()
        found = _threshold_near(near, scores, low, params, complete=cut <= low)
        if found is not None:
            return found
    raise AssertionError("the last cut leaves nothing out, so a threshold is found among its tokens")


def _threshold_near(
    near: Tensor, scores: Tensor, low: float, params: SamplingParams, *, complete: bool
) -> float | None:
    """Return the threshold if it lies within `near`, else None; `complete`: near is all that min_p has left."""
    if 0 < params.top_k <= near.shape[0]:
        low = max(low, float(near.topk(params.top_k).values[-1]))
        near, complete = near[near >= low], True
    elif params.top_k > 0 and not complete:
        return None
    if params.top_p >= 1.0:
        return low
    whole = near if complete else scores[scores >= low]
    wanted = params.top_p * float(whole.exp().sum(dtype=torch.float64))
    near = near.sort(descending=True).values
    reached = int((near.exp().cumsum(dim=0) < wanted).sum())
    if reached == near.shape[0] and not complete:
        return None
    # With all tokens at hand, only rounding can keep the sum below what is wanted: then all are kept.
    return float(near[min(reached, near.shape[0] - 1)])
