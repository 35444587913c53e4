"""Workloads by name: what a user types instead of a file's path.

    poisson:rate=2,prompt=2000,output=200,requests=1000,seed=1
    bursts:rate=2,shape=0.2         agents:sessions=50,turns=12          mooncake-like:requests=2000
    flip:60:mooncake-like|azure-like                                     two workloads in turns of 60 seconds

`GENERATORS` lists all there are, each with its settings, and is what help texts are made of. Everything random comes
from one NumPy generator per workload, seeded by `seed`: the same text is the same workload, on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from halocline.errors import ConfigError
from halocline.paths import existing_path
from halocline.sim.fields import MOST_TOKENS
from halocline.sim.likenesses import AZURE_REQUESTS, MOONCAKE_REQUESTS, azure_like, mooncake_like
from halocline.sim.readers import read_workload
from halocline.sim.workload import Job, Run, Workload, joined
from halocline.units import MOST_SECONDS, parse_number

MOST_REQUESTS = 1_000_000
LEAST_RATE, MOST_RATE = 1e-6, 1e6
"""Per second; beyond, times of arrival would be no numbers, or all the same one."""
LEAST_SHAPE = 1e-3
LEAST_TURN_SECONDS = 1e-3


@dataclass(frozen=True, slots=True)
class Setting:
    """One number that a generator takes."""

    default: float
    least: float
    """The least that makes sense."""
    help: str
    most: float = math.inf
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class Generator:
    """A kind of workload, what it is, and its settings."""

    help: str
    settings: Mapping[str, Setting]
    make: Callable[[str, Mapping[str, float]], Workload]
    """Called with the full text of the workload and every setting."""


def workload_named(text: str) -> Workload:
    """Return the workload of a generator's text or of a trace file. Raises ConfigError with what to write instead."""
    name, _, rest = text.partition(":")
    if name == "flip":
        return _flip_named(text, rest)
    if name not in GENERATORS:
        path = existing_path(text)
        if path is None or path.is_dir():
            known = ", ".join([*GENERATORS, "flip"])
            raise ConfigError([f"{text} is no file and no generator; generators are {known}"])
        return read_workload(path)
    generator = GENERATORS[name]
    values = _values(name, generator, rest)
    full = ",".join(f"{key}={value:.12g}" for key, value in values.items())
    return generator.make(f"{name}:{full}", values)


def help_text() -> str:
    """Return all generators with their settings and defaults, for a command's help."""
    lines = []
    for name, generator in GENERATORS.items():
        lines.append(f"{name}: {generator.help}")
        lines += [
            f"  {key}={setting.default:g}".ljust(26) + setting.help for key, setting in generator.settings.items()
        ]
    lines.append("flip: two workloads in turns, flip:SECONDS:ONE|OTHER, each of them a generator or a file")
    return "\n".join(lines)


def _values(name: str, generator: Generator, text: str) -> dict[str, float]:
    values = {key: setting.default for key, setting in generator.settings.items()}
    problems = []
    for part in filter(None, text.split(",")):
        key, _, written = part.partition("=")
        key = key.strip()
        if key not in values:
            problems.append(f"{name} has no setting {key!r}; it has {', '.join(values)}")
            continue
        fault = _fault(generator.settings[key], written)
        if fault is not None:
            problems.append(f"{name}: {key} is {written.strip()!r}; it must be {fault}")
        else:
            values[key] = parse_number(written)
    if problems:
        raise ConfigError(problems)
    return values


def _fault(setting: Setting, written: str) -> str | None:
    """Return what a setting must be, None when it is that."""
    bounds = f"at least {setting.least:g}"
    if setting.most < math.inf:
        bounds += f" and at most {setting.most:g}"
    wanted = f"a {'whole ' if setting.is_whole else ''}number, {bounds}"
    try:
        value = parse_number(written)
    except ValueError:
        return wanted
    fits = setting.least <= value <= setting.most and math.isfinite(value) and not (setting.is_whole and value % 1)
    return None if fits else wanted


# ---- single requests


