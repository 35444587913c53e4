"""The calculator: how a model's memory would be cut and what it would hold, by the engine's own code, without weights.

    resolve_shape("gemma-3-27b")         what a model keeps: a name of the table, a config, a folder, a GGUF file
    plan(config, model, rows=...)        pools and slabs, bytes per request, requests at once under each policy

Memory is laid out by `compose.lay_out_layers`, which also lays it out when a server starts, so both print the same.
"""

from __future__ import annotations

import difflib
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halocline.compose import lay_out_layers
from halocline.config import Config
from halocline.errors import ConfigError, ModelError
from halocline.memory.facts import CapacityFacts
from halocline.memory.layout import ArenaLayout, solve_layout
from halocline.memory.sizing import SHOWN_LENGTHS
from halocline.sim.room import (
    BEST_STATIC,
    Compromise,
    Held,
    PoolCost,
    RequestCost,
    Row,
    compromise,
    pool_costs,
    request_cost,
    room,
)
from halocline.sim.shapes import Shape, shape_named, shapes
from halocline.units import GIB, format_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

POLICIES = ("shared", "static:0.8", BEST_STATIC, "equal-pages", "full")
"""What is compared where nothing else is asked for."""
DEFAULTS_OF = "transformers:"
"""`transformers:gpt_oss` is the shape that the configuration class of model type gpt_oss has by default."""
NOMINAL_BYTES = 64 * GIB
"""The arena whose pages are shown where none is given."""
_BUILTIN_SHAPES = {"gemma3-270m": "gemma-3-270m", "smollm2-135m": "smollm2-135m"}
"""The shapes of the built-in models, so that a plan needs no download."""
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
_MOST_DOUBLINGS = 24


@dataclass(frozen=True, slots=True)
class Resolved:
    """A model as the calculator knows it."""

    shape: Shape
    kv_dtype: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """One arena: of the model alone, or of the model with its draft."""

    model: str
    slab_bytes: int
    pools: tuple[PoolCost, ...]
    facts: CapacityFacts | None
    """What a server prints at start; None where no size is given."""
    costs: tuple[RequestCost, ...]
    """Of the rows that are one length, in their order."""
    held: tuple[tuple[Held, ...], ...]
    """By row and policy; empty where no size is given."""
    compromise: Compromise | None
    """The best single split for all rows, where there is more than one."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that `halocline plan` shows."""

    model: str
    source: str
    parameters: int | None
    active_parameters: int | None
    kv_dtype: str
    kv_bytes: int | None
    max_model_len: int | None
    """The longest prompt plus output that is served; of the model, where no size is given."""
    max_running_requests: int
    rows: tuple[Row, ...]
    policies: tuple[str, ...]
    arenas: tuple[ArenaPlan, ...]
    """The model alone and, where there is a draft, both together."""
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON has it. A row's lengths are left out where there are many; their number is told."""
        table = asdict(self)
        for row in table["rows"]:
            row["requests"] = len(row["lengths"])
            if len(row["lengths"]) > 1:
                del row["lengths"]
        for arena, own in zip(table["arenas"], self.arenas, strict=True):
            arena["tail_bytes"] = sum(pool.tail_bytes for pool in own.pools)
            for cost, told in zip(own.costs, arena["costs"], strict=True):
                told["total_bytes"] = cost.total_bytes
        return table


def plan(
    config: Config,
    model: Resolved,
    draft: Resolved | None = None,
    *,
    rows: Sequence[Row] = (),
    policies: Sequence[str] = POLICIES,
) -> Plan:
    """Plan the memory of `model`, and of `model` with `draft` in the same arena.

    `config` is what a server would get: `kv_bytes`, `page_tokens`, `policy` and the limits are used. `rows` are what to
    make room for; without any, the lengths that a server shows at start. Raises ConfigError with every problem.
    """
    budget_bytes = config.arena_budget_bytes
    alone = _memory(config, model.shape, budget_bytes)
    limit = model.shape.max_model_len if alone is None else alone.max_model_len.tokens
    if config.max_model_len is not None and alone is None:
        limit = min(limit or config.max_model_len, config.max_model_len)
    rows = _fitting(rows, limit, alone) if rows else _shown_rows(limit)
    shapes_shown = [model.shape] if draft is None else [model.shape, model.shape.with_draft(draft.shape)]
    return Plan(
        model=model.shape.name,
        source=model.shape.source,
        parameters=model.shape.parameters,
        active_parameters=model.shape.active_parameters,
        kv_dtype=model.kv_dtype,
        kv_bytes=budget_bytes,
        max_model_len=limit,
        max_running_requests=config.max_running_requests,
        rows=tuple(rows),
        policies=tuple(policies),
        arenas=tuple(_arena(config, shape, budget_bytes, rows, policies) for shape in shapes_shown),
        notes=_notes(model, draft),
    )


