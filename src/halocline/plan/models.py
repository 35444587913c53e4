"""Which model is meant: what it keeps, found without reading weights.

gemma-3-27b              a name of the table (`halocline.sim.shapes`)
gemma3-270m              a built-in name
transformers:gpt_oss     the defaults of a configuration class
./config.json  ./folder  ./model.gguf  owner/model      as `serve` takes them, or a config alone
"""

from __future__ import annotations

import difflib
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from halocline.config import Config
from halocline.errors import ModelError
from halocline.paths import existing_path
from halocline.sim.shapes import Shape, shape_named, shapes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

DEFAULTS_OF = "transformers:"
"""`transformers:gpt_oss` is the shape that the configuration class of model type gpt_oss has by default."""
_BUILTIN_SHAPES = {"gemma3-270m": "gemma-3-270m", "smollm2-135m": "smollm2-135m"}
"""The shapes of the built-in models, so that a plan needs no download."""
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, slots=True)
class Resolved:
    """A model as the calculator knows it."""

    shape: Shape
    kv_dtype: str
    notes: tuple[str, ...] = ()


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
    from halocline.model.progress import transformers_is_silent

    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        near = difflib.get_close_matches(kind, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, n=1)
        guess = f"; did you mean {DEFAULTS_OF + near[0]!r}?" if near else ""
        raise ModelError(
            f"transformers {transformers.__version__} has no causal language model of type {kind!r}{guess}"
        )
    try:
        with transformers_is_silent():
            found = CONFIG_MAPPING[kind]()
    except Exception as error:  # some classes need more than their defaults give
        words = " ".join(str(error).split())
        raise ModelError(f"the configuration class of {kind!r} has no usable defaults: {words}") from error
    if found.is_encoder_decoder:
        raise ModelError(f"{kind!r} is an encoder-decoder; only decoders are served")
    text = text_config(found)
    if text.dtype is None:
        text.dtype = torch.bfloat16
    return found


def _config_at(name: str, config: Config) -> PreTrainedConfig:
    """Return the config that a file, a folder or a hub model holds."""
    path = existing_path(name)
    if path is None and "/" not in name:
        raise _unknown(name)  # before torch is loaded: a mistyped name is answered at once
    from halocline.model.configs import load_config
    from halocline.model.gguf_convert import gguf_config
    from halocline.model.sources import ModelSource
    from halocline.model.sources import resolve as find

    if path is not None and path.is_file() and path.suffix == ".json":
        # Configs are read by folder and file name, and a file may have any name here.
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(path, Path(folder) / "config.json")
            return load_config(ModelSource(str(path), Path(folder), "folder", config.trust_remote_code))
    if path is not None and path.is_file() and path.suffix == ".gguf":
        return gguf_config(path)
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
