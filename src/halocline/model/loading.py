"""Loading the weights of a model that is on this machine, in the engine's process, and checking that it can be served.

source = resolve("gemma3-270m")       sources.py: find, fetch, convert
load_config(source)                   configs.py: no weights, and a tokenizer likewise
load(source)                          here
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from halocline.errors import ModelError
from halocline.model.configs import first_line, load_config
from halocline.model.dtypes import choose_device, choose_dtype
from halocline.model.head import speed_up_head
from halocline.model.layers import kv_layers, text_config
from halocline.model.probe import check_model
from halocline.model.progress import transformers_is_silent
from halocline.model.sources import ModelSource

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
        raise ModelError(f"cannot load the weights of {source.name!r}: {first_line(error)}") from error
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
