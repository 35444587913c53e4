"""Small worlds drawn from a seed: a layout, a tiny arena, rules, and clients who come in bursts and may go away.

A sketch is only data, and the same in every process: it comes from one `random.Random(seed)` and nothing else. The
arena is just large enough for the longest request that a client may ask for, or a few slabs larger: memory is short.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm
from random import Random
from typing import Literal

from halocline.memory.budget import Budget
from halocline.memory.demand import floor_demand, resident
from halocline.memory.layout import ArenaLayout, PoolLayout
from halocline.memory.retention import Chunked, Full, Retention, Sliding, State, describe
from halocline.memory.sizing import Caps, static_caps
from halocline.params import SamplingParams
from halocline.schedule.rules import Admission, Rules

VOCAB = 97
MOST_SLABS = 400
UNIT_BYTES = 64
Text = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """What a client says once an answer has ended: earlier prompt, answer, and `more`."""

    think_seconds: float
    more: Text
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Client:
    """One who asks, and perhaps asks on, or goes away."""

    name: str
    seconds: float
    prompt: Text
    params: SamplingParams
    priority: int
    abort_seconds: float | None
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Lease:
    """Another owner (a transfer, a host copy) reserves a share of what a pool could add, for a while."""

    seconds: float
    until_seconds: float
    pool: int
    share: float


@dataclass(frozen=True, slots=True)
class Break:
    """What goes wrong in the computation of one step."""

    step: int
    kind: Literal["request", "step", "late step"]
    """One request fails; the whole step fails before anything was done, or when all of it was."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """One small world, before anything happens in it."""

    seed: int
    layout: ArenaLayout
    caps: Caps | None
    """Slabs per pool of a static split; None: shared."""
    rules: Rules
    longest: int
    """The most tokens of prompt and output that any client asks for, and that fit the empty arena."""
    classes_seen: tuple[int, ...]
    """max_tokens of which enough requests ended early before the world began: under `expected` little is granted."""
    clients: tuple[Client, ...]
    leases: tuple[Lease, ...]
    breaks: tuple[Break, ...]

    @property
    def leap_tokens(self) -> int:
        """The most tokens that one step may compute of a decode."""
        return 1 + self.rules.lookahead_tokens

    def describe(self) -> list[str]:
        """Return the world in a few lines."""
        pools = ", ".join(
            f"{pool.name} ({pool.page_tokens} tokens a page, {pool.pages_per_slab} pages a slab)"
            for pool in self.layout.pools
        )
        rules = self.rules
        split = "shared" if self.caps is None else f"split {self.caps}"
        return [
            f"arena: {self.layout.slabs} slabs, {split}; {pools}",
            f"rules: {' '.join(map(str, rules.admission))}, prefix cache {'on' if rules.prefix_cache else 'off'}, "
            f"{rules.max_running_requests} slots, {rules.step_tokens} step tokens, leaps of {self.leap_tokens}, "
            f"delay {rules.prefill_delay_seconds:g} s, longest request {self.longest} tokens",
            f"clients: {len(self.clients)}, {sum(len(client.turns) for client in self.clients)} further turns, "
            f"{sum(client.abort_seconds is not None for client in self.clients)} that go away; "
            f"{len(self.leases)} leases, {len(self.breaks)} breaks; before them, outputs "
            f"{'ended early' if self.classes_seen else 'were not seen'}",
        ]


def draw(seed: int) -> Sketch:
    """Return the world of a seed."""
    random = Random(seed)
    longest = random.choice((8, 16, 24, 32, 48))
    pools = _pools(random, longest)
    granule = max((pool.page_tokens for pool in pools if pool.is_positional), default=1)
    rules = _rules(random, longest, granule)
    layout, caps = _arena(random, pools, rules, longest)
    clients = _clients(random, longest, rules)
    return Sketch(
        seed,
        layout,
        caps,
        rules,
        longest,
        _classes(random, rules, longest),
        clients,
        _leases(random, layout),
        _breaks(random),
    )


# ---- memory


def _pools(random: Random, longest: int) -> tuple[PoolLayout, ...]:
    kinds: list[Retention] = [Full()] if random.random() < 0.8 else []
    others: list[Retention] = [
        Sliding(random.randint(1, 20)),
        Chunked(random.randint(2, 16)),
        State(),
        Sliding(random.randint(21, 40)),
    ]
    random.shuffle(others)
    kinds += others[: random.randint(0 if kinds else 1, 3 - len(kinds))]
    kinds.sort(key=_rank)
    per_slab = [random.randint(1, 6) for _ in kinds]
    slab_bytes = UNIT_BYTES * lcm(*per_slab)
    return tuple(
        PoolLayout(
            describe(kind),
            kind,
            (),
            1 if isinstance(kind, State) else 2 ** random.randint(0, 3 if longest > 16 else 1),
            slab_bytes // pages,
            pages,
            slab_bytes // pages,
        )
        for kind, pages in zip(kinds, per_slab, strict=True)
    )


def _rank(kind: Retention) -> tuple[int, int]:
    """Order kinds as the layout solver does."""
    match kind:
        case Full():
            return 0, 0
        case Sliding(window):
            return 1, window
        case Chunked(chunk):
            return 2, chunk
        case State():
            return 3, 0


def _arena(
    random: Random, pools: tuple[PoolLayout, ...], rules: Rules, longest: int
) -> tuple[ArenaLayout, Caps | None]:
    """Return the smallest arena in which the longest request fits beside the floor, or one a little larger.

    One prompt token and the rest output is the dearest: such a request decodes at every position there is.
    """
    slab_bytes = pools[0].stride_bytes * pools[0].pages_per_slab
    ratio = random.choice((0.3, 0.8, 1.5)) if len(pools) > 1 and random.random() < 0.3 else None
    spare = random.choice((0, 0, 0, 1, 2, 4))
    for slabs in range(1, MOST_SLABS):
        layout = ArenaLayout(pools, slab_bytes, slabs, slabs * slab_bytes)
        caps = None if ratio is None else static_caps(layout, ratio)
        need = resident(layout, 1, longest - 1, 0, rules.lookahead_tokens)
        if Budget(layout, caps).fits_empty(need.plus(floor_demand(layout, rules.prefix_cache))):
            spare -= 1
            if spare < 0:
                return layout, caps
    return _arena(random, pools, rules, longest)  # a split that leaves a pool nothing: draw another


# ---- rules


def _rules(random: Random, longest: int, granule: int) -> Rules:
    slots = random.choice((2, 3, 5, 8))
    lookahead = random.choice((0, 0, 0, 1, 3))
    admission: Admission = ("expected", random.choice((0.3, 0.8, 0.9))) if random.random() < 0.8 else ("guaranteed",)
    return Rules(
        step_tokens=slots * (1 + lookahead) + granule + random.choice((0, 0, 3, 16, 64)),
        max_running_requests=slots,
        max_model_len=longest,
        vocab_size=VOCAB,
        admission=admission,
        default_max_tokens=random.randint(1, longest),
        eos_token_ids=tuple(random.sample(range(VOCAB), random.choice((0, 0, 1, 4)))),
        prefix_cache=random.random() < 0.6,
        prefill_delay_seconds=random.choice((0.0, 0.0, 0.0, 3.0)),
        prefill_delay_tokens=random.randint(1, 2 * longest),
        lookahead_tokens=lookahead,
    )


def _classes(random: Random, rules: Rules, longest: int) -> tuple[int, ...]:
    """Return classes of outputs that are known to end early, so that grants are small and must be extended."""
    if rules.is_guaranteed or random.random() < 0.1:
        return ()
    return tuple(1 << power for power in range(longest.bit_length()) if 1 << power < longest)


# ---- clients


def _clients(random: Random, longest: int, rules: Rules) -> tuple[Client, ...]:
    texts: list[Text] = [_words(random, longest) for _ in range(random.randint(1, 3))]
    clients: list[Client] = []
    now = 0.0
    for _ in range(random.randint(1, 4)):
        for _ in range(random.randint(1, 6)):
            clients.append(_client(random, f"c{len(clients)}", now, texts, longest))
            now += random.choice((0.0, 0.0, 0.0, 0.5))
        now += random.choice((1.0, 4.0, 15.0, 60.0))
    if rules.prefix_cache and random.random() < 0.5:  # the same question twice at once
        clients.append(replace(clients[-1], name=f"c{len(clients)}"))
    return tuple(clients)


def _client(random: Random, name: str, now: float, texts: list[Text], longest: int) -> Client:
    most = longest - 1 if random.random() < 0.5 else max(1, longest // 4)
    prompt = _prompt(random, texts, random.randint(1, most))
    texts.append(prompt)
    room = longest - len(prompt)
    wanted = random.choice((None, room, random.randint(1, room), random.randint(1, room), random.randint(1, room)))
    if random.random() < 0.04:
        wanted = room + random.randint(1, 5)  # too long for the model: it must be refused at the door
    params = SamplingParams(
        temperature=0.0,
        max_tokens=wanted,
        ignore_eos=random.random() < 0.1,
        min_tokens=random.randint(0, wanted or room) if random.random() < 0.1 else 0,
    )
    priority = random.choice((0, 0, 0, 0, -1, 1))
    abort_seconds = random.choice((0.0, 1.5, 6.0, 20.0)) if random.random() < 0.15 else None
    return Client(name, now, prompt, params, priority, abort_seconds, _turns(random, room - (wanted or room)))


def _turns(random: Random, room: int) -> tuple[Turn, ...]:
    """Return further turns that fit the longest request even if every answer is as long as it may be."""
    turns: list[Turn] = []
    while room >= 2 and random.random() < 0.4:
        more = _words(random, random.randint(1, room - 1))
        answer = random.randint(1, room - len(more))
        turns.append(Turn(random.choice((0.0, 2.0, 30.0)), more, answer))
        room -= len(more) + answer
    return tuple(turns)


def _prompt(random: Random, texts: list[Text], tokens: int) -> Text:
    """Return a prompt that mostly begins like a text that was there before."""
    if random.random() < 0.25:
        return _words(random, tokens)
    before = random.choice(texts[-3:])
    shared = before[: len(before) if random.random() < 0.5 else random.randint(1, len(before))][:tokens]
    return shared + _words(random, tokens - len(shared))


def _words(random: Random, tokens: int) -> Text:
    return tuple(random.randrange(VOCAB) for _ in range(tokens))


def _leases(random: Random, layout: ArenaLayout) -> tuple[Lease, ...]:
    if random.random() < 0.8:
        return ()
    starts = sorted(random.choice((0.0, 3.0, 10.0, 30.0)) for _ in range(random.randint(1, 2)))
    return tuple(
        Lease(start, start + random.choice((2.0, 8.0, 25.0)), random.randrange(len(layout.pools)), random.random())
        for start in starts
    )


def _breaks(random: Random) -> tuple[Break, ...]:
    if random.random() < 0.85:
        return ()
    kinds: tuple[Literal["request", "step", "late step"], ...] = ("request", "step", "late step")
    return tuple(Break(step, random.choice(kinds)) for step in sorted(random.sample(range(60), 2)))
