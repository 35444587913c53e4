"""What came of a simulated run: plain frozen data, and its one JSON form, from which summary, report and tests read.

All means over time are weighted with time. In a saturated run "the middle" is the part in which the queue pressed:
from the first refusal of the most senior waiting request for want of memory (or of request slots) until the workload
had no more to hand over. `concurrency.mean`, the shares of the arena and the goodput rate of a saturated run are over
the middle only, because warm-up and drain say nothing of what the memory holds; where nobody was ever refused, and in
an open loop, the middle is the whole run. `middle_seconds` says from when to when.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

from halocline.sim.host_use import HostUse

Loop = Literal["open", "saturated"]
REASONS = ("slots", "memory", "senior-short", "step-room", "queue", "prefix", "delay")
"""The codes of `halocline.schedule.events.Reason`, in a fixed order."""


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """How requests ended. `arrived` is their sum, with those still unfinished where a run was cut short."""

    arrived: int
    finished: int
    rejected: int
    """Could never run in this arena or model: refused at the door, for a reason that is in `Outcome.rejections`."""
    failed: int
    aborted: int
    """Left by their client."""


@dataclass(frozen=True, slots=True)
class Rejections:
    """Why requests were rejected: what would have been served, and what the first one was told."""

    max_model_len: int
    """The longest prompt plus output that is served."""
    limited_by: str
    """In words: the model's own limit, the longest that fits the arena, or as set."""
    first: str
    """Its id and the words of its refusal."""


@dataclass(frozen=True, slots=True)
class Concurrency:
    """Requests that held memory at once."""

    mean: float
    """Over the middle of the run."""
    peak: int
    mean_while_waiting: float | None
    """Over the time in which the most senior waiting request was refused for want of memory; None when none ever was.
    Whoever waits for request slots alone says nothing of what the memory holds."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that were served well.

    A request is good when it finished, its first token came within `ttft_limit_seconds` of its arrival and its later
    ones within `tpot_limit_seconds` each on average (TPOT: time from first to last token over the tokens after the
    first). `share` is over all requests that arrived and were not aborted by their client: whoever was rejected or
    failed was not served well. `is_met` is the objective of the run as a whole: the 95th percentile of TTFT and of TPOT
    are both within their limits, and nobody was rejected or failed.
    """

    share: float
    requests_per_second: float
    """Good requests that ended in the middle of the run, over its seconds."""
    ttft_limit_seconds: float
    tpot_limit_seconds: float
    is_met: bool


@dataclass(frozen=True, slots=True)
class Latency:
    """A distribution of seconds over finished requests; all 0 when there is none.

    Percentiles are the smallest value that so many per cent of the requests do not exceed.
    """

    p50: float
    p90: float
    p95: float
    p99: float
    mean: float
    cdf: tuple[tuple[float, float], ...]
    """(seconds, share of requests that took at most so long), at most 200 points, the last one the slowest request."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Counts of tokens."""

    prompt: int
    """Of all requests that were accepted."""
    output: int
    computed: int
    """Positions that steps computed, recomputed ones included."""
    cached: int
    """Prompt tokens of first admissions that the prefix cache had."""
    recomputed: int
    """Computed once more because a retraction had thrown them away."""


@dataclass(frozen=True, slots=True)
class ArenaUse:
    """Where the arena's bytes were: means over the middle of the run, so that all of them can be added up.

    Held, cached, holes and free are shares of all slabs' bytes and together all of them.
    """

    bytes: int
    """Bytes of all slabs; the remainder of the budget that makes no whole slab is not in it."""
    held_share: float
    """Pages of running requests and the cached ones that they lock."""
    cached_share: float
    """Evictable pages of the prefix cache."""
    holes_share: float
    """Free pages in slabs that a pool owns."""
    free_share: float
    """Slabs that no pool owns."""
    waste_share: float
    """Padding: bytes of live pages, held or cached, that no layer uses. Part of the two shares above."""
    held_share_while_waiting: float | None
    """`held_share` over the time in which the most senior waiting request was refused for want of memory; None when
    none ever was."""
    held_bytes: dict[str, float]
    """By pool: what `held_share` is made of."""
    cached_bytes: dict[str, float]
    """By pool: what `cached_share` is made of."""