def _arena(
    config: Config, shape: Shape, budget_bytes: int | None, rows: Sequence[Row], policies: Sequence[str]
) -> ArenaPlan:
    page_tokens, checkpoints = config.page_tokens_rule, config.keeps_prefixes
    facts, layout = None, None
    held: tuple[tuple[Held, ...], ...] = ()
    if budget_bytes is None:
        layout = solve_layout(shape.layers, NOMINAL_BYTES, page_tokens)
    else:
        memory = lay_out_layers(config, shape.layers, shape.max_model_len, budget_bytes)
        facts, layout = memory.facts, memory.layout
        held = room(shape.layers, budget_bytes, page_tokens, policies, rows, checkpoints)
    singles = [row.lengths[0] for row in rows if len(set(row.lengths)) == 1]
    return ArenaPlan(
        model=shape.name,
        slab_bytes=layout.slab_bytes,
        pools=pool_costs(layout),
        facts=facts,
        costs=tuple(request_cost(layout, *length) for length in singles),
        held=held,
        compromise=_compromise(layout, rows, policies, checkpoints) if held else None,
    )


def _compromise(
    layout: ArenaLayout, rows: Sequence[Row], policies: Sequence[str], checkpoints: bool
) -> Compromise | None:
    if len(rows) < 2 or len(layout.pools) < 2 or BEST_STATIC not in policies:
        return None
    return compromise(layout, rows, checkpoints)


def _memory(config: Config, shape: Shape, budget_bytes: int | None) -> CapacityFacts | None:
    """Return the facts of the model's own arena. A ConfigError for one that is too small also says what would do."""
    if budget_bytes is None:
        return None
    try:
        return lay_out_layers(config, shape.layers, shape.max_model_len, budget_bytes).facts
    except ConfigError as error:
        enough = _enough_bytes(config, shape, budget_bytes)
        if enough is None:
            raise
        hint = f"{shape.name} starts with kv_bytes {enough} ({format_bytes(enough)}) under these settings"
        raise ConfigError([*error.problems, hint]) from None


def _enough_bytes(config: Config, shape: Shape, budget_bytes: int) -> int | None:
    """Return bytes with which the model starts, at most an eighth more than the fewest; None if size is no remedy."""

    def starts(size: int) -> bool:
        try:
            lay_out_layers(config, shape.layers, shape.max_model_len, size)
        except ConfigError:
            return False
        return True

    size = max(1, budget_bytes)
    for _ in range(_MOST_DOUBLINGS):
        low, size = size, 2 * size
        if starts(size):
            break
    else:
        return None
    while size - low > low // 8:
        middle = (low + size) // 2
        low, size = (low, middle) if starts(middle) else (middle, size)
    return size


def _shown_rows(limit: int | None) -> list[Row]:
    """Return the lengths that a server shows at start, as rows."""
    shown = [pair for pair in SHOWN_LENGTHS if limit is None or sum(pair) <= limit]
    if limit is not None and limit not in map(sum, shown):
        shown.append((limit - 1, 1))
    return [single_row(*pair) for pair in shown]


def single_row(prompt_tokens: int, output_tokens: int) -> Row:
    """Return the row of requests of one length."""
    return Row(f"{prompt_tokens:,} + {output_tokens:,}", ((prompt_tokens, output_tokens),))


def _fitting(rows: Sequence[Row], limit: int | None, facts: CapacityFacts | None) -> list[Row]:
    """Return the rows without requests that are never served; ConfigError where nothing of a row is left."""
    if limit is None:
        return list(rows)
    reason = "the model's own limit or as set" if facts is None else facts.max_model_len.reason
    kept, problems = [], []
    for row in rows:
        lengths = tuple(pair for pair in row.lengths if sum(pair) <= limit)
        if not lengths:
            longest = max(map(sum, row.lengths))
            problems.append(
                f"{row.label}: {longest} tokens are longer than max_model_len {limit} ({reason}), so no such request "
                f"is ever served; name lengths of at most {limit} in all"
            )
        elif len(lengths) < len(row.lengths):
            kept.append(Row(f"{row.label}, {len(row.lengths) - len(lengths)} too long left out", lengths))
        else:
            kept.append(row)
    if problems:
        raise ConfigError(problems)
    return kept


def _notes(model: Resolved, draft: Resolved | None) -> tuple[str, ...]:
    notes = [model.shape.note, *model.notes]
    if draft is not None:
        notes += [f"draft {draft.shape.name}: {draft.shape.source}", draft.shape.note, *draft.notes]
    return tuple(note for note in notes if note)


# ---- which model


