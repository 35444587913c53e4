"""Leases end at their time, and nothing but progress moves it."""

from __future__ import annotations

from halocline.disagg.leases import Lease, Repeat


def test_a_lease_is_over_exactly_at_its_end() -> None:
    lease = Lease(10.0, 2.0)
    assert not lease.is_over(11.999)
    assert lease.is_over(12.0)
    lease.renew(11.0)
    assert not lease.is_over(12.999)
    assert lease.is_over(13.0)


def test_a_report_renews_only_when_it_is_below_all_before() -> None:
    lease = Lease(0.0, 2.0)
    told = [
        (lease.report(left, now), lease.ends_at) for now, left in ((1.0, 9), (1.5, 9), (1.6, 12), (1.7, 10), (1.8, 8))
    ]
    assert told == [(True, 3.0), (False, 3.0), (False, 3.0), (False, 3.0), (True, 3.8)]
    assert lease.is_over(3.8)


def test_reports_keep_a_lease_no_longer_than_there_is_work() -> None:
    lease, now = Lease(0.0, 1.0), 0.0
    for left in (3, 2, 1, 0, 0, 0):
        now += 0.5
        lease.report(left, now)
    assert lease.ends_at == 2.0 + 1.0


def test_a_thing_is_said_again_once_per_period() -> None:
    repeat = Repeat(0.0, 1.0)
    assert [repeat.is_due(now) for now in (0.5, 1.0, 1.5, 1.9, 2.0, 7.0, 7.5)] == [
        False,
        True,
        False,
        False,
        True,
        True,
        False,
    ]
