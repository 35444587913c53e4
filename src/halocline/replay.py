"""Where `halocline replay` is put together: a trace, a model's shape, an arena and a device, or a live server.

    prepare(settings)    read and check everything that can be wrong, before any work
    run(prepared)        simulate every policy, or send the load; returns the report's record
    write(record)        put the files that were asked for where they belong, each as a whole

The heavy parts are imported when they are used: the command line's --help must not wait for them. The clients of
`halocline bench` come through here as well.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halocline.errors import ConfigError, FailedError, ModelError
from halocline.sim.client import Answer, LoadError, ask, first_model, open_client
from halocline.sim.scrape import read_figures
from halocline.sim.settings import ReplaySettings
from halocline.units import MOST_SECONDS, format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from halocline.sim.live import Target
    from halocline.sim.simulation import Progress, Setup
    from halocline.sim.workload import Workload

__all__ = [
    "Answer",
    "LoadError",
    "Prepared",
    "ReplaySettings",
    "as_json",
    "ask",
    "first_model",
    "open_client",
    "prepare",
    "read_figures",
    "remarks",
    "run",
    "summary",
    "write",
]

OnProgress = Callable[[int, "Progress"], None]
"""Called with the number of the run and how far it is."""


@dataclass(frozen=True)
class Prepared:
    """What is going to be run, and checked to be possible: one simulation per setup, or one load on a server."""

    settings: ReplaySettings
    workload: Workload
    setups: tuple[Setup, ...] = ()
    target: Target | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """What each run is called."""
        return tuple(setup.policy for setup in self.setups) or (self.settings.server or "",)


def prepare(settings: ReplaySettings) -> Prepared:
    """Read the trace and check model, arena, policies and files; raises one ConfigError with all that is wrong."""
    problems: list[str] = []

    def checked(make: Callable[[], Any]) -> Any:
        try:
            return make()
        except ConfigError as error:
            problems.extend(error.problems)
        except ModelError as error:
            problems.append(str(error))
        return None

    workload = checked(lambda: _workload(settings))
    for path in (settings.html, settings.perfetto, None if settings.json == "-" else settings.json):
        if path is not None:
            checked(partial(_check_writable, Path(path)))
    setups = checked(lambda: _setups(settings)) if settings.server is None else ()
    target = None if settings.server is None else checked(lambda: _target(settings))
    if problems:
        raise ConfigError(problems)
    return Prepared(settings, workload, setups, target)


def run(prepared: Prepared, on_progress: OnProgress) -> dict[str, Any]:
    """Do it, and return the report's record. Raises ConfigError when not a single request could be served."""
    from halocline import __version__
    from halocline.sim.report.json import document

    settings, workload = prepared.settings, prepared.workload
    if prepared.target is not None:
        from halocline.sim.live import run_live
        from halocline.sim.report.live import outcome_of

        seen = asyncio.run(run_live(prepared.target, workload, lambda progress: on_progress(0, progress)))
        outcomes = [outcome_of(seen, prepared.target, workload)]
    else:
        from halocline.sim.crew import How, simulate_all

        how = How(
            saturated=settings.saturated,
            time_scale=settings.time_scale,
            window=settings.window_steps,
            audit_every=settings.audit_every,
        )
        outcomes = simulate_all(
            prepared.setups, workload, how, processes=settings.processes or _cores(), on_progress=on_progress
        )
    if not any(outcome["requests"]["finished"] for outcome in outcomes):
        raise _none_finished(prepared, outcomes)
    return document(__version__, settings.command, _asked(prepared), outcomes)


def write(settings: ReplaySettings, record: Mapping[str, Any]) -> list[Path]:
    """Write the files that were asked for; return where they are."""
    from halocline.sim import perfetto
    from halocline.sim.report import html
    from halocline.sim.report import json as record_json

    wanted = (
        (settings.json, record_json.as_json),
        (settings.html, html.page),
        (settings.perfetto, perfetto.as_json),
    )
    written = []
    for name, make in wanted:
        if name is not None and name != "-":
            record_json.write(Path(name), make(record))
            written.append(Path(name))
    return written


def as_json(record: Mapping[str, Any]) -> str:
    """Return the record as the text of a file."""
    from halocline.sim.report.json import as_json as text_of

    return text_of(record)


def summary(record: Mapping[str, Any], width: int | None = None) -> list[Table]:
    """Return the record as tables for a terminal of `width` columns; as one where any width will do."""
    from halocline.sim.report.summary import tables

    return tables(record, width)


def remarks(record: Mapping[str, Any]) -> list[str]:
    """Return what else is to be said of a record, a sentence each."""
    from halocline.sim.report.summary import remarks as remarks_on

    return remarks_on(record)


# ---- what is asked


def _workload(settings: ReplaySettings) -> Workload:
    from halocline.sim.generators import GENERATORS, workload_named

    name, _, own = settings.trace.partition(":")
    seeded = f"{name}:{own}{',' if own else ''}seed={settings.seed}"
    is_seeded = name not in GENERATORS or "seed=" in own or not settings.seed
    workload = workload_named(settings.trace if is_seeded else seeded)
    if not workload.jobs:
        raise ConfigError([f"{settings.trace} holds no request"])
    workload = workload if settings.requests is None else workload.first(settings.requests)
    seconds = workload.span_seconds / settings.time_scale
    if seconds > MOST_SECONDS and not settings.saturated:
        raise ConfigError(
            [
                f"{settings.trace} lasts {seconds:.3g} seconds at time_scale {settings.time_scale:g}, and a replay at "
                f"most {MOST_SECONDS} (ten years); raise --time-scale or let requests come faster"
            ]
        )
    return workload


