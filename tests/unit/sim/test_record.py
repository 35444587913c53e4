"""What a run keeps of itself: sums that thinning does not change, percentiles, and memory that does not grow."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from halocline.memory.retention import Full
from halocline.sim.clock import Agenda
from halocline.sim.record import Recorder, latency, percentile
from halocline.sim.series import Thinned
from testing.layouts import small_layout
from testing.replays import job, small_setup, workload


def test_thinning_keeps_every_sum_and_never_more_than_the_points_allowed() -> None:
    random, series = Random(0), Thinned(2, points=10)
    now, sums = 0.0, np.zeros(2)
    for number in range(1000):
        lasts = random.choice((0.001, 0.1, 1.0, 30.0 if number % 100 == 0 else 0.2))
        row = np.array([random.random(), 5.0]) * lasts
        series.add(now, lasts, row)
        sums += row
        now += lasts
        assert len(series.starts) <= 10
        assert series.seconds.sum() == pytest.approx(now)
        assert (series.means() * series.seconds[:, None]).sum(axis=0) == pytest.approx(sums)
        assert series.starts == pytest.approx(np.cumsum([0.0, *series.seconds[:-1]]))
    assert series.means()[:, 1] == pytest.approx(np.full(len(series.starts), 5.0))
    assert len(series.starts) > 4


def test_intervals_stay_apart_until_there_are_too_many() -> None:
    series = Thinned(1, points=4)
    for at in range(4):
        series.add(float(at), 1.0, np.array([float(at)]))
    assert series.means()[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    series.add(4.0, 1.0, np.array([4.0]))
    assert series.means()[:, 0].tolist() == [0.5, 2.5, 4.0]
    assert series.starts.tolist() == [0.0, 2.0, 4.0]
    series.add(5.0, 1.0, np.array([5.0]))
    assert series.means()[:, 0].tolist() == [0.5, 2.5, 4.5]


def test_percentiles_are_values_that_so_many_do_not_exceed() -> None:
    values = [float(value) for value in range(1, 101)]
    Random(1).shuffle(values)
    found = latency(values)
    assert (found.p50, found.p90, found.p95, found.p99, found.mean) == (50.0, 90.0, 95.0, 99.0, 50.5)
    assert found.cdf == tuple((float(value), value / 100) for value in range(1, 101))
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([], 0.95) == 0.0
    assert latency([]).p99 == 0.0
    assert latency([7.0]).cdf == ((7.0, 1.0),)


def test_a_distribution_of_many_has_at_most_200_points_and_ends_with_the_slowest() -> None:
    found = latency([value / 7 for value in range(12_031)])
    assert len(found.cdf) == 200
    assert found.cdf[-1] == (12_030 / 7, 1.0)
    shares = [share for _, share in found.cdf]
    assert shares == sorted(set(shares))
    seconds, share = found.cdf[99]
    assert share == pytest.approx(0.5, abs=0.005)
    assert seconds == pytest.approx(12_031 * share / 7, abs=0.2)


def test_events_come_in_order_and_cancelled_ones_do_not() -> None:
    agenda = Agenda()
    agenda.note(2.0, "abort", 1)
    agenda.note(2.0, "arrive", 2)
    agenda.note(1.0, "arrive", 1)
    agenda.note(5.0, "abort", 3)
    agenda.note(5.0, "arrive", 4)
    agenda.cancel("abort", 3)
    assert agenda.next_seconds == 1.0
    assert list(agenda.due(2.0)) == [(1.0, "arrive", 1), (2.0, "arrive", 2), (2.0, "abort", 1)]
    assert list(agenda.due(4.9)) == []
    assert list(agenda.due(5.0)) == [(5.0, "arrive", 4)]
    assert agenda.next_seconds is None


def test_nothing_is_kept_of_those_who_have_ended_but_a_few_numbers() -> None:
    from halocline.sim.backend import Stopwatch
    from halocline.sim.cost import CostModel
    from halocline.sim.driver import Driver, Mode
    from halocline.sim.record import Recorder
    from halocline.sim.setup import build

    setup = small_setup(prefix_cache=True)
    jobs = workload(*(job(f"j{number}", number / 4, abort_seconds=9.0 + number % 7) for number in range(600)))
    world = build(setup)
    record = Recorder(world.arena.layout, "open", 10.0, 0.1)
    driver = Driver(
        setup, world, jobs, Stopwatch(CostModel(setup.shape, setup.device), instant_prefill=False), record, Mode()
    )
    most = 0
    while driver.turn():
        most = max(most, len(driver._live))
    assert most <= 8 + 64 + 1
    assert driver.ended == 600
    assert not driver._live
    assert not driver._backend._answers
    assert not driver._lobby._impatient
    assert not driver._lobby._agenda._cancelled
    assert len(record.series().time_seconds) <= 1000


def test_an_arena_without_holes_has_none_however_long_its_intervals_lasted() -> None:
    record = Recorder(small_layout(Full(), slabs=9), "open", 10.0, 0.1)
    now = 0.0
    for number in range(100):
        held = number % 10
        record.interval(now, 0.1, (1, 0, 9 - held, held, 0), 0, "")
        now += 0.1
    assert record.arena().holes_share == 0.0, "no rounding of sums may look like a hole, or like less than none"
    assert set(record.series().hole_bytes) == {0.0}
