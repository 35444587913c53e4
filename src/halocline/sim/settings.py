"""What `halocline replay` can be asked: each field is one flag, checked as a whole, all problems at once.

A value that exists has been checked. What is written as text (`--ttft-limit 10s`) becomes a typed value in the
properties at the end, and nowhere else.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, TypeVar

from halocline.config import Admission, parse_admission, parse_page_tokens, setting
from halocline.errors import ConfigError
from halocline.sim.client import base_of
from halocline.units import parse_bytes, parse_seconds, parse_whole

T = TypeVar("T")
AUDIT_STEPS = 10_000
MOST_STEPS = 10**18
"""No replay has as many."""
SHORTEST_LIMIT_SECONDS = 1e-6
"""What goodput may be measured against at least."""
_SECRET = frozenset({"api_key"})
_SIMULATED_NAMES = """
kv_bytes kv_dtype policy device profile page_tokens step_tokens admission known_lengths prefix_cache
max_running_requests max_model_len host_bytes leap instant_prefill audit processes perfetto window
"""
_SIMULATED = tuple(_SIMULATED_NAMES.split())
"""Settings of the simulation: a live server has its own."""
_READ = (
    "admission_rule",
    "page_tokens_rule",
    "audit_every",
    "host_budget_bytes",
    "ttft_limit_seconds",
    "tpot_limit_seconds",
)
"""Properties that read a text."""
_LIVE = ("concurrency", "text", "api_key")
_RANGES: dict[str, tuple[float, float]] = {
    "time_scale": (1e-6, 1e9),
    "step_tokens": (2, 2**24),
    "max_running_requests": (1, 2**24),
    "max_model_len": (2, 2**31 - 1),
    "leap": (1, 2**16),
    "requests": (1, 2**31 - 1),
    "processes": (1, 4096),
    "concurrency": (1, 65536),
    "seed": (0, 2**63 - 1),
}


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """Settings of a replay: of the simulation, or of the load on a live server."""

    trace: str = setting(
        "",
        "a file (Mooncake or OpenAI-style JSON lines, Azure CSV), or a generator such as mooncake-like:requests=500 or "
        "poisson:rate=2; there are also azure-like, bursts, agents, flip",
    )
    model: str | None = setting(
        None,
        "a known shape (gemma-3-27b), a folder, a config.json; with --server its name there (default: the first)",
    )
    kv_bytes: str | None = setting(None, "bytes of the arena: 60GiB, or a number of bytes")
    kv_dtype: str = setting("auto", "type of K and V in the arena: auto (the model's), bfloat16, float16, float32")
    policy: tuple[str, ...] = setting(
        ("shared",), "shared, static:R, static:R:S, equal-pages or full; several by commas or by repeating the flag"
    )
    saturated: bool = setting(False, "let all requests stand in line from the start, instead of at the trace's times")
    time_scale: float = setting(1.0, "divide the trace's times by this: 2 is twice the load")
    requests: int | None = setting(None, "only the first so many requests of the trace")
    device: str = setting("h200", "what computes, by its maker's figures: h200, 4xh100, ...")
    profile: str | None = setting(None, "file with measured figures of a device (.json or .toml), instead of --device")
    page_tokens: str | None = setting(
        None, "positions per page: a power of two for all pools, or full=16,sliding-512=8 (default: solved)"
    )
    step_tokens: int = setting(8192, "most tokens computed in one step, decodes and prefill chunks together")
    admission: str = setting("expected:0.8", "size of a request's grant: expected[:QUANTILE] or guaranteed")
    known_lengths: bool = setting(True, "clients name the length of their output as max_tokens; else nobody knows it")
    prefix_cache: str = setting("on", "on or off: keep the KV of prompts and answers for requests that begin alike")
    max_running_requests: int = setting(2048, "most requests that run at the same time")
    max_model_len: int | None = setting(
        None, "longest prompt plus output in tokens (default: the most that model and arena allow)"
    )
    host_bytes: str = setting("0", "bytes of host memory for retracted requests and evicted prefixes; 0: none")
    leap: int = setting(
        1, "while nobody prefills, plan so many tokens of each decode at once: faster, a little coarser"
    )
    instant_prefill: bool = setting(False, "let prompts take no time to compute: what the memory alone would allow")
    ttft_limit: str = setting("10s", "time to the first token that goodput allows: 10s, 500ms")
    tpot_limit: str = setting("100ms", "time per token after the first that goodput allows")
    json: str | None = setting(None, "write all figures as JSON to this file; - prints them")
    html: str | None = setting(None, "write a page with plots to this file; it needs no network")
    perfetto: str | None = setting(None, "write the steps of --window to this file, for ui.perfetto.dev")
    window: str | None = setting(None, "steps FIRST:LAST of which --perfetto keeps a record (default: 0:1000)")
    seed: int = setting(0, "seed of a generated workload that names none")
    processes: int | None = setting(None, "policies that are replayed at the same time (default: one per core)")
    audit: str = setting(str(AUDIT_STEPS), "recount the arena after every N-th step and at the end: N, every or off")
    server: str | None = setting(None, "URL of an OpenAI-compatible server: send the workload there instead")
    concurrency: int | None = setting(None, "clients of a --saturated load on a --server")
    text: bool = setting(False, "send words instead of token ids to a --server that takes none")
    api_key: str | None = setting(None, "key that the --server wants as a bearer token")

    def __post_init__(self) -> None:
        """Raise one ConfigError with every problem of every field."""
        problems = [problem for check in (_of_values, _of_texts, _of_choice) for problem in check(self)]
        if problems:
            raise ConfigError(problems)

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies, each once, in the order in which they were named."""
        names = [name.strip() for text in self.policy for name in text.split(",")]
        return tuple(dict.fromkeys(name for name in names if name))

    @property
    def kv_budget_bytes(self) -> int:
        """`kv_bytes` as a number."""
        return _read("kv_bytes", self.kv_bytes or "", partial(parse_bytes, least=1))

    @property
    def host_budget_bytes(self) -> int:
        """`host_bytes` as a number."""
        return _read("host_bytes", self.host_bytes, parse_bytes)

    @property
    def admission_rule(self) -> Admission:
        """`admission` as a typed value."""
        return parse_admission(self.admission)

    @property
    def page_tokens_rule(self) -> int | dict[str, int] | None:
        """`page_tokens` as one number for all pools, a number per pool, or None."""
        return parse_page_tokens(self.page_tokens)

    @property
    def ttft_limit_seconds(self) -> float:
        """`ttft_limit` in seconds."""
        return _read("ttft_limit", self.ttft_limit, _parse_limit)

    @property
    def tpot_limit_seconds(self) -> float:
        """`tpot_limit` in seconds."""
        return _read("tpot_limit", self.tpot_limit, _parse_limit)

    @property
    def window_steps(self) -> tuple[int, int] | None:
        """`window` as first step and the one after the last; None where no trace is asked for."""
        return None if self.perfetto is None else parse_window(self.window or "0:1000")

    @property
    def audit_every(self) -> int:
        """`audit` as a number of steps; 0: never."""
        return parse_audit(self.audit)

    @property
    def command(self) -> str:
        """The command line that asks this again, without what nobody should see."""
        words = ["halocline", "replay", self.trace]
        for each in fields(self):
            value = self.__dict__[each.name]
            if each.name == "trace" or each.name in _SECRET or value == each.default:
                continue
            flag = "--" + each.name.replace("_", "-")
            if isinstance(value, bool):
                words.append(flag if value else f"--no-{flag[2:]}")
            else:
                words += [flag, ",".join(value) if isinstance(value, tuple) else str(value)]
        return shlex.join(words)


