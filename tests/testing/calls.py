"""Two workers on a simulated network, and one fault at one message: the case is written down, nothing is drawn.

call = Call(is_pull=True)
call.on(wire.Accept, call.crash("p"))
call.run()
call.held_seconds

`halocline.faults` draws thousands of such stories; here one is told by name, with the time that it took until nothing
of the request was held on either side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from msgspec.structs import replace

from halocline.disagg import messages as wire
from halocline.disagg.network import Weather
from halocline.disagg.sender import PEERS_MARK
from halocline.disagg.simulated import End, SimulatedPost
from halocline.faults.sketch import LEASE_SECONDS, UNIT_BYTES, VOCAB, Client, Sketch, WorkerSketch
from halocline.faults.worker import Makers, Worker
from halocline.faults.world import World
from halocline.memory.layout import ArenaLayout, LayerKV, PoolLayout, place_layers
from halocline.memory.retention import Full, Retention, Sliding, State, describe
from halocline.params import SamplingParams
from halocline.schedule.events import Abort, PoolPages
from halocline.schedule.rules import Rules
from halocline.sim.oracle import reference
from halocline.units import ceil_to

KINDS: tuple[Retention, ...] = (Full(), Sliding(6), State())
PAGE_TOKENS = 4
PROMPT = tuple(range(5, 35))
NEW_TOKENS = 6
SLABS = 48
Fault = Callable[[], str]
"""Does something at a message, and says what becomes of the message itself: nothing, `loss`, `duplicate` or `late`."""


def _layout() -> ArenaLayout:
    """One page of each kind per slab, with the oracle's two words per position, or per state."""
    places = []
    for number, kind in enumerate(KINDS):
        layer = LayerKV(number, kind, dtype_bytes=8, state_bytes=16)
        if not isinstance(kind, State):
            layer = LayerKV(number, kind, kv_heads=1, k_dim=1, v_dim=1, dtype_bytes=8)
        places.append((kind, *place_layers([layer], 1 if isinstance(kind, State) else PAGE_TOKENS)))
    slab_bytes = max(ceil_to(page_bytes, UNIT_BYTES) for _, _, page_bytes in places)
    pools = tuple(
        PoolLayout(
            describe(kind), kind, layers, 1 if isinstance(kind, State) else PAGE_TOKENS, page_bytes, 1, slab_bytes
        )
        for kind, layers, page_bytes in places
    )
    return ArenaLayout(pools, slab_bytes, SLABS, SLABS * slab_bytes)


