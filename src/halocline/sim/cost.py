"""What a step takes on a device: a roofline over what it must compute and what it must read.

    seconds = max(compute, memory) + overhead
    compute = 2 * active parameters * tokens / (FLOP/s * compute efficiency)
              + pair FLOPs of attention / (FLOP/s * attention efficiency)
    memory  = (weights once + KV read + KV written) / (bytes/s * memory efficiency)

Attention, per retention. A segment computes positions [s, e), n = e - s of them; T(x) = x (x + 1) / 2:

                 pairs of query and key                              positions of KV read
    full         T(e) - T(s)                                         e
    sliding W    T(min(e, W)) - T(min(s, W)) + W (max(e, W) - max(s, W))      e - max(0, s - W + 1)
    chunked A    F(e) - F(s), F(x) = floor(x / A) T(A) + T(x mod A)           e - floor(s / A) A
    state        n per element of state (one update, one reading)    the state is read once and written once

so prefill is quadratic in full layers and linear beyond a window, and a decode reads what it sees. A pair of a layer
costs 2 * query heads * (K + V elements of a head) FLOPs. Tables of shapes name no query heads:
`QUERY_HEADS_PER_KV_HEAD` of them share a KV head. Weights are read once a step: all of a dense model; of a model with
experts, the share that its tokens touch when they choose independently of each other,

    parameters * (1 - (1 - active / parameters) ** tokens)

which is the active ones for one token and all of them for many.

What is left out: activations, the vocabulary's part in prefill, communication between devices, and that tokens of one
text choose experts alike. Compute does not depend on how memory is divided, so every policy is charged alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halocline.errors import ConfigError
from halocline.memory.layout import LayerKV
from halocline.memory.retention import Chunked, Full, Retention, Sliding, State
from halocline.sim.device import Device
from halocline.sim.shapes import Shape

QUERY_HEADS_PER_KV_HEAD = 4
"""Where a shape does not name its query heads. Published models have 2 to 16."""
STATE_FLOPS_PER_ELEMENT = 4
"""A multiplication and an addition for the update of a state's element, and the same for reading it."""

Counts = NDArray[np.int64]
Count = int | Counts
"""Of one step, or of each of several."""
Seconds = Any
"""A float, or an array of them: NumPy computes both with the same formula."""


@dataclass(frozen=True, slots=True)
class Kind:
    """All layers of one retention, summed."""

    retention: Retention
    token_bytes: int
    """K and V of one position; of a state, the whole of it."""
    pair_flops: int
    """FLOPs of one pair of query and key; of a state, of one token."""
    layers: int

    @property
    def position_traffic(self) -> int:
        """Bytes that move per position read: a state is read and written again."""
        return self.token_bytes * (2 if isinstance(self.retention, State) else 1)


def kinds_of(layers: Sequence[LayerKV], query_heads_per_kv_head: int = QUERY_HEADS_PER_KV_HEAD) -> tuple[Kind, ...]:
    """Return the target model's layers by retention; those of a draft are not computed here."""
    groups: dict[Retention, list[LayerKV]] = {}
    for layer in layers:
        if layer.model == "target":
            groups.setdefault(layer.retention, []).append(layer)
    return tuple(
        Kind(
            retention,
            sum(layer.state_bytes or layer.token_bytes for layer in group),
            sum(
                STATE_FLOPS_PER_ELEMENT * layer.state_bytes // layer.dtype_bytes
                if isinstance(retention, State)
                else 2 * query_heads_per_kv_head * layer.kv_heads * (layer.k_dim + layer.v_dim)
                for layer in group
            ),
            len(group),
        )
        for retention, group in groups.items()
    )


def pairs_of(retention: Retention, start: int, end: int) -> int:
    """Return the pairs of query and key of positions [start, end) in one layer; in a state, the tokens."""
    match retention:
        case Full():
            return triangle(end) - triangle(start)
        case Sliding(window):
            inside = triangle(min(end, window)) - triangle(min(start, window))
            return inside + window * (max(end, window) - max(start, window))
        case Chunked(chunk):
            return _chunked_pairs(end, chunk) - _chunked_pairs(start, chunk)
        case State():
            return end - start


def positions_read(retention: Retention, start: int, end: int) -> int:
    """Return the positions whose K and V the tokens [start, end) read, their own included; of a state, 1."""
    return 1 if isinstance(retention, State) else end - retention.first_needed(start)


def triangle(count: int) -> int:
    """Return 1 + 2 + ... + count."""
    return count * (count + 1) // 2


def _chunked_pairs(end: int, chunk: int) -> int:
    return end // chunk * triangle(chunk) + triangle(end % chunk)