def parse_window(text: str) -> tuple[int, int]:
    """Read `FIRST:LAST`; raises ValueError with the accepted form."""
    first, _, last = text.partition(":")
    try:
        steps = parse_whole(first), parse_whole(last)
    except ValueError:
        steps = (0, 0)
    if not steps[0] < steps[1] <= MOST_STEPS:
        raise ValueError(f"window is {text!r}; write two steps such as 1000:1200, the first below the last")
    return steps


def parse_audit(text: str) -> int:
    """Read `off`, `every` or a number of steps; raises ValueError with the accepted forms."""
    if text in ("off", "every"):
        return int(text == "every")
    try:
        steps = parse_whole(text)
    except ValueError:
        steps = 0
    if not 1 <= steps <= MOST_STEPS:
        raise ValueError(f"audit is {text!r}; write a number of steps, every or off")
    return steps


def _of_values(settings: ReplaySettings) -> list[str]:
    problems = [] if settings.trace else ["no trace: give a file or the name of a generator"]
    for name, (least, most) in _RANGES.items():
        value = settings.__dict__[name]
        if value is not None and not least <= value <= most:  # nor is what is no number at all
            problems.append(f"{name} is {value}; it must be from {least:.12g} to {most:.12g}")
    if settings.prefix_cache not in ("on", "off"):
        problems.append(f"prefix_cache is {settings.prefix_cache!r}; write on or off")
    paths = [path for path in (settings.json, settings.html, settings.perfetto) if path is not None]
    # Two texts may name one file (o/a and ./o/a), of which only the last report would be left.
    if len({os.path.realpath(path) for path in paths}) < len(paths):
        problems.append(f"json, html and perfetto are files of their own; one is named twice: {', '.join(paths)}")
    # A trace of two turns (flip) names its files within one text.
    read = [*settings.trace.replace("|", ":").split(":"), settings.trace, settings.model, settings.profile]
    known = {os.path.realpath(each) for each in read if each}
    problems += [
        f"{path} is read in this run, and a report would take its place; name another file"
        for path in paths
        if os.path.realpath(path) in known
    ]
    if "-" in (settings.html, settings.perfetto):
        problems.append("html or perfetto is '-', and only --json prints; name a file")
    if not settings.policies:
        problems.append("no policy is named; write for example --policy shared,static:0.8")
    return problems


