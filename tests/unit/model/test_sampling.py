"""Sampling against naive references: every filter and penalty, the distribution, and what it must not depend on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halocline.model.sampling import BLOCK_TOKENS, Sampler, draw, threshold, token_logprobs
from halocline.params import SamplingParams
from halocline.step import Segment

EOS = 3


def segment(name: str = "r", *, start: int = 10, seed: int = 1, **fields: Any) -> Segment:
    history = fields.pop("history", (5, 6, 7))
    prompt_tokens = fields.pop("prompt_tokens", len(history))
    forbids_stop = fields.pop("forbids_stop", False)
    params = SamplingParams(**fields)
    return Segment(name, start, 1, True, params, seed, history, prompt_tokens, forbids_stop)


def one_token(logits: torch.Tensor, **fields: Any) -> int:
    (sampled,), failures = Sampler((EOS,)).sample(logits[None], [segment(**fields)])
    assert not failures
    return sampled.token_id


def random_logits(vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


# ---- the naive reference -----------------------------------------------------------------------------------------


def naive_probabilities(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """The distribution that a token is drawn from, by the definitions, token by token in plain Python."""
    scaled = [float(x) / params.temperature for x in logits]
    best = max(scaled)
    weights = [math.exp(x - best) for x in scaled]
    kept = {i for i, w in enumerate(weights) if w >= params.min_p}
    if params.top_k > 0:
        ranked = sorted(kept, key=lambda i: -weights[i])
        if len(ranked) > params.top_k:
            kept = {i for i in kept if weights[i] >= weights[ranked[params.top_k - 1]]}
    total, reached, last = sum(weights[i] for i in kept), 0.0, 0.0
    for i in sorted(kept, key=lambda i: -weights[i]):
        last = weights[i]
        reached += last
        if params.top_p < 1.0 and reached >= params.top_p * total:
            break
    kept = {i for i in kept if weights[i] >= last}
    total = sum(weights[i] for i in kept)
    return np.array([weights[i] / total if i in kept else 0.0 for i in range(len(weights))])


def kept_tokens(logits: torch.Tensor, params: SamplingParams) -> set[int]:
    scores = (logits - logits.max()) / params.temperature
    return set(torch.nonzero(scores >= threshold(scores.numpy(), params)).flatten().tolist())


FILTERS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 5000},
    {"top_p": 0.5},
    {"top_p": 0.999999},
    {"top_p": 1e-9},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.7},
    {"top_k": 40, "min_p": 0.2, "top_p": 0.9},
]


@pytest.mark.parametrize("fields", FILTERS, ids=str)
@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
def test_filters_keep_what_the_definitions_keep(fields: dict[str, Any], scale: float) -> None:
    params = SamplingParams(temperature=0.8, **fields)
    logits = random_logits(1500, scale=scale)
    assert kept_tokens(logits, params) == set(np.flatnonzero(naive_probabilities(logits, params)).tolist())


@given(
    logits=st.lists(st.sampled_from([-40.0, -12.0, -3.0, -1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=30),
    temperature=st.sampled_from([0.3, 1.0, 4.0]),
    top_k=st.integers(0, 6),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.4]),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_filters_agree_with_the_definitions_where_scores_are_equal(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    row = torch.tensor(logits, dtype=torch.float64)
    # Within a class of equal scores the sum may reach top_p exactly; only rounding decides then.
    probabilities = naive_probabilities(row, SamplingParams(temperature=temperature, top_k=top_k, min_p=min_p))
    sums = np.cumsum(np.sort(probabilities)[::-1])
    if np.abs(sums - top_p).min() > 1e-9 or top_p == 1.0:
        assert kept_tokens(row, params) == set(np.flatnonzero(naive_probabilities(row, params)).tolist())


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.7}, *FILTERS[3:4], *FILTERS[6:7], *FILTERS[8:]], ids=str)
def test_tokens_are_drawn_by_their_probability(fields: dict[str, Any]) -> None:
    """Chi-square over 10,000 draws at different positions, three blocks of tokens, the last one not full."""
    vocab, draws = 2 * BLOCK_TOKENS + 100, 10_000
    logits = random_logits(vocab, scale=2.5)
    params = SamplingParams(**{"temperature": 1.0, **fields})
    expected = naive_probabilities(logits, params) * draws
    scores = (logits - logits.max()) / params.temperature
    scores[scores < threshold(scores.numpy(), params)] = -torch.inf
    counts = np.bincount([draw(scores.numpy(), seed=7, position=i) for i in range(draws)], minlength=vocab)
    assert counts[expected == 0].sum() == 0
    # Rare tokens are put together: chi-square wants some five of each.
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    chi_square, freedom = ((observed - wanted) ** 2 / wanted).sum(), len(wanted) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom) + 5


def test_seeds_give_independent_draws() -> None:
    scores = torch.zeros(700, dtype=torch.float64)
    counts = np.bincount([draw(scores.numpy(), seed=seed, position=3) for seed in range(14_000)], minlength=700)
    chi_square = ((counts - 20) ** 2 / 20).sum()
    assert chi_square < 699 + 5 * math.sqrt(2 * 699)


# ---- what a draw depends on --------------------------------------------------------------------------------------


def test_a_token_depends_on_its_seed_and_position_only() -> None:
    logits = random_logits(3000)
    tokens = [one_token(logits, seed=seed, start=start) for seed in range(8) for start in range(8)]
    assert tokens == [one_token(logits, seed=seed, start=start) for seed in range(8) for start in range(8)]
    assert len(set(tokens)) > 20
    # A prompt's last chunk of 5 tokens and a decode step sample the same position alike.
    chunk = Segment("r", 6, 5, True, SamplingParams(), 1, (), 0, False)
    (sampled,), _ = Sampler(()).sample(logits[None], [chunk])
    assert sampled.token_id == one_token(logits, seed=1, start=10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_token_does_not_depend_on_who_shares_the_batch(dtype: torch.dtype) -> None:
    rows = torch.stack([random_logits(2000, seed) for seed in range(6)]).to(dtype)
    fields: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"top_k": 30, "temperature": 0.7},
        {"top_p": 0.8},
        {"min_p": 0.1, "frequency_penalty": 0.5},
        {"temperature": 0.0, "logprobs": 3},
    ]
    segments = [segment(f"r{i}", seed=i, start=i * 7, **f) for i, f in enumerate(fields)]
    together, _ = Sampler((EOS,)).sample(rows, segments)
    for i in range(len(fields)):
        (alone,), _ = Sampler((EOS,)).sample(rows[i : i + 1], segments[i : i + 1])
        assert alone == together[i]
    backwards, _ = Sampler((EOS,)).sample(rows.flip(0), segments[::-1])
    assert backwards == together[::-1]


def test_logits_are_left_as_they_were() -> None:
    logits = random_logits(600).float()[None]
    copy = logits.clone()
    Sampler((EOS,)).sample(logits, [segment(temperature=0.5, repetition_penalty=1.5, forbids_stop=True, top_k=3)])
    assert torch.equal(logits, copy)


def test_the_smallest_temperatures_are_greedy() -> None:
    logits = random_logits(900)
    assert one_token(logits, temperature=1e-300) == int(logits.argmax())
    assert one_token(logits.float(), temperature=1e-300) == int(logits.argmax())


# ---- penalties and stops -----------------------------------------------------------------------------------------

HISTORY = (1, 1, 2, 5, 9, 9, 9, 2, 4)
PENALTIES = [
    {"presence_penalty": 1.5},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 0.7},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.5},
    {"presence_penalty": 0.4, "frequency_penalty": 0.9, "repetition_penalty": 1.3},
]


def naive_penalties(logits: list[float], prompt_tokens: int, p: SamplingParams) -> list[float]:
    result = []
    for token, x in enumerate(logits):
        value = x
        if token in HISTORY:
            value = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
        count = HISTORY[prompt_tokens:].count(token)
        value -= p.frequency_penalty * count
        if count:
            value -= p.presence_penalty
        result.append(value)
    return result


@pytest.mark.parametrize("fields", PENALTIES, ids=str)
@pytest.mark.parametrize("prompt_tokens", [0, 4, 9])
def test_penalties_agree_with_the_definitions(fields: dict[str, Any], prompt_tokens: int) -> None:
    logits = random_logits(12, seed=3)
    expected = naive_penalties(logits.tolist(), prompt_tokens, SamplingParams(**fields))
    (sampled,), _ = Sampler((EOS,)).sample(
        logits[None], [segment(temperature=0.0, logprobs=12, history=HISTORY, prompt_tokens=prompt_tokens, **fields)]
    )
    assert sampled.token_id == int(np.argmax(expected))
    assert sampled.logprobs is not None
    log_total = math.log(sum(math.exp(x) for x in expected))
    assert dict(sampled.logprobs.top) == pytest.approx({i: x - log_total for i, x in enumerate(expected)})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stops_that_are_not_allowed_yet_are_never_chosen(temperature: float) -> None:
    logits = torch.zeros(20)
    logits[[EOS, 8]] = 50.0
    chosen = {
        one_token(logits, temperature=temperature, stop_token_ids=(8,), forbids_stop=True, start=start)
        for start in range(50)
    }
    assert not chosen & {EOS, 8}
    assert one_token(logits, temperature=temperature, stop_token_ids=(8,)) in {EOS, 8}


def test_stops_that_the_model_does_not_have_are_ignored() -> None:
    logits = random_logits(20)
    logits[5] = 40.0
    assert one_token(logits, temperature=0.0, stop_token_ids=(20, 10**6), forbids_stop=True) == 5


# ---- log-probabilities and failures ------------------------------------------------------------------------------


def test_logprobs_are_those_before_temperature_and_filters() -> None:
    logits = random_logits(50)
    (sampled,), _ = Sampler(()).sample(logits[None], [segment(temperature=0.3, top_k=2, logprobs=4)])
    expected = torch.log_softmax(logits, dim=-1)
    order = expected.argsort(descending=True).tolist()
    assert sampled.logprobs is not None
    assert sampled.logprobs.token_logprob == pytest.approx(float(expected[sampled.token_id]))
    assert sampled.logprobs.rank == order.index(sampled.token_id) + 1
    assert [token for token, _ in sampled.logprobs.top] == order[:4]
    assert [p for _, p in sampled.logprobs.top] == pytest.approx(expected[order[:4]].tolist())


def test_logprobs_of_zero_alternatives_still_give_the_tokens_own() -> None:
    logprobs = token_logprobs(np.array([0.0, 1.0]), 0, 0)
    assert logprobs.top == ()
    assert logprobs.rank == 2


def test_equal_logprobs_are_listed_by_token() -> None:
    assert [token for token, _ in token_logprobs(np.zeros(6), 2, 6).top] == list(range(6))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_alone(value: float) -> None:
    rows = torch.stack([random_logits(40, seed) for seed in range(3)])
    rows[1, 39] = value
    segments = [segment(name, temperature=temperature) for name, temperature in (("a", 0.0), ("b", 1.0), ("c", 1.0))]
    sampled, failures = Sampler(()).sample(rows, segments)
    assert [s.request_id for s in sampled] == ["a", "c"]
    assert [f.request_id for f in failures] == ["b"]
    assert "position 11" in failures[0].message
