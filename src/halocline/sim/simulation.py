"""A whole run: a workload through the shipped scheduler, under a fake clock, on a device that is a formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from halocline.schedule.rules import Admission
from halocline.sim.device import Device
from halocline.sim.outcome import Outcome
from halocline.sim.policies import PageTokens
from halocline.sim.shapes import Shape
from halocline.sim.workload import Workload


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
    prefix_cache: bool = True
    max_running_requests: int = 2048
    max_model_len: int | None = None
    """None: the smaller of the model's own and the longest that fits, as the engine decides."""
    leap_tokens: int = 1
    """While nobody prefills, so many tokens of each decode are computed under one plan."""
    instant_prefill: bool = False
    """Chunks take no time: a step takes what its decodes take, nothing when there are none."""
    weight_bytes: float = 2.0
    """Bytes of one weight, as the device reads it."""
    ttft_limit_seconds: float = 10.0
    tpot_limit_seconds: float = 0.1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is; told now and then, at most some ten times a second."""

    ended: int
    """Jobs that have ended, however."""
    jobs: int
    seconds: float
    """On the simulated clock."""
    wall_seconds: float
    steps: int
    running: int
    waiting: int


def simulate(
    setup: Setup,
    workload: Workload,
    *,
    saturated: bool = False,
    time_scale: float = 1.0,
    on_progress: Callable[[Progress], None] | None = None,
    window: tuple[int, int] | None = None,
    most_jobs: int | None = None,
    audit_every: int = 0,
) -> Outcome:
    """Let `workload` through and return what came of it.

    Arrivals are at the trace's times over `time_scale`; `saturated` lets all arrive at once, so that always somebody
    waits. `window` (first step, step after the last) asks for records of those steps. `audit_every` n recounts
    everything after each n-th step, and raises InvariantError with what it finds. Raises ConfigError when setup, model
    and arena do not go together.
    """
    raise NotImplementedError
