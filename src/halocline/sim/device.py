"""What a device can do, by the figures that its maker published, and what a measured profile says instead.

    device_named("h200")        one of the table below
    device_named("4xh100")      four of them, as if they were one with four times the rates: no cost of talking
    device_named("my.toml")     a profile file: measured figures instead of published ones

A profile file (JSON or TOML) names a device to start from (`base`) and any field of `Device` that it overrides, or says
what a step takes as it was measured: `points`, pairs of (tokens of the step, seconds), between which the time is
interpolated; or `coefficients`, seconds per step, per token, per byte of KV read and per pair of query and key.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from halocline.config import did_you_mean
from halocline.errors import ConfigError

COMPUTE_EFFICIENCY = 0.6
"""Share of the published FLOP/s that large matrix products reach. An assumption, not a measurement."""
ATTENTION_EFFICIENCY = 0.4
"""Share of the published FLOP/s that attention over many positions reaches. An assumption, not a measurement."""
MEMORY_EFFICIENCY = 0.8
"""Share of the published bytes per second that reading weights and KV reaches. An assumption, not a measurement."""
STEP_OVERHEAD_SECONDS = 0.001
"""What a step costs whatever it computes: planning, launches, sampling. An assumption, not a measurement."""


@dataclass(frozen=True, slots=True)
class Coefficients:
    """A step's seconds as a sum of products, as a fit to measurements gives it."""

    step_seconds: float = 0.0
    token_seconds: float = 0.0
    kv_byte_seconds: float = 0.0
    """Per byte of KV and state that the step reads."""
    pair_seconds: float = 0.0
    """Per pair of query and key, summed over layers."""


@dataclass(frozen=True, slots=True)
class Device:
    """What computes a step. Rates are the maker's for dense bf16, efficiencies are what is reached of them."""

    name: str
    flops_per_second: float
    bytes_per_second: float
    memory_bytes: int
    source: str
    compute_efficiency: float = COMPUTE_EFFICIENCY
    attention_efficiency: float = ATTENTION_EFFICIENCY
    memory_efficiency: float = MEMORY_EFFICIENCY
    step_overhead_seconds: float = STEP_OVERHEAD_SECONDS
    points: tuple[tuple[float, float], ...] = ()
    """(tokens, seconds) as measured, in rising order of tokens; they replace the roofline."""
    coefficients: Coefficients | None = None
    """As fitted to measurements; they replace the roofline."""

    def __post_init__(self) -> None:
        """Check every figure; raises ConfigError with all problems at once."""
        rates = ("flops_per_second", "bytes_per_second", "memory_bytes")
        shares = ("compute_efficiency", "attention_efficiency", "memory_efficiency")
        problems = [
            f"{name} is {getattr(self, name)}; it must be above 0" for name in rates if getattr(self, name) <= 0
        ]
        problems += [
            f"{name} is {getattr(self, name)}; it must be above 0 and at most 1"
            for name in shares
            if not 0 < getattr(self, name) <= 1
        ]
        if self.step_overhead_seconds < 0:
            problems.append(f"step_overhead_seconds is {self.step_overhead_seconds}; it cannot be negative")
        problems += _problems_of_points(self.points)
        if self.points and self.coefficients is not None:
            problems.append("a profile has points or coefficients, not both")
        if problems:
            raise ConfigError([f"device {self.name}: {problem}" for problem in problems])

    def times(self, count: int) -> Device:
        """Return `count` of this device as one: all rates times `count`, nothing for what they tell each other."""
        if count == 1:
            return self
        return replace(
            self,
            name=f"{count}x{self.name}",
            flops_per_second=self.flops_per_second * count,
            bytes_per_second=self.bytes_per_second * count,
            memory_bytes=self.memory_bytes * count,
            source=f"{count} times: {self.source}; no cost of communication",
        )


def _problems_of_points(points: tuple[tuple[float, float], ...]) -> list[str]:
    if not points:
        return []
    tokens, seconds = zip(*points, strict=True)
    problems = []
    if len(points) < 2:
        problems.append(f"points are {points}; at least two are needed to interpolate")
    if any(after <= before for before, after in pairwise(tokens)):
        problems.append(f"the tokens of the points are {tokens}; each must be more than the one before")
    if min(seconds) <= 0:
        problems.append(f"the seconds of the points are {seconds}; each must be above 0")
    return problems