class CostModel:
    """Seconds of steps of one model on one device."""

    def __init__(self, shape: Shape, device: Device, weight_bytes: float = 2.0) -> None:
        """`weight_bytes` is what the device reads of one weight. Raises ConfigError when the parameters are unknown."""
        self.kinds = kinds_of(shape.layers)
        self._factors = [(kind.retention, kind.pair_flops, kind.layers, kind.position_traffic) for kind in self.kinds]
        self._device = device
        measured = device.points or device.coefficients is not None
        if shape.parameters is None and not measured:
            raise ConfigError(
                [
                    f"the parameters of {shape.name} are not known, so no step can be timed by what it computes; give "
                    "a device profile with measured points or coefficients"
                ]
            )
        self._parameters = shape.parameters or 0
        self._active = shape.active_parameters or self._parameters
        self._weight_bytes = weight_bytes
        self._token_flops = 2 * self._active
        self._written_bytes = sum(kind.token_bytes for kind in self.kinds if not isinstance(kind.retention, State))

    def seconds(self, decode_starts: Counts, chunks: Sequence[tuple[int, int]] = ()) -> float:
        """Return what one step takes: a token of each decode, at position `decode_starts`, and chunks (start, end)."""
        tokens, flops, pairs, read_bytes = len(decode_starts), 0, 0, 0
        for retention, pair_flops, layers, traffic in self._factors:
            seen = seen_by(retention, decode_starts)
            flops += seen * pair_flops
            pairs += seen * layers
            read_bytes += seen * traffic
        for start, end in chunks:
            tokens += end - start
            for retention, pair_flops, layers, traffic in self._factors:
                count = pairs_of(retention, start, end)
                flops += count * pair_flops
                pairs += count * layers
                read_bytes += positions_read(retention, start, end) * traffic
        return float(self._step_seconds(tokens, flops, pairs, read_bytes))

    def leap_seconds(self, decode_starts: Counts, tokens: int) -> float:
        """Return what a leap takes: so many steps in a row, each with one token of every decode."""
        positions = decode_starts[:, None] + np.arange(tokens)
        flops, pairs, read_bytes = (np.zeros(tokens, dtype=np.int64) for _ in range(3))
        for retention, pair_flops, layers, traffic in self._factors:
            seen = _visible(retention, positions).sum(axis=0)
            flops += seen * pair_flops
            pairs += seen * layers
            read_bytes += seen * traffic
        decodes = np.full(tokens, len(decode_starts))
        return float(np.sum(self._step_seconds(decodes, flops, pairs, read_bytes)))

    def _step_seconds(self, tokens: Count, flops: Count, pairs: Count, read_bytes: Count) -> Seconds:
        """Return seconds of one step, or of each of several."""
        device = self._device
        if device.points:
            return _between(device.points, tokens)
        if device.coefficients is not None:
            fit = device.coefficients
            rest = tokens * fit.token_seconds + read_bytes * fit.kv_byte_seconds + pairs * fit.pair_seconds
            return fit.step_seconds + rest
        compute = tokens * self._token_flops / (device.flops_per_second * device.compute_efficiency)
        compute = compute + flops / (device.flops_per_second * device.attention_efficiency)
        moved = self.weights_read(tokens) + read_bytes + tokens * self._written_bytes
        memory = moved / (device.bytes_per_second * device.memory_efficiency)
        longer = max(compute, memory) if isinstance(tokens, int) else np.maximum(compute, memory)
        return longer + device.step_overhead_seconds

    def weights_read(self, tokens: Count) -> Seconds:
        """Return the bytes of weights that a step of so many tokens reads: all, or the experts that they touch."""
        if self._active >= self._parameters:
            return self._parameters * self._weight_bytes
        untouched = (1 - self._active / self._parameters) ** tokens
        return self._parameters * self._weight_bytes * (1 - untouched)


def seen_by(retention: Retention, positions: Counts) -> int:
    """Return how many positions tokens at `positions` see, all together."""
    match retention:  # the common kinds without an array between: this is asked at every step
        case Full():
            return int(np.add.reduce(positions)) + len(positions)
        case Sliding(window):
            return int(np.add.reduce(np.minimum(positions, window - 1))) + len(positions)
        case _:
            return int(np.add.reduce(_visible(retention, positions)))


def _visible(retention: Retention, positions: Counts) -> Counts:
    """Return how many positions a token at each of `positions` sees, itself included; of a state, 1."""
    match retention:
        case Full():
            return positions + 1
        case Sliding(window):
            return np.minimum(positions + 1, window)
        case Chunked(chunk):
            return positions % chunk + 1
        case State():
            return np.ones_like(positions)


def _between(points: tuple[tuple[float, float], ...], tokens: Count) -> Seconds:
    """Interpolate between measured points; beyond them the nearest two go on, never below 0."""
    known, seconds = map(np.array, zip(*points, strict=True))
    found = np.interp(tokens, known, seconds)
    for outside, a, b in ((tokens > known[-1], -2, -1), (tokens < known[0], 0, 1)):
        slope = (seconds[b] - seconds[a]) / (known[b] - known[a])
        found = np.where(outside, seconds[a] + (tokens - known[a]) * slope, found)
    return np.maximum(found, 0.0)
