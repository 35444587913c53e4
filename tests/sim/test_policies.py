"""What ways of dividing memory cost: a saturated queue through the shipped scheduler, one policy beside another.

Lengths are the public traces' where the files are there, and made up with the same means where not, so figures are
compared with wide margins. `pytest -s` prints the concurrency of each policy.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from halocline.memory.demand import resident
from halocline.memory.layout import LayerKV
from halocline.memory.retention import Full, Sliding, State
from halocline.memory.sizing import concurrency, static_caps
from halocline.units import GIB, MIB
from testing import wrong
from testing.layouts import GEMMA_3_27B, QWEN3_NEXT_80B, layers_of
from testing.policies import (
    EQUAL,
    FULL,
    KEEPING,
    RINGS_PER_REQUEST,
    SELFISH,
    SHARED,
    Policy,
    by_slabs,
    equal_groups,
    padding_share,
    peak_grants,
    rings,
    static,
)
from testing.saturated import Lengths, Outcome, Queue, made_up_lengths, saturate, sessions, trace_lengths

SHAPES = {"gemma-3-27b": GEMMA_3_27B, "qwen3-next-80b": QWEN3_NEXT_80B}
SIZES = {
    ("gemma-3-27b", "mooncake"): 16 * GIB,
    ("gemma-3-27b", "azure"): 6 * GIB,
    ("qwen3-next-80b", "mooncake"): 4 * GIB,
    ("qwen3-next-80b", "azure"): 2 * GIB,
}
"""Arenas that hold about a dozen requests: with so few, the queue outlasts the first wave several times."""
COUNTS = {"mooncake": 20, "azure": 60}


def show(*words: object) -> None:
    print(*words)


def served(policy: Policy, shape: str, trace: str, lengths: Lengths | None = None) -> Outcome:
    """Run a queue; whatever the policy, a right one finishes all and retracts nobody."""
    lengths = made_up_lengths(trace, COUNTS[trace]) if lengths is None else lengths
    outcome = saturate(policy, SHAPES[shape], SIZES[shape, trace], lengths)
    show(f"{shape:<16} {policy.name:<16} {outcome.concurrency:7.1f} at once, {outcome.steps} steps")
    assert (outcome.finished, outcome.failed) == (len(lengths) - outcome.rejected, 0)
    assert (outcome.retractions, outcome.stuck) == (0, False)
    return outcome


@pytest.mark.parametrize("trace", COUNTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_shared_arena_holds_most_of_all_policies(shape: str, trace: str) -> None:
    lengths, _ = trace_lengths(trace, COUNTS[trace])
    shared = served(SHARED, shape, trace, lengths)
    assert shared.rejected == 0
    for policy in (static(0.8), static(0.8, 2.0), EQUAL, FULL):
        other = served(policy, shape, trace, lengths)
        assert other.concurrency <= shared.concurrency * 1.02, f"{policy.name} holds more than the shared arena"


def test_a_static_split_loses_where_its_ratio_is_not_the_traffics() -> None:
    shared, split = (served(policy, "gemma-3-27b", "mooncake") for policy in (SHARED, static(0.8)))
    assert shared.concurrency > 2.5 * split.concurrency


def test_a_static_split_pays_for_states_that_nobody_has_and_for_tokens_that_nobody_has() -> None:
    best = served(SHARED, "qwen3-next-80b", "azure").concurrency
    few_states, many_states = (
        served(static(0.8, share), "qwen3-next-80b", "azure").concurrency for share in (0.9, 10.0)
    )
    assert few_states < 0.8 * best
    assert many_states < 0.8 * best


@pytest.mark.parametrize(
    ("layers", "padding"),
    [
        (layers_of((19, Full()), (18, Sliding(1024))), 1),  # groups of 19: one empty layer
        (layers_of((20, Full()), (30, Sliding(1024))), 10),  # 30 layers in two groups of 20
        (layers_of((10, Full()), (16, Sliding(1024))), 4),
        (GEMMA_3_27B, 8),  # 52 layers in six groups of 10
        (layers_of((9, Full()), (39, Sliding(128)), (5, Sliding(2048))), 2),
    ],
)
def test_equal_pages_pad_kinds_to_whole_groups(layers: tuple[LayerKV, ...], padding: int) -> None:
    groups, room, _ = equal_groups(layers)
    assert sum(group.filled for group in groups) == len(layers)
    assert len(groups) * room - len(layers) == padding


def test_equal_pages_make_a_short_prompt_of_a_recurrent_hybrid_dear() -> None:
    """B2: one page of attention becomes as long as a layer's state."""
    layout = EQUAL.lay_out(QWEN3_NEXT_80B, 4 * GIB)
    assert max(pool.page_tokens for pool in layout.pools) == 1056
    ours, theirs = (concurrency(policy.lay_out(QWEN3_NEXT_80B, 4 * GIB), None, 12, 4) for policy in (SHARED, EQUAL))
    assert ours > 1.3 * theirs


def test_the_programs_layout_pads_nothing_where_equal_pages_pad_a_tenth() -> None:
    shares = []
    for policy in (SHARED, EQUAL):
        layout = policy.lay_out(GEMMA_3_27B, 16 * GIB)
        shares.append(padding_share(layout, resident(layout, 2048, 128)))
    assert shares[0] == 0
    assert shares[1] == pytest.approx(8 * 65 / (10 * 136 + 52 * 65))  # 8 empty layers in 65 window pages