@dataclass(frozen=True, slots=True)
class Series:
    """The run over time: at most 1,000 intervals. A value is the mean over the interval that begins at its time."""

    time_seconds: tuple[float, ...]
    interval_seconds: tuple[float, ...]
    """How long each interval lasts: value times interval, summed, is the integral over the run, however thinned."""
    running: tuple[float, ...]
    waiting: tuple[float, ...]
    """Retracted requests and those whom the driver still holds back included; in a saturated run the latter are not."""
    held_bytes: dict[str, tuple[float, ...]]
    """By pool."""
    cached_bytes: dict[str, tuple[float, ...]]
    """By pool."""
    free_bytes: tuple[float, ...]
    hole_bytes: tuple[float, ...]
    waiting_by_reason: dict[str, tuple[float, ...]]
    """All who wait are counted under the reason of the most senior one: the others wait behind it."""


@dataclass(frozen=True, slots=True)
class PoolShape:
    """How the arena is cut for one pool."""

    name: str
    page_tokens: int
    page_bytes: int
    stride_bytes: int
    pages_per_slab: int
    cap_slabs: int | None
    """The most slabs under a static split; None: as many as there are."""


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """One request in one step."""

    request_id: str
    start: int
    tokens: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of the window that was asked for: what a trace viewer draws."""

    step: int
    start_seconds: float
    seconds: float
    segments: tuple[SegmentRecord, ...]
    running: int
    waiting: int
    reason: str
    """Code of the most senior waiting request's reason; empty when nobody waited."""
    moves: int
    held_bytes: dict[str, int]
    """By pool, while the step runs."""
    cached_bytes: dict[str, int]
    ended: tuple[str, ...]
    """Ids of the requests that ended with this step."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a policy made of a workload. Figures are simulated except `wall_seconds`."""

    policy: str
    model: str
    kv_bytes: int
    workload: str
    device: str
    loop: Loop
    seconds: float
    """From the workload's start to the end of the last request."""
    wall_seconds: float
    """What the simulation itself took: the only figure that differs between equal runs."""
    steps: int
    digest: str
    """Hex digest of all decisions: equal settings, workload and seed give equal digests."""
    middle_seconds: tuple[float, float]
    """From when to when the means are taken."""
    requests: RequestCounts
    concurrency: Concurrency
    goodput: Goodput
    ttft_seconds: Latency
    """Arrival (in a saturated run: being handed over) to first token."""
    tpot_seconds: Latency
    """First to last token, over the tokens after the first; requests with one token have none."""
    e2e_seconds: Latency
    """Arrival (in a saturated run: being handed over) to last token."""
    tokens: Tokens
    hit_rate: float
    """Cached over looked-up prompt tokens of first admissions; 0 without a prefix cache."""
    retractions: int
    moves: int
    moved_bytes: int
    evicted_bytes: int
    arena: ArenaUse
    waiting_seconds: dict[str, float]
    """Request-seconds of waiting by reason code, as in `series.waiting_by_reason`."""
    series: Series
    pools: tuple[PoolShape, ...]
    window: tuple[StepRecord, ...] = ()
    host: HostUse | None = None
    """None without a host arena."""
    rejections: Rejections | None = None
    """None when nobody was rejected."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: dicts, lists, numbers and text, keys as the fields are called."""
        plain = _plain(self)
        assert isinstance(plain, dict), f"an outcome became a {type(plain).__name__}"
        concurrency, arena = plain["concurrency"], plain["arena"]
        optional = (
            (plain, "host"),
            (plain, "rejections"),
            (concurrency, "mean_while_waiting"),
            (arena, "held_share_while_waiting"),
        )
        for part, key in optional:
            if part[key] is None:
                del part[key]  # a report says nothing of what there is not
        return plain


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value
