"""What a replay runs on, and how it is put together: arena, rules and scheduler, by the functions that the engine uses.

The layout, the caps, the check of the start and the longest request come from `solve_layout`, `static_caps` and
`capacity_facts`, as when a server starts, so calculator, engine and replay agree on every figure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from halocline.errors import ConfigError
from halocline.memory.arena import Arena
from halocline.memory.facts import CapacityFacts
from halocline.memory.host import HostArena, HostCosts, host_layout
from halocline.memory.layout import ArenaLayout
from halocline.memory.sizing import Caps, Limits, capacity_facts
from halocline.schedule.rules import Admission, Rules
from halocline.schedule.scheduler import Scheduler
from halocline.sim.cost import CostModel
from halocline.sim.device import Device
from halocline.sim.outline import Sketcher
from halocline.sim.policies import PageTokens, policy_named
from halocline.sim.shapes import Shape
from halocline.sim.workload import CONTENT_IDS
from halocline.units import format_bytes

STOP_ID = CONTENT_IDS
"""The end-of-sequence token where lengths are not known: no content has this id."""
MOST_WAITING_REQUESTS = 2**31 - 1
MOST_PAGES = 2**27
"""Of an arena that is replayed: the books take some hundred bytes of this machine's memory for each."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is replayed on: a model's shape, an arena, a policy and a device. Everything but the workload."""

    shape: Shape
    kv_bytes: int
    policy: str
    """As `halocline.sim.policies.policy_named` takes it."""
    device: Device
    page_tokens: PageTokens = None
    """Positions per page; what is not set is solved, as the engine does."""
    step_tokens: int = 8192
    admission: Admission = ("expected", 0.8)
    known_lengths: bool = True
    """Clients name the length that their output will have as max_tokens. False: they name none, and the output ends
    with an end-of-sequence token that nobody foresees."""
    prefix_cache: bool = True
    max_running_requests: int | None = None
    """None: as many as may decode in one step, so that slots are not what is short."""
    max_model_len: int | None = None
    """None: the smaller of the model's own and the longest that fits, as the engine decides."""
    leap_tokens: int = 1
    """While nobody prefills, up to so many tokens of each decode are computed under one plan."""
    instant_prefill: bool = False
    """Prompts take no time: decodes stand still while chunks are computed, and the clock too."""
    host_bytes: int = 0
    """Quota of the host arena; 0: none."""
    host_copy_bytes_per_second: float = 25e9
    """Of a copy between device and host: what sixteen lanes of PCIe 4 give."""
    weight_bytes: float = 2.0
    """Bytes of one weight, as the device reads it."""
    ttft_limit_seconds: float = 10.0
    tpot_limit_seconds: float = 0.1
    seed: int = 0


@dataclass(frozen=True)
class World:
    """What a setup is made into."""

    arena: Arena
    caps: Caps | None
    facts: CapacityFacts
    scheduler: Scheduler
    cost: CostModel
    host: HostArena | None = None


def build(setup: Setup) -> World:
    """Put arena and scheduler together; raises ConfigError with every reason why no request could be served."""
    if setup.leap_tokens < 1:
        raise ConfigError([f"leap_tokens is {setup.leap_tokens}; a step computes at least one token of a decode"])
    policy = policy_named(setup.policy)
    layout = policy.lay_out(setup.shape.layers, setup.kv_bytes, setup.page_tokens)
    _check_pages("kv_bytes", layout)
    caps = policy.split(layout)
    lookahead = setup.leap_tokens - 1
    slots = setup.max_running_requests
    if slots is None:
        slots = max(1, setup.step_tokens - layout.granule_tokens)
    limits = Limits(
        setup.step_tokens + slots * lookahead,  # a leap keeps to the step's tokens by itself, whoever decodes
        slots,
        setup.shape.max_model_len,
        setup.max_model_len,
        lookahead,
        setup.prefix_cache,
    )
    facts = capacity_facts(layout, caps, limits)
    cost = CostModel(setup.shape, setup.device, setup.weight_bytes)
    rules = Rules(
        step_tokens=setup.step_tokens,
        max_running_requests=slots,
        max_model_len=facts.max_model_len.tokens,
        vocab_size=CONTENT_IDS,
        admission=setup.admission,
        eos_token_ids=() if setup.known_lengths else (STOP_ID,),
        max_waiting_requests=MOST_WAITING_REQUESTS,
        prefix_cache=setup.prefix_cache,
        lookahead_tokens=lookahead,
        host_costs=_host_costs(setup, cost) if setup.host_bytes else HostCosts(),
    )
    if setup.host_bytes:
        _check_pages("host_bytes", host_layout(layout, setup.host_bytes))
    arena = Arena(layout, caps)
    host = HostArena(layout, setup.host_bytes) if setup.host_bytes else None
    return World(arena, caps, facts, Scheduler(arena, rules, host, Sketcher()), cost, host)


def _check_pages(name: str, layout: ArenaLayout) -> None:
    """Refuse an arena whose books this machine cannot hold."""
    pages = sum(layout.slabs * pool.pages_per_slab for pool in layout.pools)
    if pages > MOST_PAGES:
        raise ConfigError(
            [
                f"{name} is {format_bytes(layout.budget_bytes)}: up to {pages:,} pages, and a replay keeps books of at "
                f"most {MOST_PAGES:,}; lower {name}, or set larger --page-tokens"
            ]
        )


def _host_costs(setup: Setup, cost: CostModel) -> HostCosts:
    """Return what decides between copying and computing: the device's own step of one long chunk."""
    seconds = cost.seconds(np.zeros(0, np.int64), [(0, setup.step_tokens)])
    return HostCosts(setup.host_copy_bytes_per_second, setup.step_tokens / max(seconds, 1e-12))