class _Lengths:
    """Lengths around a mean: all equal, or log-normal with a coefficient of variation."""

    def __init__(self, random: np.random.Generator, spread: float) -> None:
        self._random = random
        self._sigma = math.sqrt(math.log1p(spread * spread))

    def draw(self, mean: float) -> int:
        """Return a length of at least 1 whose mean is `mean`."""
        if not self._sigma:
            return round(mean)
        scale = math.log(mean) - self._sigma * self._sigma / 2
        return max(1, min(MOST_TOKENS, round(float(self._random.lognormal(scale, self._sigma)))))


def _arrivals(source: str, values: Mapping[str, float]) -> Workload:
    """Make requests of their own whose gaps are gamma distributed: Poisson where shape is 1, bursts below."""
    random = np.random.default_rng(int(values["seed"]))
    lengths, shape, shared = _Lengths(random, values["spread"]), values.get("shape", 1.0), int(values["shared"])
    requests = int(values["requests"])
    gaps = random.gamma(shape, 1 / (shape * values["rate"]), requests)
    jobs = tuple(
        Job(
            f"{number}",
            float(seconds),
            joined([(0, shared), (1 + 2 * number, lengths.draw(values["prompt"]))]),
            lengths.draw(values["output"]),
            2 + 2 * number,
        )
        for number, seconds in enumerate(np.cumsum(gaps) - gaps[0])
    )
    return Workload(source.partition(":")[0], source, jobs)


# ---- agents


def _agents(source: str, values: Mapping[str, float]) -> Workload:
    """Make sessions: every later prompt is the earlier one, its output, and what a tool returned, after a while."""
    random = np.random.default_rng(int(values["seed"]))
    lengths, jobs, content, start = _Lengths(random, values["spread"]), list[Job](), 1, 0.0
    for session in range(int(values["sessions"])):
        if session:
            start += float(random.exponential(1 / values["rate"]))
        prompt: tuple[Run, ...] = joined([(0, int(values["shared"]))])
        more, after, think = values["prompt"], None, 0.0
        for turn in range(1, int(random.geometric(1 / values["turns"])) + 1):
            prompt = joined([*prompt, (content, lengths.draw(more))])
            output = lengths.draw(values["output"])
            if sum(tokens for _, tokens in prompt) > values["longest"]:
                break
            name = f"{session}.{turn}"
            jobs.append(Job(name, start, prompt, output, content + 1, after, think))
            prompt = (*prompt, (content + 1, output))
            content, more, after = content + 2, values["more"], name
            is_parked = random.random() < values["parked"]
            think = float(random.exponential(values["parked_seconds" if is_parked else "tool_seconds"]))
    return Workload("agents", source, tuple(jobs))


# ---- two in turns


def flip(one: Workload, other: Workload, seconds: float) -> Workload:
    """Return both in turns of `seconds`: the clock of one stands still while the other's runs.

    Each has as many turns as the shorter one: what the longer one still had is left out. Jobs keep their distance
    within a turn; one with `after` still waits for its predecessor only. Raises ConfigError when `seconds` is not from
    LEAST_TURN_SECONDS to ten years.
    """
    if not LEAST_TURN_SECONDS <= seconds <= MOST_SECONDS:
        bounds = f"at least {LEAST_TURN_SECONDS:g} and at most {MOST_SECONDS:g}"
        raise ConfigError([f"flip: {seconds:g} seconds for a turn; it must be a number, {bounds}"])
    ids = 1 + max((max(job.output_id, *(run[0] for run in job.prompt)) for job in one.jobs), default=-1)
    turns = min(_turns(one, seconds), _turns(other, seconds))
    jobs = [
        *(_flipped(job, "a", 0, 2 * int(job.arrive_seconds / seconds), seconds) for job in one.jobs),
        *(_flipped(job, "b", ids, 1 + 2 * int(job.arrive_seconds / seconds), seconds) for job in other.jobs),
    ]
    end = 2 * seconds * turns
    kept = sorted((job for job in jobs if job.arrive_seconds < end), key=lambda job: job.arrive_seconds)
    source = f"flip:{seconds:g}:{one.source}|{other.source}"
    return Workload(f"{one.name} | {other.name}", source, tuple(kept))


def _turns(workload: Workload, seconds: float) -> int:
    return int(workload.span_seconds / seconds) + 1 if workload.jobs else 0


