"""What the layers of known models keep: the table of shapes, read from `shapes.json` beside this file.

    gemma-3-27b     10 full + 52 sliding(1,024) layers, 16 KV heads of 128: 81,920 bytes a position in full pages (bf16)

A shape is all that the simulator and the calculator need of a model: no weights and no configuration class. Each names
its source; names that end in `-like` are shapes for comparisons, not checked against a published configuration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from halocline.config import did_you_mean
from halocline.errors import ConfigError
from halocline.memory.layout import LayerKV
from halocline.memory.retention import Chunked, Full, Retention, Sliding, State

BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """What a model keeps per position and request, and how large it is.

    Layers of one kind stand together, not in the model's order, which changes no byte.
    """

    name: str
    layers: tuple[LayerKV, ...]
    parameters: int | None
    """All weights: of the text model, where the source tells it apart; None where nobody published them."""
    active_parameters: int | None
    """Weights that take part in one token: fewer than `parameters` where experts are chosen per token."""
    max_model_len: int | None
    """The longest prompt plus output that the model was made for, in tokens; None where it names none."""
    source: str
    """Where the figures come from."""
    note: str = ""

    def of_dtype(self, dtype_bytes: int) -> Shape:
        """Return the shape with K and V of `dtype_bytes` an element. States keep the types that their model gives."""
        return replace(
            self,
            layers=tuple(
                layer if isinstance(layer.retention, State) else replace(layer, dtype_bytes=dtype_bytes)
                for layer in self.layers
            ),
        )

    def with_draft(self, draft: Shape) -> Shape:
        """Return the shape with the layers of a draft model beside its own: they live in the same arena."""
        layers = self.layers + tuple(replace(layer, model="draft") for layer in draft.layers)
        return replace(self, name=f"{self.name} + {draft.name}", layers=layers)


@cache
def shapes() -> tuple[Shape, ...]:
    """Return all shapes of the table, K and V in bf16, in the table's order."""
    table = json.loads(files("halocline.sim").joinpath("shapes.json").read_text(encoding="utf-8"))
    return tuple(map(_shape, table["shapes"]))


def shape_named(name: str) -> Shape:
    """Return the shape called `name`; ConfigError with the names there are when there is none."""
    for shape in shapes():
        if shape.name == name:
            return shape
    names = [shape.name for shape in shapes()]
    raise ConfigError([f"no shape is called {name!r}{did_you_mean(name, names)}; there are {', '.join(names)}"])


def _shape(row: Mapping[str, Any]) -> Shape:
    layers: list[LayerKV] = []
    for kind in row["kinds"]:
        layers += [_layer(kind, len(layers) + index) for index in range(kind["layers"])]
    return Shape(
        name=row["name"],
        layers=tuple(layers),
        parameters=row["parameters"],
        active_parameters=row["active_parameters"],
        max_model_len=row["max_model_len"],
        source=row["source"],
        note=row.get("note", ""),
    )


def _layer(kind: Mapping[str, Any], index: int) -> LayerKV:
    retention = _retention(kind)
    if isinstance(retention, State):
        return LayerKV(index, retention, dtype_bytes=BF16_BYTES, state_bytes=kind["state_bytes"])
    return LayerKV(index, retention, kind["kv_heads"], kind["head_dim"], kind["head_dim"], BF16_BYTES)


def _retention(kind: Mapping[str, Any]) -> Retention:
    match kind["kind"]:
        case "full":
            return Full()
        case "sliding":
            return Sliding(kind["window_tokens"])
        case "chunked":
            return Chunked(kind["chunk_tokens"])
        case "state":
            return State()
        case other:
            raise AssertionError(f"shapes.json has layers of kind {other!r}")