GB, TB, TFLOPS = 10**9, 1e12, 1e12

DEVICES = (
    Device("a100", 312 * TFLOPS, 2.039 * TB, 80 * GB, "NVIDIA's data sheet of the A100 80GB SXM: bf16 dense, HBM2e"),
    Device(
        "l40s", 362.05 * TFLOPS, 0.864 * TB, 48 * GB, "NVIDIA's data sheet of the L40S: bf16 without sparsity, GDDR6"
    ),
    Device(
        "h100",
        989.4 * TFLOPS,
        3.35 * TB,
        80 * GB,
        "NVIDIA's data sheet of the H100 SXM: bf16 1,979 TFLOPS with sparsity, half of it dense; HBM3",
    ),
    Device(
        "h200",
        989.4 * TFLOPS,
        4.8 * TB,
        141 * GB,
        "NVIDIA's data sheet of the H200 SXM: bf16 1,979 TFLOPS with sparsity, half of it dense; HBM3e",
    ),
    Device(
        "b200",
        2250 * TFLOPS,
        8 * TB,
        180 * GB,
        "NVIDIA's data sheet of the HGX B200, an eighth of the board: bf16 36 PFLOPS with sparsity, half of it dense; "
        "64 TB/s and 1.44 TB of HBM3e",
    ),
    Device("mi300x", 1307.4 * TFLOPS, 5.3 * TB, 192 * GB, "AMD's data sheet of the Instinct MI300X: bf16 dense, HBM3"),
)
"""Peak figures of one device each, as published."""


def device_named(text: str) -> Device:
    """Return a device by name (`h200`, `4xh100`) or from a profile file; ConfigError says what there is."""
    path = Path(text)
    if path.suffix in (".json", ".toml"):
        return read_profile(path)
    count, name = re.fullmatch(r"(?:([1-9]\d*)x)?(.*)", text.lower().strip(), re.DOTALL | re.ASCII).groups()  # type: ignore[union-attr]
    for device in DEVICES:
        if device.name == name:
            return device.times(int(count or 1))
    names = [device.name for device in DEVICES]
    raise ConfigError(
        [
            f"no device is called {text!r}{did_you_mean(name, names)}; there are {', '.join(names)}, several as "
            "4xh100, or give a profile file that ends in .json or .toml"
        ]
    )


def read_profile(path: Path) -> Device:
    """Return the device that a profile file describes; ConfigError with the file's name and every problem."""
    try:
        text = path.read_text(encoding="utf-8")
        table = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError([f"the device profile {path} cannot be read: {error}"]) from error
    if not isinstance(table, dict):
        raise ConfigError([f"the device profile {path} must be a table of names and values"])
    try:
        return _profiled(table, path)
    except ConfigError as error:
        raise ConfigError([f"{path}: {problem}" for problem in error.problems]) from error
    except (TypeError, ValueError) as error:
        raise ConfigError([f"{path}: {error}"]) from error


def _profiled(table: Mapping[str, Any], path: Path) -> Device:
    known = [each.name for each in fields(Device)]
    unknown = [name for name in table if name not in (*known, "base")]
    if unknown:
        raise ConfigError([f"{name!r} is no field of a profile{did_you_mean(name, known)}" for name in unknown])
    changes = {name: value for name, value in table.items() if name != "base"}
    changes.setdefault("name", path.stem)
    changes.setdefault("source", f"profile file {path.name}")
    if "points" in changes:
        changes["points"] = tuple((float(tokens), float(seconds)) for tokens, seconds in changes["points"])
    if "coefficients" in changes:
        changes["coefficients"] = Coefficients(**changes["coefficients"])
    if "base" in table:
        return replace(device_named(str(table["base"])), **changes)
    measured = "points" in changes or "coefficients" in changes
    if measured:  # the rates are not asked then
        changes = {"flops_per_second": 1.0, "bytes_per_second": 1.0, "memory_bytes": 1} | changes
    return Device(**changes)