def resolve_shape(name: str, *, kv_dtype: str = "auto", trust_remote_code: bool = False) -> Shape:
    """Return what the model called `name` keeps. Raises ModelError with what there is and what was probably meant."""
    return resolve(name, Config(kv_dtype=kv_dtype, trust_remote_code=trust_remote_code)).shape


def resolve(name: str, config: Config | None = None) -> Resolved:
    """Find the model called `name` without reading weights, its K and V in the type that `config` asks for.

    `name` is one of the table (`halocline.sim.shapes`), a built-in name, `transformers:TYPE` for the defaults of a
    configuration class, a config.json, a model folder, a GGUF file or a Hugging Face id. Raises ModelError.
    """
    config = config or Config()
    table = _BUILTIN_SHAPES.get(name, name)
    if table in {shape.name for shape in shapes()}:
        kv_dtype = next((kind for kind in (config.kv_dtype, config.dtype) if kind != "auto"), "bfloat16")
        return Resolved(replace(shape_named(table).of_dtype(_BYTES[kv_dtype]), name=name), kv_dtype)
    if name.startswith(DEFAULTS_OF):
        return _of_config(name, _default_config(name.removeprefix(DEFAULTS_OF)), config)
    return _of_config(name, _config_at(name, config), config)


def _default_config(kind: str) -> PreTrainedConfig:
    import torch
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from halocline.model.layers import text_config

    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        near = difflib.get_close_matches(kind, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, n=1)
        guess = f"; did you mean {DEFAULTS_OF + near[0]!r}?" if near else ""
        raise ModelError(
            f"transformers {transformers.__version__} has no causal language model of type {kind!r}{guess}"
        )
    try:
        found = CONFIG_MAPPING[kind]()
    except Exception as error:  # some classes need more than their defaults give
        raise ModelError(f"the configuration class of {kind!r} has no usable defaults: {error}") from error
    text = text_config(found)
    if text.dtype is None:
        text.dtype = torch.bfloat16
    return found


def _config_at(name: str, config: Config) -> PreTrainedConfig:
    """Return the config that a file, a folder or a hub model holds."""
    from halocline.model.gguf_convert import gguf_config
    from halocline.model.loading import load_config
    from halocline.model.sources import ModelSource
    from halocline.model.sources import resolve as find

    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".json":
        # Configs are read by folder and file name, and a file may have any name here.
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(path, Path(folder) / "config.json")
            return load_config(ModelSource(str(path), Path(folder), "folder", config.trust_remote_code))
    if path.is_file() and path.suffix == ".gguf":
        return gguf_config(path)
    if not path.exists() and "/" not in name:
        raise _unknown(name)
    return load_config(find(name, trust_remote_code=config.trust_remote_code, weights=False, quiet=True))


def _of_config(name: str, found: PreTrainedConfig, config: Config) -> Resolved:
    """Return the shape of a config: its layers as the engine reads them, checked with the model's own code."""
    import torch
    import transformers

    from halocline.model.dtypes import choose_device, choose_dtype, choose_kv_dtype
    from halocline.model.layers import kv_layers, own_limit
    from halocline.model.weightless import examine

    # A device that computes everything, unless one is named: plans are mostly made for another machine.
    device = torch.device("meta") if config.device == "auto" else choose_device(config.device)
    kv_dtype = choose_kv_dtype(config.kv_dtype, choose_dtype(config.dtype, found, device))
    here = choose_kv_dtype(config.kv_dtype, choose_dtype(config.dtype, found, choose_device(config.device)))
    layers = kv_layers(found, kv_dtype.itemsize)
    weightless = examine(found, layers)
    notes = []
    if not weightless.is_checked:
        notes.append("layers as the configuration says: this model's code could not be asked without weights")
    if here != kv_dtype:
        notes.append(
            f"on this machine a server would hold K and V in {_word(here)}, which --device {choose_device().type} plans"
        )
    where = f"transformers {transformers.__version__}, defaults of {type(found).__name__}"
    source = where if name.startswith(DEFAULTS_OF) else f"the configuration of {name} ({found.model_type})"
    shape = Shape(name, layers, weightless.parameters, None, own_limit(found), source)
    return Resolved(shape, _word(kv_dtype), tuple(notes))


def _word(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _unknown(name: str) -> ModelError:
    table = [shape.name for shape in shapes()]
    near = difflib.get_close_matches(name.lower(), [*table, *_BUILTIN_SHAPES], n=3, cutoff=0.5)
    guess = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
    return ModelError(
        f"unknown model {name!r}: no file or folder here and no name of the table{guess} There are "
        f"{', '.join(table)}; or give a config.json, a model folder, a .gguf file, a Hugging Face id such as "
        f"owner/model, or {DEFAULTS_OF}TYPE for the defaults of a configuration class such as {DEFAULTS_OF}gpt_oss"
    )