def _setups(settings: ReplaySettings) -> tuple[Setup, ...]:
    """Return a setup per policy; each was built once, so that whatever cannot work is known."""
    from halocline.plan import resolve_shape
    from halocline.sim.device import device_named, read_profile
    from halocline.sim.setup import Setup, build

    problems: list[str] = []
    made: list[Setup] = []
    device = device_named(settings.device) if settings.profile is None else read_profile(Path(settings.profile))
    first = Setup(
        shape=resolve_shape(settings.model or "", kv_dtype=settings.kv_dtype),
        kv_bytes=settings.kv_budget_bytes,
        policy=settings.policies[0],
        device=device,
        page_tokens=settings.page_tokens_rule,
        step_tokens=settings.step_tokens,
        admission=settings.admission_rule,
        known_lengths=settings.known_lengths,
        prefix_cache=settings.prefix_cache == "on",
        max_running_requests=settings.max_running_requests,
        max_model_len=settings.max_model_len,
        leap_tokens=settings.leap,
        host_bytes=settings.host_budget_bytes,
        instant_prefill=settings.instant_prefill,
        ttft_limit_seconds=settings.ttft_limit_seconds,
        tpot_limit_seconds=settings.tpot_limit_seconds,
        seed=settings.seed,
    )
    for policy in settings.policies:
        made.append(replace(first, policy=policy))
        try:
            build(made[-1])
        except ConfigError as error:
            problems += [f"policy {policy}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return tuple(made)


def _target(settings: ReplaySettings) -> Target:
    from halocline.sim.live import Target

    url = settings.server or ""
    return Target(
        url=url,
        model=settings.model or asyncio.run(first_model(url, settings.api_key)),
        api_key=settings.api_key,
        as_text=settings.text,
        concurrency=settings.concurrency,
        time_scale=settings.time_scale,
        ttft_limit_seconds=settings.ttft_limit_seconds,
        tpot_limit_seconds=settings.tpot_limit_seconds,
    )


def _check_writable(path: Path) -> None:
    from halocline.sim.report.json import check_writable

    check_writable(path)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


# ---- what is said of it


def _asked(prepared: Prepared) -> dict[str, str]:
    """Return what was asked in words, for the report."""
    settings, workload = prepared.settings, prepared.workload
    asked = {
        "workload": f"{workload.source}, {len(workload.jobs):,} requests over {workload.span_seconds:,.0f} s",
        "loop": "saturated: all stand in line from the start" if settings.saturated else "open: the workload's times",
        "goodput limits": f"TTFT {settings.ttft_limit}, TPOT {settings.tpot_limit}",
    }
    if settings.time_scale != 1:
        asked["time scale"] = f"{settings.time_scale:g} times the load"
    if prepared.target is not None:
        clients = "" if settings.concurrency is None else f", {settings.concurrency} clients"
        prompts = "words" if settings.text else "token ids"
        return asked | {"server": f"{settings.server}{clients}", "model": prepared.target.model, "prompts": prompts}
    setup = prepared.setups[0]
    asked |= {
        "model": f"{setup.shape.name} ({setup.shape.source})",
        "KV memory": f"{format_bytes(setup.kv_bytes)} ({setup.kv_bytes:,} bytes)",
        "device": f"{setup.device.name} ({setup.device.source})",
        "admission": settings.admission,
        "output lengths": "known to the scheduler" if settings.known_lengths else "unknown to the scheduler",
        "prefix cache": settings.prefix_cache,
        "step tokens": f"{settings.step_tokens:,}",
        "most running requests": f"{settings.max_running_requests:,}",
        "seed": str(settings.seed),
    }
    if settings.kv_dtype != "auto":
        asked["K and V"] = settings.kv_dtype
    if setup.host_bytes:
        asked["host memory"] = f"{format_bytes(setup.host_bytes)} ({setup.host_bytes:,} bytes)"
    if settings.instant_prefill:
        asked["prefill"] = "takes no time"
    if settings.leap > 1:
        asked["leap"] = f"{settings.leap} tokens of each decode under one plan while nobody prefills"
    return asked


def _none_finished(prepared: Prepared, outcomes: list[dict[str, Any]]) -> Exception:
    """Return why nothing came of it: settings that fit no request, or a server that answered none."""
    jobs = len(prepared.workload.jobs)
    if prepared.target is not None:
        words, times = next(iter(outcomes[0]["errors"].items()), ("all were given up", jobs))
        return FailedError(f"the server answered none of {jobs} requests; {times} times: {words}")
    if all(outcome["requests"]["rejected"] == outcome["requests"]["arrived"] for outcome in outcomes):
        setup = prepared.setups[0]
        return ConfigError(
            [
                f"none of {jobs} requests fits: {prepared.workload.name} on {setup.shape.name} with "
                f"{format_bytes(setup.kv_bytes)} of KV; raise --kv-bytes, or --max-model-len if it is set"
            ]
        )
    return FailedError(f"none of {jobs} requests finished: all failed or were given up by their clients")
