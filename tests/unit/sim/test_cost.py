"""What a step costs, against sums worked by hand and counts made position by position."""

from __future__ import annotations

import numpy as np
import pytest

from halocline.errors import ConfigError
from halocline.memory.layout import LayerKV
from halocline.memory.retention import Chunked, Full, Retention, Sliding, State
from halocline.sim.cost import CostModel, kinds_of, pairs_of, positions_read
from halocline.sim.device import Coefficients, Device
from halocline.sim.shapes import Shape

HYBRID = (LayerKV(0, Full(), 2, 8, 8), LayerKV(1, Sliding(4), 1, 8, 16), LayerKV(2, State(), state_bytes=1000))
"""Bytes of a position: 2 * 16 * 2 = 64 and 1 * 24 * 2 = 48; the state has 500 elements."""


def shape(layers: tuple[LayerKV, ...] = HYBRID, parameters: int | None = 1000, active: int | None = None) -> Shape:
    return Shape("tiny", layers, parameters, active or parameters, None, "made for a test")


def device(**changes: object) -> Device:
    """One with rates of 1, so that seconds are FLOPs or bytes."""
    figures = {"flops_per_second": 1.0, "bytes_per_second": 1.0, "memory_bytes": 1, "step_overhead_seconds": 0.0}
    ideal = {"compute_efficiency": 1.0, "attention_efficiency": 1.0, "memory_efficiency": 1.0}
    return Device(name="ideal", source="a test", **(figures | ideal | changes))  # type: ignore[arg-type]


COMPUTE = {"bytes_per_second": 1e12}
MEMORY = {"flops_per_second": 1e12}


@pytest.mark.parametrize("retention", [Full(), Sliding(1), Sliding(5), Sliding(16), Chunked(1), Chunked(6), State()])
def test_attention_counts_what_every_position_sees(retention: Retention) -> None:
    for start in range(20):
        for end in range(start + 1, 24):
            if isinstance(retention, State):
                assert (pairs_of(retention, start, end), positions_read(retention, start, end)) == (end - start, 1)
                continue
            seen = [range(retention.first_needed(at), at + 1) for at in range(start, end)]
            assert pairs_of(retention, start, end) == sum(map(len, seen)), (start, end)
            assert positions_read(retention, start, end) == len(set().union(*seen)), (start, end)


def test_the_bytes_of_a_decode_are_weights_windows_states_and_its_own_position() -> None:
    # weights 2 * 1000; full reads 11 positions, the window 4; the state is read and written; its own K and V written
    expected = 2000 + 11 * 64 + 4 * 48 + 2 * 1000 + (64 + 48)
    assert CostModel(shape(), device(**MEMORY)).seconds(np.array([10])) == expected


def test_the_flops_of_a_decode_are_two_per_weight_and_two_per_pair_and_element() -> None:
    # 4 query heads for each KV head: full 2 * 8 heads * 16 elements a pair, the window 2 * 4 * 24, states 4 an element
    expected = 2 * 1000 + 11 * 256 + 4 * 192 + 4 * 500
    assert CostModel(shape(), device(**COMPUTE)).seconds(np.array([10])) == expected


def test_a_chunk_costs_its_pairs_and_reads_its_history_once() -> None:
    # positions 3, 4, 5, 6: full sees 4 + 5 + 6 + 7, the window four each but for the first, which has four too
    model = shape(HYBRID[:2])
    assert CostModel(model, device(**COMPUTE)).seconds(np.array([], dtype=np.int64), [(3, 7)]) == (
        4 * 2000 + 22 * 256 + 16 * 192
    )
    assert CostModel(model, device(**MEMORY)).seconds(np.array([], dtype=np.int64), [(3, 7)]) == (
        2000 + 7 * 64 + 7 * 48 + 4 * (64 + 48)
    )


def test_whichever_takes_longer_is_what_a_step_takes_with_its_overhead() -> None:
    plain = {"flops_per_second": 4.0, "step_overhead_seconds": 3.0}
    model = CostModel(shape(HYBRID[:1], 10), device(**plain))
    # one decode at position 0: 20 + 256 FLOPs at 4 a second = 69 s; 20 + 64 + 64 bytes at 1 a second = 148 s
    assert model.seconds(np.array([0])) == 151
    # sixteen: (320 + 4096) / 4 = 1104 s, and 20 + 16 * 128 = 2068 s
    assert model.seconds(np.zeros(16, dtype=np.int64)) == 2071
    slow = CostModel(
        shape(HYBRID[:1], 10), device(flops_per_second=1.0, compute_efficiency=0.5, attention_efficiency=0.25)
    )
    assert slow.seconds(np.array([0])) == 20 / 0.5 + 256 / 0.25


def test_a_leap_takes_what_its_steps_take_one_by_one() -> None:
    for kind in (COMPUTE, MEMORY, {"step_overhead_seconds": 7.0}):
        model = CostModel(shape(), device(**kind))
        starts = np.array([0, 2, 3, 50])
        single = sum(model.seconds(starts + ahead) for ahead in range(6))
        assert model.leap_seconds(starts, 6) == pytest.approx(single, rel=1e-12)


def test_experts_are_read_as_far_as_tokens_touch_them() -> None:
    model = CostModel(shape(HYBRID[:1], parameters=1000, active=100), device())
    assert model.weights_read(1) == pytest.approx(2 * 100)
    assert model.weights_read(2) == pytest.approx(2 * (100 + 90))
    assert model.weights_read(1000) == pytest.approx(2 * 1000)
    assert CostModel(shape(parameters=1000), device()).weights_read(1) == 2000


def test_a_draft_is_not_computed_here() -> None:
    draft = LayerKV(0, Full(), 2, 8, 8, model="draft")
    assert kinds_of((*HYBRID, draft)) == kinds_of(HYBRID)


def test_measured_points_replace_the_formula_and_go_on_beyond_their_ends() -> None:
    model = CostModel(shape(parameters=None), device(points=((10.0, 1.0), (20.0, 3.0), (40.0, 4.0))))
    for tokens, seconds in ((10, 1.0), (15, 2.0), (30, 3.5), (60, 5.0), (6, 0.2), (1, 0.0)):
        assert model.seconds(np.zeros(tokens, dtype=np.int64)) == pytest.approx(seconds), tokens


def test_fitted_coefficients_replace_the_formula() -> None:
    fit = Coefficients(step_seconds=1.0, token_seconds=10.0, kv_byte_seconds=100.0, pair_seconds=1000.0)
    model = CostModel(shape(HYBRID[:2], None), device(coefficients=fit))
    # a decode at 10 and a chunk of 2 at 0: 3 tokens; 11 + 2 positions of 64 bytes, 4 + 2 of 48; 11 + 4 + 3 + 3 pairs
    assert model.seconds(np.array([10]), [(0, 2)]) == 1 + 10 * 3 + 100 * (13 * 64 + 6 * 48) + 1000 * 21


def test_a_model_of_unknown_size_cannot_be_timed_by_a_formula() -> None:
    with pytest.raises(ConfigError, match="the parameters of tiny are not known"):
        CostModel(shape(parameters=None), device())