def _flipped(job: Job, side: str, ids: int, turn: int, seconds: float) -> Job:
    return replace(
        job,
        id=f"{side} {job.id}",
        arrive_seconds=turn * seconds + job.arrive_seconds % seconds,
        prompt=tuple((content + ids, tokens) for content, tokens in job.prompt),
        output_id=job.output_id + ids,
        after=None if job.after is None else f"{side} {job.after}",
    )


def _flip_named(text: str, rest: str) -> Workload:
    seconds, _, both = rest.partition(":")
    one, bar, other = both.partition("|")
    if not bar:
        raise ConfigError([f"{text}: write flip:SECONDS:ONE|OTHER, such as flip:60:mooncake-like|azure-like"])
    try:
        length = parse_number(seconds)
    except ValueError:
        raise ConfigError([f"{text}: {seconds!r} is no number of seconds"]) from None
    return flip(workload_named(one.strip()), workload_named(other.strip()), length)


# ---- what there is

_SEED = Setting(0, 0, "equal seeds are equal workloads", is_whole=True)
_SPREAD = Setting(0, 0, "spread of all lengths: standard deviation over mean (log-normal); 0: all equal", 10)
_SHARED = Setting(0, 0, "tokens that all prompts begin with, beside their own", MOST_TOKENS, is_whole=True)
_OUTPUT = Setting(200, 1, "mean tokens of an output", MOST_TOKENS)
_SINGLE = {
    "rate": Setting(1, LEAST_RATE, "arrivals per second", MOST_RATE),
    "prompt": Setting(2000, 1, "mean tokens of a prompt of its own", MOST_TOKENS),
    "output": _OUTPUT,
    "spread": _SPREAD,
    "shared": _SHARED,
    "requests": Setting(1000, 1, "how many", MOST_REQUESTS, is_whole=True),
    "seed": _SEED,
}
_SESSIONS = {
    "sessions": Setting(100, 1, "how many agents", MOST_REQUESTS, is_whole=True),
    "rate": Setting(0.2, LEAST_RATE, "agents that begin per second", MOST_RATE),
    "turns": Setting(8, 1, "mean turns of an agent (geometric)", 10_000),
    "prompt": Setting(2000, 1, "mean tokens of an agent's task", MOST_TOKENS),
    "more": Setting(600, 1, "mean tokens that a tool returns", MOST_TOKENS),
    "output": _OUTPUT,
    "spread": _SPREAD,
    "shared": Setting(
        1500, 0, "tokens of instructions and tools that all agents begin with", MOST_TOKENS, is_whole=True
    ),
    "tool_seconds": Setting(4, 0, "mean seconds of a tool call (exponential)", MOST_SECONDS),
    "parked": Setting(0.1, 0, "share of tool calls that are parked, such as for a person's approval", 1),
    "parked_seconds": Setting(120, 0, "mean seconds of a parked call (exponential)", MOST_SECONDS),
    "longest": Setting(100_000, 1, "an agent ends before a prompt longer than this", MOST_TOKENS),
    "seed": _SEED,
}


def _like(make: Callable[[int, int], Workload], requests: int) -> Generator:
    settings = {"requests": replace(_SINGLE["requests"], default=requests), "seed": _SEED}
    about = str(make.__doc__).splitlines()[0].removeprefix("Return so many ").rstrip(".")
    return Generator(about, settings, lambda _, values: make(int(values["requests"]), int(values["seed"])))


GENERATORS: dict[str, Generator] = {
    "poisson": Generator("requests of their own that arrive independently (a Poisson process)", _SINGLE, _arrivals),
    "bursts": Generator(
        "the same in bursts: gaps are gamma distributed",
        {"shape": Setting(0.2, LEAST_SHAPE, "1 is Poisson; the smaller, the burstier", 100), **_SINGLE},
        _arrivals,
    ),
    "agents": Generator(
        "agents that call tools: each prompt is the last one, its output, and the result", _SESSIONS, _agents
    ),
    "mooncake-like": _like(mooncake_like, MOONCAKE_REQUESTS),
    "azure-like": _like(azure_like, AZURE_REQUESTS),
}
"""All kinds of workloads that need no file."""
