"""Loading a model that is on this machine: config, tokenizer, weights; each can be had without the others.

source = resolve("gemma3-270m")       sources.py: find, fetch, convert
load_config(source)                   no weights: the calculator
load_tokenizer(source)                the API process
load(source)                          the engine process
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from halocline.errors import ModelError
from halocline.model.dtypes import choose_device, choose_dtype
from halocline.model.folder import has_tokenizer, read_config
from halocline.model.head import speed_up_head
from halocline.model.layers import kv_layers, text_config
from halocline.model.probe import check_model
from halocline.model.progress import transformers_is_silent
from halocline.model.sources import ModelSource, resolve

__all__ = ["LoadedModel", "ModelSource", "load", "load_config", "load_tokenizer", "resolve"]

_NO_LIMIT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, in eval mode, with what the engine must know of it."""

    source: ModelSource
    model: PreTrainedModel
    config: PreTrainedConfig
    dtype: torch.dtype
    """Type of the weights and activations."""
    device: torch.device
    eos_token_ids: tuple[int, ...]
    """Tokens that end a text, from the generation config and the config; ascending."""
    vocab_size: int
    """Length of a row of logits; the tokenizer may know fewer tokens."""
    max_positions: int
    """The longest prompt plus output that the model was made for, in tokens."""


def load_config(source: ModelSource) -> PreTrainedConfig:
    """Return the model's config. Raises ModelError when its architecture cannot be served."""
    raw = read_config(source.folder)
    model_type = raw.get("model_type")
    if model_type not in CONFIG_MAPPING and "auto_map" in raw and not source.trust_remote_code:
        raise ModelError(
            f"{source.name!r} brings Python code of its own ({model_type!r} is not in transformers); "
            f"if you trust it, start with --trust-remote-code"
        )
    try:
        with transformers_is_silent():
            config = AutoConfig.from_pretrained(source.folder, trust_remote_code=source.trust_remote_code)
    except Exception as error:  # a config that lies can fail anywhere in its family's class
        raise ModelError(f"cannot use the config of {source.name!r}: {_first_line(error)}") from error
    _check_architecture(source, config, raw)
    return config


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer. Raises ModelError when the folder has none, or one that cannot be read."""
    check_tokenizer(source)
    try:
        with transformers_is_silent():
            return AutoTokenizer.from_pretrained(source.folder, trust_remote_code=source.trust_remote_code)
    except Exception as error:  # the tokenizers library raises bare Exception for a file that it cannot parse
        raise ModelError(f"cannot read the tokenizer of {source.name!r}: {_first_line(error)}") from error


def check_tokenizer(source: ModelSource) -> None:
    """Raise ModelError when the folder has no tokenizer, without reading one."""
    if not has_tokenizer(source.folder) and not source.trust_remote_code:
        raise ModelError(
            f"{source.name!r} has no tokenizer: {str(source.folder)!r} lacks tokenizer.json; "
            f"copy it from the original model"
        )


def load(source: ModelSource, dtype: str = "auto", device: str = "auto") -> LoadedModel:
    """Load the weights and check that the model can be served.

    `dtype` is auto, bfloat16, float16, float32 or float64; `device` is auto, cpu, cuda or cuda:N. Raises ModelError.
    """
    config = load_config(source)
    place = choose_device(device)
    kind = choose_dtype(dtype, config, place)
    layers = kv_layers(config, kind.itemsize)
    model = _load_weights(source, config, kind, place)
    text = text_config(config)
    check_model(model, layers, text.vocab_size)
    speed_up_head(model)
    return LoadedModel(
        source=source,
        model=model,
        config=config,
        dtype=kind,
        device=place,
        eos_token_ids=_eos_token_ids(model.generation_config, config, text),
        vocab_size=text.vocab_size,
        max_positions=getattr(text, "max_position_embeddings", None) or _NO_LIMIT,
    )


def _check_architecture(source: ModelSource, config: PreTrainedConfig, raw: dict[str, Any]) -> None:
    remote = "AutoModelForCausalLM" in raw.get("auto_map", {}) and source.trust_remote_code
    if config.is_encoder_decoder:
        raise ModelError(f"{source.name!r} is an encoder-decoder ({config.model_type}); only decoders are served")
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not remote:
        raise ModelError(f"{source.name!r} is of type {config.model_type!r}, which is not a causal language model")
    kv_layers(config, 2)


def _load_weights(
    source: ModelSource, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    # device_map loads straight onto the device; the CPU is where weights are read anyway.
    where = {} if device.type == "cpu" else {"device_map": {"": device}}
    try:
        with transformers_is_silent():
            model, info = AutoModelForCausalLM.from_pretrained(
                source.folder,
                config=config,
                dtype=dtype,
                attn_implementation="eager",
                use_safetensors=True,
                trust_remote_code=source.trust_remote_code,
                output_loading_info=True,
                **where,
            )
    except Exception as error:  # weights that do not fit the config, quantisers that are not installed, no memory
        raise ModelError(f"cannot load the weights of {source.name!r}: {_first_line(error)}") from error
    # transformers fills missing weights with random numbers and only warns.
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(f"the weights of {source.name!r} lack {len(missing)} tensors, the first is {missing[0]!r}")
    if not model._can_set_attn_implementation():  # noqa: SLF001
        raise ModelError(
            f"{source.name!r} ({type(model).__name__}) does not use the attention interface of transformers, so its "
            f"KV cannot live in the arena"
        )
    return model.eval().requires_grad_(False)


def _eos_token_ids(generation: GenerationConfig | None, *configs: PreTrainedConfig) -> tuple[int, ...]:
    found: set[int] = set()
    for record in (generation, *configs):
        ids = getattr(record, "eos_token_id", None)
        found |= {ids} if isinstance(ids, int) else set(ids) if isinstance(ids, Iterable) else set()
    return tuple(sorted(found))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
