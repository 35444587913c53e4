"""One small forward of the loaded model that checks what its config promised.

A config can name windows that the code ignores, or the code can call its attention twice per layer, build masks of
its own or attend in both directions. Served from pages such a model would answer wrongly, so it is refused at start,
by name, and not when the first request fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from halocline.errors import ModelError
from halocline.memory.layout import LayerKV
from halocline.memory.retention import Sliding, describe

PROBE_TOKENS = 3


@dataclass(frozen=True, slots=True)
class _Call:
    """What one layer handed to the attention function."""

    layer: int
    shape: tuple[int, int, int]
    """kv_heads, k_dim, v_dim."""
    problem: str | None
    window_tokens: int | None
    names_window: bool


@torch.inference_mode()
def check_model(model: PreTrainedModel, layers: Sequence[LayerKV], vocab_size: int) -> None:
    """Run `model` on three tokens and compare what its layers do with `layers`.

    Raises ModelError with the first difference; leaves the model's attention implementation as it was.
    """
    calls: list[_Call] = []
    with _recording(model, calls):
        ids = torch.arange(PROBE_TOKENS, device=model.device)[None]
        try:
            rows = torch.tensor([PROBE_TOKENS - 1], device=model.device)
            logits = model(input_ids=ids, position_ids=ids.clone(), use_cache=False, logits_to_keep=rows).logits
        except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, NotImplementedError) as error:
            raise _refusal(model, f"a packed forward fails: {error}") from error
    _compare(model, calls, {layer.layer: layer for layer in layers})
    if logits.shape != (1, 1, vocab_size):
        raise _refusal(model, f"its logits are {tuple(logits.shape)}, not (1, 1, {vocab_size})")


def _compare(model: PreTrainedModel, calls: Sequence[_Call], layers: dict[int, LayerKV]) -> None:
    numbers = [call.layer for call in calls]
    if len(set(numbers)) != len(numbers) or not set(layers) <= set(numbers):
        raise _refusal(model, f"its attention is called for layers {numbers}, expected {sorted(layers)} once each")
    for call in calls:
        if call.problem is not None:
            raise _refusal(model, f"layer {call.layer}: {call.problem}")
        if call.layer in layers:
            _compare_layer(model, call, layers[call.layer])


def _compare_layer(model: PreTrainedModel, call: _Call, layer: LayerKV) -> None:
    expected = (layer.kv_heads, layer.k_dim, layer.v_dim)
    if call.shape != expected:
        raise _refusal(model, f"layer {call.layer} has KV of shape {call.shape}, its config says {expected}")
    window = layer.retention.window_tokens if isinstance(layer.retention, Sliding) else None
    if call.names_window and call.window_tokens != window:
        raise _refusal(
            model,
            f"layer {call.layer} attends with a window of {call.window_tokens}, "
            f"its config says {describe(layer.retention)}",
        )


@contextmanager
def _recording(model: PreTrainedModel, calls: list[_Call]) -> Iterator[None]:
    # The name is unique, so that two loads in one process cannot record into each other's list.
    name = f"halocline_probe_{id(calls)}"

    def record(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        calls.append(_describe_call(module, query, key, value, mask, kwargs))
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    before = model.config._attn_implementation  # noqa: SLF001
    AttentionInterface.register(name, record)
    AttentionMaskInterface.register(name, lambda *args, **kwargs: None)
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        model.set_attn_implementation(before)
        AttentionInterface._global_mapping.pop(name)  # noqa: SLF001
        AttentionMaskInterface._global_mapping.pop(name)  # noqa: SLF001


def _describe_call(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
) -> _Call:
    problem = None
    if mask is not None:
        problem = "it builds a mask of its own"
    elif kwargs.get("position_bias") is not None:
        problem = "it adds a bias to the scores"
    elif not kwargs.get("is_causal", getattr(module, "is_causal", True)):
        problem = "it is not causal"
    elif key.shape[2] != PROBE_TOKENS or query.shape[2] != PROBE_TOKENS:
        problem = f"it attends over {key.shape[2]} positions where {PROBE_TOKENS} were given"
    return _Call(
        layer=int(getattr(module, "layer_idx", -1)),
        shape=(key.shape[1], key.shape[3], value.shape[3]),
        problem=problem,
        window_tokens=kwargs.get("sliding_window"),
        names_window="sliding_window" in kwargs,
    )


def _refusal(model: PreTrainedModel, reason: str) -> ModelError:
    return ModelError(f"{type(model).__name__} cannot be served from pages: {reason}")