def test_a_queue_of_equal_requests_reaches_the_concurrency_that_was_printed() -> None:
    """B7: what start-up says is what runs."""
    layers = layers_of((3, Full()), (15, Sliding(512)), heads=1, dim=256)
    layout = by_slabs(layers, 256 * MIB)
    assert concurrency(layout, None, 2048, 128) == 18
    assert saturate(SHARED, layers, 256 * MIB, [(2048, 128)] * 60).peak == 18
    split = static_caps(layout, 0.8)
    assert saturate(static(0.8), layers, 256 * MIB, [(2048, 128)] * 30).peak == concurrency(layout, split, 2048, 128)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_prefix_cache_works_under_every_policy(shape: str) -> None:
    """Twelve sessions of four prompts each in an arena that does not hold them all: shared, split, padded, one pool."""
    prompts, size = sessions(12, 4, 1500, 440), {"gemma-3-27b": 8 * GIB, "qwen3-next-80b": 3 * GIB}[shape]
    computed = {}
    for policy in (SHARED, static(0.8), EQUAL, FULL):
        cold, hot = (Queue(policy, SHAPES[shape], size, prefix_cache=on).run(prompts) for on in (False, True))
        for outcome in (cold, hot):
            assert (outcome.finished, outcome.failed, outcome.stuck) == (48, 0, False)
        assert cold.computed_tokens == sum(len(prompt) + 39 for prompt, _ in prompts)  # type: ignore[arg-type]
        assert hot.computed_tokens < cold.computed_tokens
        computed[policy.name] = hot.computed_tokens
    show(f"{shape:<16} tokens computed with the prefix cache on: {computed}")
    if shape == "gemma-3-27b":
        assert computed["shared"] == min(computed.values())


# ---- grants and rings


def test_a_grant_of_the_prefill_peak_for_life_costs_a_third_or_more() -> None:
    shared = served(SHARED, "gemma-3-27b", "mooncake").concurrency
    until_computed = served(peak_grants(8192), "gemma-3-27b", "mooncake").concurrency
    for_life = served(peak_grants(8192, for_life=True), "gemma-3-27b", "mooncake").concurrency
    assert for_life < 0.67 * shared
    assert for_life < until_computed <= 1.02 * shared


def test_a_ring_per_request_costs_what_short_requests_do_not_use() -> None:
    shared, ring = (served(policy, "gemma-3-27b", "azure") for policy in (SHARED, RINGS_PER_REQUEST))
    assert ring.concurrency < 0.97 * shared.concurrency


def test_rings_for_every_slot_leave_less_than_windows_on_demand() -> None:
    """B6: too few slots waste the full part, too many the windows; both sides lose to none at all."""
    shared = served(SHARED, "gemma-3-27b", "azure").concurrency
    for slots in (4, 14):
        assert served(rings(slots), "gemma-3-27b", "azure").concurrency < 0.9 * shared


# ---- wrong policies: what they do to the same queue


def wronged(spoil: Callable[[Queue], None], lengths: Lengths) -> Outcome:
    queue = Queue(SHARED, GEMMA_3_27B, 16 * GIB)
    spoil(queue)
    return queue.run(lengths)


def test_chunks_from_others_grants_retract_and_compute_again() -> None:
    """A4 in a queue: the right policy retracts nobody (`served` says so)."""
    lengths = made_up_lengths("mooncake", 40)
    served(SHARED, "gemma-3-27b", "mooncake", lengths)
    outcome = wronged(wrong.takes_granted_room, lengths)  # type: ignore[arg-type]
    assert outcome.retractions > 0
    assert outcome.recomputed_tokens > 0


def test_windows_that_are_kept_in_decode_outgrow_their_grants() -> None:
    lengths = made_up_lengths("mooncake", 12)
    served(SHARED, "gemma-3-27b", "mooncake", lengths)
    outcome = wronged(wrong.keeps_windows_while_decoding, lengths)  # type: ignore[arg-type]
    assert outcome.failed > 0, "a request holds more than its price and nobody notices"


def test_windows_priced_at_full_length_cost_half_of_the_requests() -> None:
    """A8 in a queue."""
    right = served(SHARED, "gemma-3-27b", "mooncake").concurrency
    dear = Policy("full-length windows", by_slabs, price=wrong.price_of_a_full_length_window)
    lengths = made_up_lengths("mooncake", COUNTS["mooncake"])
    assert saturate(dear, GEMMA_3_27B, 16 * GIB, lengths).concurrency < 0.5 * right


def test_a_price_rounded_twice_keeps_out_what_fits() -> None:
    """H2 in a queue: prompt and output of one token more than a page are charged a page too many."""
    twice = Policy("rounded twice", by_slabs, price=wrong.price_rounded_twice)
    right, dear = (saturate(policy, GEMMA_3_27B, 2 * GIB, [(49, 17)] * 200).peak for policy in (SHARED, twice))
    assert dear < 0.9 * right


def test_a_pool_that_may_evict_only_itself_ends_with_everybody_waiting() -> None:
    """H1 in a queue: the traffic changes from short to long, and the windows' cached pages stay where they are."""
    lengths = made_up_lengths("azure", 60) + made_up_lengths("mooncake", 15)
    right, selfish = (saturate(policy, GEMMA_3_27B, 16 * GIB, lengths) for policy in (KEEPING, SELFISH))
    assert (right.finished, right.stuck) == (len(lengths), False)
    assert selfish.stuck
    assert selfish.finished < len(lengths)


def test_a_state_stays_one_page_however_long_the_request_is() -> None:
    """B3 in a queue, under every way to cut the arena."""
    lengths = made_up_lengths("azure", 10)
    for policy in (SHARED, EQUAL, FULL):
        queue = Queue(policy, QWEN3_NEXT_80B, 4 * GIB)
        outcome = queue.run(lengths)
        states = [pool for pool, each in enumerate(queue.layout.pools) if isinstance(each.retention, State)]
        assert states
        assert all(0 < outcome.held_pages[pool] <= outcome.peak for pool in states)