def _of_texts(settings: ReplaySettings) -> list[str]:
    """Return what the properties cannot read."""
    reads: dict[str, Callable[[], Any]] = {
        name: lambda name=name: getattr(settings, name)  # type: ignore[misc]
        for name in _READ
    }
    if settings.window is not None:
        reads["window"] = lambda: parse_window(settings.window or "")
    if settings.kv_bytes is not None:
        reads["kv_bytes"] = lambda: settings.kv_budget_bytes
    problems = []
    for read in reads.values():
        try:
            read()
        except ValueError as error:
            problems.append(str(error))
    return problems


def _read(name: str, text: str, parse: Callable[[str], T]) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _parse_limit(text: str) -> float:
    return parse_seconds(text, least=SHORTEST_LIMIT_SECONDS)


def _of_choice(settings: ReplaySettings) -> list[str]:
    """Return what does not go together: the simulation's settings and a live server's."""
    defaults = {each.name: each.default for each in fields(settings)}
    typed = [name for name, default in defaults.items() if settings.__dict__[name] != default]
    if settings.server is None:
        problems = [f"{name} is of a live server; give --server URL as well" for name in _LIVE if name in typed]
        problems += [] if settings.model else ["no model: give --model, a known shape such as gemma-3-27b"]
        problems += [] if settings.kv_bytes else ["no arena: give --kv-bytes, such as 60GiB"]
        if settings.window is not None and settings.perfetto is None:
            problems.append("window is the steps that --perfetto FILE writes; give that as well")
        if settings.profile is not None and "device" in typed:
            problems.append("device and profile both say what computes; give one of them")
        return problems
    problems = [f"{name} is of the simulation; the server has its own" for name in _SIMULATED if name in typed]
    if settings.saturated != (settings.concurrency is not None):
        problems.append("a saturated load on a server needs both --saturated and --concurrency N")
    try:
        base_of(settings.server)
    except ConfigError as error:
        problems += [f"server: {problem}" for problem in error.problems]
    return problems
