"""What each layer keeps, read from a model's config alone: the one place where a config becomes `LayerKV`s.

    config.layer_types    full_attention  sliding_attention  chunked_attention   dummy (shares another layer's KV)
    retention             Full()          Sliding(W)         Chunked(A)          no LayerKV at all

No weights are needed, so the calculator and the engine get the same answer from the same code. The kinds come from
the function with which `transformers` builds its own caches, so we keep what it would keep. `probe.py` checks the
answer against the loaded model before anything is served.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig
from transformers.cache_utils import get_layer_types_and_kwargs

from halocline.errors import ModelError
from halocline.memory.layout import LayerKV
from halocline.memory.retention import Chunked, Full, Positional, Sliding

_SHARES_KV = "dummy"
"""A layer that owns no KV: it attends to an earlier layer's (gemma3n, gemma4), or has no attention."""
_TWICE_THE_HEADS = {"mimo_v2_flash"}
"""Types whose config names the KV heads of full layers only: the model's code doubles them in windowed layers."""
_LIES = (AttributeError, TypeError, ValueError, LookupError, ArithmeticError)
"""What comes of a config whose values are of another type or size than its class means: transformers checks few."""
_RECURRENT = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}


def kv_layers(config: PreTrainedConfig, dtype_bytes: int) -> tuple[LayerKV, ...]:
    """Return what every layer of the model keeps per position, in layer order; `dtype_bytes` is one K or V element.

    Layers that reuse an earlier layer's KV are absent. Raises ModelError, naming the kind and the layers, for a kind
    of layer that the arena cannot hold.
    """
    text = text_config(config)
    try:
        return _kv_layers(text, dtype_bytes)
    except _LIES as error:
        raise ModelError(
            f"model type {text.model_type!r} does not describe its attention as others do: {error}"
        ) from error


def _kv_layers(text: PreTrainedConfig, dtype_bytes: int) -> tuple[LayerKV, ...]:
    types, settings = get_layer_types_and_kwargs(text)
    _refuse_unknown(text, types)
    layers = []
    for layer, (kind, setting, layer_config) in enumerate(zip(types, settings, text.per_layer_config, strict=True)):
        if kind != _SHARES_KV:
            retention = _retention(kind, setting.get("sliding_window"))
            kv_heads, k_dim, v_dim = _shape(layer_config)
            if text.model_type in _TWICE_THE_HEADS and isinstance(retention, Sliding):
                kv_heads *= 2
            layers.append(LayerKV(layer, retention, kv_heads, k_dim, v_dim, dtype_bytes))
    if not layers:
        raise ModelError(f"model type {text.model_type!r} has no attention layer, so there is no KV to serve it from")
    return tuple(layers)


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the part of `config` that describes the language model (the whole, unless it is multimodal).

    Raises ModelError where the config has something else in its place.
    """
    text = config.get_text_config(decoder=True)
    if not isinstance(text, PreTrainedConfig):
        raise ModelError(
            f"model type {config.model_type!r} has a text_config that is none: {text!r:.60}; leave it out, or give the "
            f"configuration of the language model"
        )
    return text


def own_limit(config: PreTrainedConfig) -> int | None:
    """Return the longest sequence that the model was made for, in tokens; None: not every config names it."""
    limit = getattr(text_config(config), "max_position_embeddings", None)
    return None if limit is None else _count("max_position_embeddings", limit)


def _refuse_unknown(config: PreTrainedConfig, types: list[str]) -> None:
    known = {"full_attention", "sliding_attention", "chunked_attention", _SHARES_KV}
    for kind in sorted(set(types) - known):
        count = types.count(kind)
        reason = "recurrent layers keep a state, which is not served yet" if kind in _RECURRENT else "not known here"
        raise ModelError(
            f"model type {config.model_type!r} has {count} of {len(types)} layers of kind {kind!r}: {reason}; "
            f"served kinds are full, sliding and chunked attention"
        )


def _retention(kind: str, window_tokens: object) -> Positional:
    # For chunked layers transformers passes the chunk size under the same key.
    if kind == "full_attention":
        return Full()
    window_tokens = _count(f"the size in tokens of {kind} layers", window_tokens)
    return Sliding(window_tokens) if kind == "sliding_attention" else Chunked(window_tokens)


def _shape(config: Any) -> tuple[int, int, int]:
    """Return (kv_heads, k_dim, v_dim) of one layer as its attention hands them over."""
    heads = _count("num_attention_heads", config.num_attention_heads)
    if getattr(config, "kv_lora_rank", None):
        # Latent attention: transformers expands the latent to full heads before it calls the attention function.
        k_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        return heads, _count("the width of keys", k_dim), _count("v_head_dim", config.v_head_dim)
    k_dim = _count("head_dim", getattr(config, "head_dim", None) or config.hidden_size // heads)
    v_dim = _count("v_head_dim", getattr(config, "v_head_dim", None) or k_dim)
    if getattr(config, "multi_query", False):
        return 1, k_dim, v_dim
    return _count("num_key_value_heads", getattr(config, "num_key_value_heads", None) or heads), k_dim, v_dim


def _count(what: str, value: object) -> int:
    """Return `value` where it counts something; raises ModelError, which says what it is that does not."""
    if type(value) is not int or value < 1:
        raise ModelError(f"the config says that {what} is {value!r:.60}; it must be a whole number of at least 1")
    return value