class Call:
    """One request `r` whose prompt worker `p` computes for worker `d`, in several chunks."""

    def __init__(self, *, is_pull: bool = False, busy: str = "", makers: Makers | None = None) -> None:
        """`busy`: a worker whose two slots are taken, by requests of its own, when the request comes."""
        rules = Rules(
            step_tokens=12,
            max_running_requests=2,
            max_model_len=64,
            vocab_size=VOCAB,
            prefix_cache=False,
            decode_reserve_tokens=0,
        )
        workers = tuple(WorkerSketch(address, _layout(), rules, 0.02, 10**6) for address in ("p", "d"))
        params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
        long = replace(params, max_tokens=30)
        own = [Client(f"own{number}", 0.0, busy, "", (number, 7), long, 1, None) for number in range(2) if busy]
        clients = (*own, Client("r", 0.0, "d", "p", PROMPT, params, 0, None))
        self.world = World(Sketch(0, KINDS, workers, clients, Weather(), ()), most_faults=0, makers=makers)
        self.struck_at: float | None = None
        """When the fault came, in seconds."""
        self.held_seconds = {"p": 0.0, "d": 0.0}
        """Of each worker: how long after the fault it held memory without a break, at the longest."""
        self.seen_seconds = {"p": 0.0, "d": 0.0}
        """Of each worker: until how long after the fault it knew the request."""
        self.messages: list[str] = []
        """The kinds of all messages, in the order in which they were sent."""
        self._is_pull = is_pull
        self._faults: dict[type, Fault] = {}
        network = self.world.network
        self._carry, self._connect, self._latency = network.carry, network.connect, network._latency
        network.carry, network.connect = self._carried, self._connected  # type: ignore[method-assign]

    # ---- faults

    def on(self, kind: type, fault: Fault) -> None:
        """Let a fault come with the first message of a kind."""
        self._faults[kind] = fault

    def crash(self, address: str, *, is_silent: bool) -> Fault:
        """A worker dies as the message leaves; silent: nobody is told."""

        def strike() -> str:
            worker = self.world.workers[address]
            worker.is_current = False
            self.world.network.crash(address, is_silent=is_silent)
            return ""

        return strike

    def abort(self, *, parted: bool = False) -> Fault:
        """The client leaves; parted: and nothing travels between the workers any more."""

        def strike() -> str:
            if parted:
                self.world.network._parted[frozenset(("p", "d"))] = inf
            worker = self.world.workers["d"]
            worker.inbox.append(Abort("r"))
            self.world._hurry(worker)
            return ""

        return strike

    def break_step(self, address: str) -> Fault:
        """The next step of a worker breaks before anything of it is done."""

        def strike() -> str:
            self.world.workers[address].breakdown = "before"
            return ""

        return strike

    @staticmethod
    def message(becomes: str) -> Fault:
        """The message itself is lost, doubled, or comes one and a half leases late."""
        return lambda: becomes

    def at(self, seconds: float, fault: Fault) -> None:
        """Let a fault come at a time."""

        def strike() -> None:
            fault()
            self.struck_at = self.world.now
            self.world.network.faults["by hand"] += 1

        self.world.network.at(seconds, strike)

    # ---- the network

    def _connected(self, dialer: SimulatedPost, address: str) -> str:
        name = self._connect(dialer, address)
        dialer.ends[name].is_pull = self._is_pull
        return name

    def _carried(self, end: End, message: wire.Message, runs: Sequence[PoolPages]) -> None:
        network, becomes = self.world.network, ""
        if not isinstance(message, wire.Heartbeat):
            self.messages.append(type(message).__name__)
        if type(message) in self._faults:
            becomes = self._faults.pop(type(message))()
            self.struck_at = self.world.now
            network.faults["by hand"] += 1
        network._draw_fault = lambda end: becomes  # type: ignore[method-assign]
        network._latency = (lambda: 1.5 * LEASE_SECONDS) if becomes == "late" else self._latency  # type: ignore[method-assign]
        self._carry(end, message, runs)
        network._latency = self._latency  # type: ignore[method-assign]

    # ---- the run

    @property
    def living(self) -> list[Worker]:
        """The workers that are alive."""
        return [worker for worker in self.world.workers.values() if worker.is_current]

    @property
    def end(self) -> str | None:
        """How the request ended."""
        return self.world.asked["r"].end

    @property
    def is_answered(self) -> bool:
        """Whether its client has got the whole answer, and the right one."""
        wanted = reference(KINDS, PROMPT, NEW_TOKENS, VOCAB, params=self.world.asked["r"].client.params, eos=())
        return self.end == "length" and self.world.asked["r"].output == wanted

    @staticmethod
    def holds(worker: Worker) -> bool:
        """Whether a worker holds memory for anybody."""
        figures, budget = worker.arena.figures(), worker.arena.budget
        return figures.used_bytes > figures.cached_bytes or tuple(budget.promised) != worker.floor

    @staticmethod
    def knows(worker: Worker) -> bool:
        """Whether a worker's scheduler has the request `r`."""
        return any(name == "r" or name.startswith(PEERS_MARK) for name in worker.scheduler._roster.live)

    def left(self) -> list[str]:
        """Say what is left anywhere: memory, sessions, landings, parcels, requests."""
        found = [f"{worker.sketch.address}: {what}" for worker in self.living for what in worker.leftovers()]
        return found + [f"{worker.sketch.address} has work" for worker in self.living if worker.scheduler.has_work]

    def run(self, leases: int = 5) -> Call:
        """Let so many leases pass, more than anything may take: what is left then is left for ever."""
        network = self.world.network
        since: dict[str, float] = {}
        while network.now < leases * LEASE_SECONDS:
            when = network.next_time()
            assert when is not None, "the workers have stopped turning"
            network.advance(when)
            if self.struck_at is None:
                continue
            for worker in self.living:
                address = worker.sketch.address
                if self.holds(worker):
                    held = network.now - since.setdefault(address, network.now)
                    self.held_seconds[address] = max(self.held_seconds[address], held)
                else:
                    since.pop(address, None)
                if self.knows(worker):
                    self.seen_seconds[address] = network.now - self.struck_at
        for worker in self.living:
            assert worker.audit() == []
        return self
