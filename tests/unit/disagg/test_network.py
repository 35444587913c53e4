"""The simulated network keeps the promises of a post, and breaks those that a network breaks."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from halocline.disagg import messages as wire
from halocline.disagg.actions import Key
from halocline.disagg.network import Network, Weather
from halocline.disagg.post import Delivered, Down, Up
from halocline.disagg.simulated import Cargo, SimulatedPost, digest
from halocline.schedule.events import PoolPages

FACTS = wire.PeerFacts(
    model="m", dtype="d", vocab_size=9, granule_tokens=1, pools=(wire.PoolFacts("full", 1, 1, 64, ()),)
)
PAGES = wire.Pages("r", 1, 0, 0, (wire.PageRun(0, 1),))
RUNS = (PoolPages(0, np.array([0], np.int32)),)


class Memory:
    """One page of one byte."""

    def __init__(self, value: int) -> None:
        self.value = value
        self.written: list[int] = []

    def read(self, runs: Sequence[PoolPages]) -> Cargo:
        assert len(runs) == 1
        return (np.array([[self.value]], np.uint8),)

    def write(self, key: Key, pages: wire.Pages, cargo: Cargo, source: wire.PeerFacts) -> str:
        assert source is FACTS
        assert (key.request, pages.runs) == ("r", PAGES.runs)
        self.written.append(int(cargo[0][0, 0]))
        return ""


class Town:
    """Two workers and their network."""

    def __init__(self, weather: Weather | None = None, seed: int = 0, most_faults: int = 10**6) -> None:
        self.struck: list[tuple[str, str]] = []
        self.network = Network(
            Random(seed),
            weather or Weather(),
            most_faults,
            latency_seconds=0.01,
            lease_seconds=1.0,
            slow_bytes=1,
            strike=lambda kind, address: self.struck.append((kind, address)),
        )
        self.memories = {"p": Memory(5), "d": Memory(0)}
        self.p, self.d = (self.live(address) for address in ("p", "d"))

    def live(self, address: str) -> SimulatedPost:
        hello = wire.Hello(role="both", epoch=f"{address}", facts=FACTS)
        return self.network.open(address, hello, self.memories[address])

    def connect(self, is_pull: bool = False) -> tuple[str, str]:
        """Return what d calls p, and p calls d."""
        name = self.d.dial("p")
        self.d.ends[name].is_pull = is_pull
        self.pass_seconds(0.1)
        (up,), (other,) = self.d.poll(), self.p.poll()
        assert isinstance(up, Up)
        assert isinstance(other, Up)
        assert (up.hello, other.hello) == (self.p.hello, self.d.hello)
        return up.peer, other.peer

    def pass_seconds(self, seconds: float) -> None:
        self.network.advance(self.network.now + seconds)


def test_a_message_and_its_pages_arrive() -> None:
    town = Town()
    p, d = town.connect()
    town.p.send(d, PAGES, RUNS)
    town.d.send(p, wire.Taken("r", 1, 0))
    town.pass_seconds(0.1)
    assert town.d.poll() == [Delivered(p, PAGES)]
    assert town.p.poll() == [Delivered(d, wire.Taken("r", 1, 0))]
    assert town.memories["d"].written == [5]
    assert town.network.fault_count == 0


def test_nobody_listening_refuses() -> None:
    town = Town()
    name = town.d.dial("nobody")
    town.pass_seconds(0.1)
    assert town.d.poll() == [Down(name, "connection refused")]


def test_what_is_recalled_is_neither_read_nor_sent() -> None:
    town = Town()
    _, d = town.connect()
    town.p.send(d, PAGES, RUNS)
    town.p.recall(d, "r", 2)
    assert len(town.p.outgoing) == 1
    town.p.recall(d, "r", 1)
    assert town.p.outgoing == []
    town.pass_seconds(1.0)
    assert town.d.poll() == []
    assert town.memories["d"].written == []


def test_pages_that_are_pulled_too_late_have_a_wrong_checksum() -> None:
    town = Town()
    p, d = town.connect(is_pull=True)
    town.network.stop("d")
    town.p.send(d, PAGES, RUNS)
    town.pass_seconds(1.0)
    town.memories["p"].value = 6  # they are another's by now
    town.network.wake(town.d)
    town.pass_seconds(0.1)
    assert town.d.poll() == [Delivered(p, PAGES, "the checksum of its pages is wrong")]


def test_pages_that_nobody_drains_are_read_when_somebody_does() -> None:
    town = Town()
    p, d = town.connect()
    town.network.stop("d")
    town.p.send(d, PAGES, RUNS)
    town.pass_seconds(1.0)
    town.memories["p"].value = 6
    town.network.wake(town.d)
    town.pass_seconds(0.1)
    assert town.d.poll() == [Delivered(p, PAGES)]
    assert town.memories["d"].written == [6]  # why pages are recalled before they are another's


def test_a_crash_is_heard_of_unless_it_is_silent() -> None:
    for is_silent in (False, True):
        town = Town()
        p, d = town.connect()
        town.p.send(d, wire.Offer("r", 1))
        town.network.crash("p", is_silent=is_silent)
        town.pass_seconds(1.0)
        news = town.d.poll()
        assert Delivered(p, wire.Offer("r", 1)) in news  # it was on the wire
        assert (Down(p, "connection reset") in news) != is_silent
        reborn = town.live("p")
        town.d.send(p, wire.Accept("r", 1, 0))
        town.pass_seconds(1.0)
        assert reborn.poll() == []  # another life


def test_whoever_hangs_up_hears_no_more_and_the_other_side_is_told() -> None:
    town = Town()
    p, d = town.connect()
    town.p.send(d, wire.Offer("r", 1))
    town.d.hang_up(p, "enough")
    town.pass_seconds(1.0)
    assert town.d.poll() == []
    assert town.p.poll() == [Down(d, "enough")]


@pytest.mark.parametrize("kind", ["loss", "duplicate", "delay", "partition", "crash", "stop", "breakdown"])
def test_each_kind_of_weather_does_what_its_name_says(kind: str) -> None:
    town = Town(Weather(**{kind: 1.0}), most_faults=1)
    _, d = town.connect()
    town.p.send(d, wire.Offer("r", 1))
    town.p.send(d, wire.Offer("r", 2))
    town.pass_seconds(10.0)
    attempts = [news.message.attempt for news in town.d.poll() if isinstance(news, Delivered)]  # type: ignore[union-attr]
    wanted = {"loss": [2], "partition": [], "delay": [2, 1]}
    if kind == "duplicate":
        assert sorted(attempts) == [1, 1, 2]
    else:
        assert attempts in (wanted.get(kind, [1, 2]), wanted.get(kind, [2, 1]))
    assert dict(town.network.faults) == {kind: 1}
    assert [struck for struck, _ in town.struck] == ([kind] if kind in ("crash", "stop", "breakdown") else [])


@pytest.mark.parametrize("is_pull", [False, True], ids=["push", "pull"])
def test_a_slow_line_carries_pages_one_after_the_other_and_other_messages_overtake_them(is_pull: bool) -> None:
    town = Town(Weather(slow=1.0), most_faults=1)
    _, d = town.connect(is_pull)
    town.p.send(d, PAGES, RUNS)
    town.p.send(d, PAGES, RUNS)
    town.p.send(d, wire.Offer("r", 1))
    came = []
    for _ in range(200):
        town.pass_seconds(0.01)
        came += [(news.message, town.network.now) for news in town.d.poll() if isinstance(news, Delivered)]
    assert [message for message, _ in came] == [wire.Offer("r", 1), PAGES, PAGES]
    (_, offered), (_, first), (_, second) = came
    slow_seconds = min(first - 0.1, second - first)  # it was connected for 0.1 s before
    assert offered < 0.15
    assert 0.1 <= slow_seconds + 0.02 <= 0.45
    assert not town.p.outgoing
    assert dict(town.network.faults) == {"slow": 1}


def test_what_is_recalled_from_a_slow_line_takes_no_time_of_it() -> None:
    town = Town(Weather(slow=1.0), most_faults=1)
    _, d = town.connect()
    for attempt in (1, 2, 2, 2):
        town.p.send(d, wire.Pages("r", attempt, 0, 0, (wire.PageRun(0, 1),)), RUNS)
    town.p.recall(d, "r", 2)
    town.p.send(d, wire.Pages("r", 3, 0, 0, (wire.PageRun(0, 1),)), RUNS)
    assert [len(town.p.outgoing), town.memories["d"].written] == [1, []]
    town.pass_seconds(1.0)  # two of them take 0.86 s at most, five would take more
    assert town.memories["d"].written == [5, 5]


def test_heartbeats_are_not_worth_a_fault() -> None:
    town = Town(Weather(loss=1.0))
    p, d = town.connect()
    town.p.send(d, wire.Heartbeat())
    town.pass_seconds(0.1)
    assert town.d.poll() == [Delivered(p, wire.Heartbeat())]
    assert town.network.fault_count == 0


def test_a_digest_sees_every_byte_and_its_place() -> None:
    page = np.arange(6, dtype=np.uint8).reshape(2, 3)
    assert digest((page,)) == digest((page.copy(),))
    assert digest((page,)) != digest((page[::-1],))
