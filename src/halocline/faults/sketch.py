"""What a world of workers is drawn from: one seed, and nothing else. A sketch is only data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm
from random import Random

from halocline.disagg.network import Weather
from halocline.memory.budget import Budget
from halocline.memory.demand import floor_demand, resident
from halocline.memory.layout import ArenaLayout, LayerKV, PoolLayout, place_layers
from halocline.memory.retention import Chunked, Full, Retention, Sliding, State, describe
from halocline.params import SamplingParams
from halocline.schedule.rules import Admission, Rules
from halocline.units import ceil_to

VOCAB = 97
UNIT_BYTES = 64
LEASE_SECONDS = 2.0
LATENCY_SECONDS = 0.01
Text = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WorkerSketch:
    """One worker, through all its lives."""

    address: str
    layout: ArenaLayout
    rules: Rules
    step_seconds: float
    most_part_bytes: int
    """Of what travels under one number."""


@dataclass(frozen=True, slots=True)
class Client:
    """One who asks a worker, which lets another one compute the prompt, or does so itself."""

    name: str
    seconds: float
    worker: str
    prefill_at: str
    """Empty: the worker computes the prompt itself."""
    prompt: Text
    params: SamplingParams
    priority: int
    abort_seconds: float | None


@dataclass(frozen=True, slots=True)
class Sketch:
    """One world before anything happens in it."""

    seed: int
    retentions: tuple[Retention, ...]
    workers: tuple[WorkerSketch, ...]
    clients: tuple[Client, ...]
    weather: Weather
    eos_token_ids: tuple[int, ...]

    @property
    def is_calm(self) -> bool:
        """Whether no worker computes for one that computes for it, and nobody pushes in before those who wait."""
        asks = {client.worker for client in self.clients}
        return not asks & {client.prefill_at for client in self.clients} and len({c.priority for c in self.clients}) < 2

    def describe(self) -> list[str]:
        """Return the world in a few lines."""
        lines = [
            f"{each.address}: {each.layout.slabs} slabs, "
            + ", ".join(
                f"{pool.name} ({pool.page_tokens} a page, {pool.pages_per_slab} a slab)" for pool in each.layout.pools
            )
            + f", cache {'on' if each.rules.prefix_cache else 'off'}, {each.rules.max_running_requests} slots, "
            f"{' '.join(map(str, each.rules.admission))}, reserve {each.rules.decode_reserve_tokens}, "
            f"parts of {each.most_part_bytes} bytes"
            for each in self.workers
        ]
        return [*lines, f"{len(self.clients)} clients; {self.weather}"]


def draw(seed: int, breakdown: float = 0.0) -> Sketch:
    """Return the world of a seed; `breakdown`: how often a message comes with a step that breaks."""
    random = Random(seed)
    longest = random.choice((16, 24, 32, 48))
    retentions = _retentions(random)
    eos = tuple(random.sample(range(VOCAB), random.choice((0, 0, 2))))
    shared = _pools(random, retentions) if random.random() < 0.6 else None
    part_bytes = random.choice((1, 100, 300, 10**6))
    workers = []
    for address in _addresses(random):
        pools = shared or _pools(random, retentions)
        rules = _rules(random, longest, max((p.page_tokens for p in pools if p.is_positional), default=1), eos)
        layout = _arena(random, pools, rules, longest)
        workers.append(WorkerSketch(address, layout, rules, random.choice((0.02, 0.1)), part_bytes))
    clients = _clients(random, longest, [worker.address for worker in workers])
    return Sketch(seed, retentions, tuple(workers), clients, _weather(random, breakdown), eos)


def slowed(sketch: Sketch) -> Sketch:
    """Return the same world without priorities, in which lines get slow and nothing else goes wrong."""
    clients = tuple(replace(client, priority=0) for client in sketch.clients)
    return replace(sketch, clients=clients, weather=Weather(slow=0.3))


def _addresses(random: Random) -> list[str]:
    """Return workers with one role (p, d), or two or three that all compute prompts for each other (b)."""
    if random.random() < 0.35:
        return ["b0", "b1", "b2"][: random.choice((2, 2, 3))]
    return ["p0", "p1", "d0", "d1"][random.choice((0, 1, 1)) :][: random.choice((3, 4))]


def _retentions(random: Random) -> tuple[Retention, ...]:
    kinds: list[Retention] = [Full()] if random.random() < 0.85 else []
    others: list[Retention] = [Sliding(random.randint(1, 20)), Chunked(random.randint(2, 16)), State()]
    random.shuffle(others)
    kinds += others[: random.randint(0 if kinds else 1, 3 - len(kinds))]
    order = {Full: 0, Sliding: 1, Chunked: 2, State: 3}
    return tuple(sorted(kinds, key=lambda kind: order[type(kind)]))


def _pools(random: Random, retentions: tuple[Retention, ...]) -> tuple[PoolLayout, ...]:
    per_slab = [random.randint(1, 4) for _ in retentions]
    logs = [0 if isinstance(kind, State) else random.randint(0, 3) for kind in retentions]
    places = [
        place_layers([_layer(number, kind)], 1 << log)
        for number, (kind, log) in enumerate(zip(retentions, logs, strict=True))
    ]
    unit = UNIT_BYTES * lcm(*per_slab)
    slab_bytes = max(ceil_to(page_bytes * count, unit) for (_, page_bytes), count in zip(places, per_slab, strict=True))
    return tuple(
        PoolLayout(describe(kind), kind, layers, 1 << log, page_bytes, count, slab_bytes // count)
        for kind, (layers, page_bytes), log, count in zip(retentions, places, logs, per_slab, strict=True)
    )


def _layer(number: int, kind: Retention) -> LayerKV:
    """Return a layer with the oracle's two words per position, or per state."""
    if isinstance(kind, State):
        return LayerKV(number, kind, dtype_bytes=8, state_bytes=16)
    return LayerKV(number, kind, kv_heads=1, k_dim=1, v_dim=1, dtype_bytes=8)


