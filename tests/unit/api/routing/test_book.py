"""The book of workers: who is up and why not, what counts as free, who is lost. Times are plain numbers."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from halocline.api.routing.affinity import beginning
from halocline.api.routing.book import PAIR_SECONDS, SETTLE_SECONDS, Book, Load, Pick, Report, Worker

LOST_SECONDS = 10.0


def book(prefill: int = 1, decode: int = 2) -> Book:
    return Book([f"p{i}" for i in range(prefill)], [f"d{i}" for i in range(decode)], LOST_SECONDS)


def report(worker: Worker, life: int = 1, **changes: Any) -> Report:
    values = {
        "role": worker.side,
        "epoch": f"{worker.name}/{life}",
        "model": "m",
        "fingerprint": "f",
        "link_address": "tcp://x:1",
        "total_bytes": 1000,
        "free_bytes": 1000,
        "token_bytes": 1,
    }
    return Report(**values | changes)


def load(prompt: bytes = b"", tokens: int = 100) -> Load:
    return Load(beginning(prompt), tokens)


def all_up(book: Book, now: float = 0.0) -> Book:
    for worker in book.workers:
        book.answered(worker, report(worker), now)
    return book


def picked(book: Book, now: float = 0.0, prompt: bytes = b"", **how: Any) -> Pick:
    pick = book.pick(load(prompt), now, **how)
    assert pick is not None
    return pick


def test_nobody_is_picked_before_it_has_answered() -> None:
    assert book().pick(load(), 0.0) is None
    assert book().blockers() == (
        "decode-0 is unknown (it has not answered yet); decode-1 is unknown (it has not answered yet)"
    )


def test_free_bytes_are_what_was_said_less_what_was_sent_since() -> None:
    one = all_up(book(decode=1))
    worker = one.decode[0]
    first = picked(one, now=5.0)
    assert worker.free_bytes == 900
    # It may not have known of this when it said so: a second must lie between.
    one.answered(worker, report(worker, free_bytes=950), 5.0 + SETTLE_SECONDS - 0.1)
    assert worker.free_bytes == 850
    one.answered(worker, report(worker, free_bytes=900), 5.0 + SETTLE_SECONDS)
    assert worker.free_bytes == 900
    second = picked(one, now=7.0)
    assert worker.free_bytes == 800
    one.end(second)
    one.end(second)
    assert worker.free_bytes == 900
    one.end(first)
    assert not worker.flights


def test_work_at_a_prefill_worker_ends_with_the_first_token_or_when_it_says_that_it_is_idle() -> None:
    one = all_up(book())
    prefill = one.prefill[0]
    first, second = (picked(one, prompt=each * 600) for each in (b"a", b"b"))
    assert prefill.outstanding_bytes == 1200
    one.computed(first)
    assert prefill.outstanding_bytes == 600
    one.answered(prefill, report(prefill, running=1), 2.0)
    assert prefill.outstanding_bytes == 600
    one.answered(prefill, report(prefill), 2.0)
    assert prefill.outstanding_bytes == 0
    assert picked(one, prompt=b"a" * 600).flights[1].work_bytes == 600 - 512, "what it has seen is no work"
    one.end(second)


def test_a_worker_does_not_send_to_itself() -> None:
    one = Book(["w"], ["w"], LOST_SECONDS)
    for worker in one.workers:
        one.answered(worker, report(worker, role="both", epoch="same"), 0.0)
    assert picked(one).prefill is None


def test_a_pair_that_lost_a_prompt_is_kept_apart_for_a_while() -> None:
    one = all_up(book(prefill=1, decode=1))
    one.lost_pair(picked(one), 100.0)
    assert picked(one, 100.0 + PAIR_SECONDS - 1).prefill is None
    assert picked(one, 100.0 + PAIR_SECONDS).prefill is one.prefill[0]


def test_a_flight_is_lost_with_its_workers_life_or_after_a_long_silence() -> None:
    one = all_up(book(prefill=0, decode=1))
    worker, flight = one.decode[0], picked(one, 1.0).flights[0]
    assert one.lost_reason(flight, 1000.0) is None, "who is up is not lost, whenever it was last asked"
    one.missed(worker, "no answer")
    assert one.lost_reason(flight, LOST_SECONDS - 0.1) is None
    assert one.lost_reason(flight, LOST_SECONDS) == "the worker has been silent for 10.0 s"
    one.answered(worker, report(worker, life=1), 11.0)
    assert one.lost_reason(flight, 50.0) is None
    one.answered(worker, report(worker, life=2), 51.0)
    assert one.lost_reason(flight, 51.0) == "the worker was restarted"


def test_a_new_model_is_a_misfit_while_any_worker_serves_the_old_one_and_the_model_after_that() -> None:
    one = all_up(book(prefill=1, decode=2))
    one.answered(one.decode[0], report(one.decode[0], life=2, model="new"), 1.0)
    assert one.decode[0].reason == "it serves 'new'; the other workers serve 'm'"
    one.missed(one.decode[1], "gone")
    one.answered(one.decode[0], report(one.decode[0], life=2, model="new"), 2.0)
    assert one.decode[0].is_misfit
    one.missed(one.prefill[0], "gone")
    one.answered(one.decode[0], report(one.decode[0], life=2, model="new"), 3.0)
    assert (one.decode[0].state, one.model) == ("up", "new")
    one.answered(one.prefill[0], report(one.prefill[0]), 4.0)
    assert one.prefill[0].is_misfit


class BookMachine(RuleBasedStateMachine):
    """Workers come, go and restart; requests begin and end: nothing leaks and only who is up is picked."""

    def __init__(self) -> None:
        super().__init__()
        self.book = book(prefill=2, decode=3)
        self.lives = dict.fromkeys((each.name for each in self.book.workers), 1)
        self.picks: list[Pick] = []
        self.now = 0.0

    def worker(self, index: int) -> Worker:
        return self.book.workers[index]

    @rule(index=st.integers(0, 4), waiting=st.integers(0, 2), free=st.integers(0, 1000), seconds=st.floats(0, 3))
    def answers(self, index: int, waiting: int, free: int, seconds: float) -> None:
        self.now += seconds
        worker = self.worker(index)
        life = self.lives[worker.name]
        self.book.answered(worker, report(worker, life, waiting=waiting, free_bytes=free), self.now)
        assert worker.is_up

    @rule(index=st.integers(0, 4))
    def restarts(self, index: int) -> None:
        worker = self.worker(index)
        self.lives[worker.name] += 1
        self.book.missed(worker, "gone")

    @rule(index=st.integers(0, 4), status=st.sampled_from(["draining", "dead"]))
    def is_unwell(self, index: int, status: str) -> None:
        worker = self.worker(index)
        self.book.answered(worker, report(worker, self.lives[worker.name], status=status), self.now)
        assert worker.state == "unwell"

    @rule(index=st.integers(0, 4))
    def has_another_token(self, index: int) -> None:
        self.book.refused(self.worker(index), "token", self.now)

    @rule(
        letter=st.sampled_from([b"a", b"b"]), size=st.integers(0, 2000), without=st.sets(st.integers(0, 4), max_size=3)
    )
    def picks_one(self, letter: bytes, size: int, without: set[int]) -> None:
        names = {self.worker(each).name for each in without}
        pick = self.book.pick(load(letter * size), self.now, without=names)
        left = [each for each in self.book.decode if each.is_up and each.name not in names]
        assert (pick is None) == (not left)
        if pick is not None:
            assert pick.decode in left
            able = [each for each in self.book.prefill if each.is_up and each.name not in names]
            assert (pick.prefill in able) if able else (pick.prefill is None)
            self.picks.append(pick)

    @precondition(lambda self: self.picks)
    @rule(index=st.integers(0, 100), is_computed=st.booleans())
    def ends(self, index: int, is_computed: bool) -> None:
        pick = self.picks.pop(index % len(self.picks))
        if is_computed:
            self.book.computed(pick)
        self.book.end(pick)

    @invariant()
    def flights_are_those_of_the_picks(self) -> None:
        counted = {flight.number for each in self.book.workers for flight in each.flights.values()}
        assert counted == {flight.number for pick in self.picks for flight in pick.flights}

    @invariant()
    def nothing_is_negative(self) -> None:
        for each in self.book.workers:
            assert each.outstanding_bytes >= 0
            if each.report is not None:
                assert each.free_bytes <= each.report.free_bytes


BookMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestBook = BookMachine.TestCase