def _arena(random: Random, pools: tuple[PoolLayout, ...], rules: Rules, longest: int) -> ArenaLayout:
    """Return the smallest arena in which the longest request fits beside the floor, or one a little larger."""
    slab_bytes = pools[0].stride_bytes * pools[0].pages_per_slab
    spare, slabs = random.choice((0, 1, 2, 4, 8)), 1
    while True:
        layout = ArenaLayout(pools, slab_bytes, slabs, slabs * slab_bytes)
        need = resident(layout, 1, longest - 1, 0, rules.lookahead_tokens)
        if Budget(layout, None).fits_empty(need.plus(floor_demand(layout, rules.prefix_cache))):
            slabs += spare
            return ArenaLayout(pools, slab_bytes, slabs, slabs * slab_bytes)
        slabs += 1


def _rules(random: Random, longest: int, granule: int, eos: tuple[int, ...]) -> Rules:
    slots = random.choice((2, 4, 8))
    admission: Admission = ("expected", random.choice((0.3, 0.9))) if random.random() < 0.7 else ("guaranteed",)
    return Rules(
        step_tokens=slots + granule + random.choice((0, 4, 16, 64)),
        max_running_requests=slots,
        max_model_len=longest,
        vocab_size=VOCAB,
        admission=admission,
        default_max_tokens=random.randint(1, longest),
        eos_token_ids=eos,
        prefix_cache=random.random() < 0.6,
        decode_reserve_tokens=random.choice((0, 2, 8)),
    )


def _clients(random: Random, longest: int, addresses: list[str]) -> tuple[Client, ...]:
    prefills = [address for address in addresses if not address.startswith("d")]
    decodes = [address for address in addresses if not address.startswith("p")]
    clients: list[Client] = []
    before: Text = ()
    now = 0.0
    for number in range(random.randint(6, 16)):
        length = random.randint(1, longest - 1)
        shared = before[: random.randint(0, len(before))][:length] if random.random() < 0.5 else ()
        prompt = shared + tuple(random.randrange(VOCAB) for _ in range(length - len(shared)))
        before = prompt
        most = random.choice((longest - length, min(longest - length, random.randint(1, 12))))
        goes = random.random() < 0.12
        worker = random.choice(decodes)
        others = [address for address in prefills if address != worker]
        clients.append(
            Client(
                f"c{number}",
                now,
                worker,
                random.choice(others) if random.random() < 0.9 else "",
                prompt,
                SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=random.random() < 0.1),
                random.choice((0, 0, 0, 0, -1, 1)),
                random.choice((0.0, 0.05, 0.3, 1.0)) if goes else None,
            )
        )
        now += random.choice((0.0, 0.0, 0.02, 0.3, 1.5))
    return tuple(clients)


def _weather(random: Random, breakdown: float) -> Weather:
    heavy = random.choice((0.3, 1.0, 2.0, 3.0))
    return Weather(
        loss=0.05 * heavy,
        duplicate=0.08 * heavy,
        delay=0.08 * heavy,
        partition=0.004 * heavy,
        crash=0.003 * heavy,
        stop=0.006 * heavy,
        slow=0.01 * heavy,
        breakdown=breakdown * heavy,
    )
