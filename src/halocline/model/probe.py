"""Two small forwards of the loaded model that check what its config promised.

A config can name windows that the code ignores; the code can call its attention twice per layer, build masks of its
own, attend in both directions, count positions by itself or mix neighbouring tokens outside its attention. Served
from pages and in packed rows such a model would answer wrongly, so it is refused at start, by name.

    alone      tokens   7 8            positions   0 1
    packed     tokens   9 9 9 ... 7 8  positions   0 1 2 ... 0 1      the last two must give the same K and V
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

_TOKENS = (7, 8)
_BEFORE = (9,) * 16
"""Another request's tokens in the packed row: so many that a wrong position turns K visibly."""
_FIRST_LAYER_TOLERANCE, _TOLERANCE = 0.05, 0.25
"""Largest relative difference of K and V. Later layers: rounding may send a token to another expert."""


@dataclass(frozen=True, slots=True)
class _Call:
    """What one layer handed to the attention function."""

    layer: int
    kv: tuple[Tensor, Tensor]
    """Shapes (kv_heads, T, k_dim) and (kv_heads, T, v_dim)."""
    problem: str | None
    window_tokens: int | None
    names_window: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """kv_heads, k_dim, v_dim."""
        return self.kv[0].shape[0], self.kv[0].shape[2], self.kv[1].shape[2]


@torch.inference_mode()
def check_model(model: PreTrainedModel, layers: Sequence[LayerKV], vocab_size: int) -> None:
    """Run `model` on a few tokens and compare what its layers do with `layers`.

    Raises ModelError with the first difference; leaves the model's attention implementation as it was.
    """
    expected = {layer.layer: layer for layer in layers}
    alone, logits = _forward(model, _TOKENS, range(len(_TOKENS)))
    _compare(model, alone, expected)
    if logits.shape != (1, 1, vocab_size):
        raise _refusal(model, f"its logits are {tuple(logits.shape)}, not (1, 1, {vocab_size})")
    packed, _ = _forward(model, (*_BEFORE, *_TOKENS), (*range(len(_BEFORE)), *range(len(_TOKENS))))
    _compare_packed(model, alone, packed)


@torch.inference_mode()
def check_layers(model: PreTrainedModel, layers: Sequence[LayerKV]) -> bool:
    """Compare what a model without weights (on the meta device) hands to its attention with `layers`.

    Raises ModelError with the first difference, as `check_model`; that also needs values, which are not there. Returns
    False where nothing could be compared: some models ask for values to find their way.
    """
    calls: list[_Call] = []
    tokens = torch.tensor([_TOKENS], device=model.device)
    with _recording(model, calls):
        try:
            # With a mask given, transformers does not look for packed rows in positions that have no values.
            model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
        except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, NotImplementedError):
            return False
    _compare(model, calls, {layer.layer: layer for layer in layers})
    return True


def _forward(model: PreTrainedModel, tokens: Sequence[int], positions: Sequence[int]) -> tuple[list[_Call], Tensor]:
    calls: list[_Call] = []
    with _recording(model, calls):
        try:
            output = model(
                input_ids=torch.tensor([tokens], device=model.device),
                position_ids=torch.tensor([positions], device=model.device),
                use_cache=False,
                logits_to_keep=torch.tensor([len(tokens) - 1], device=model.device),
            )
        except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, NotImplementedError) as error:
            raise _refusal(model, f"a packed forward fails: {error}") from error
    return calls, output.logits


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


def _compare_packed(model: PreTrainedModel, alone: Sequence[_Call], packed: Sequence[_Call]) -> None:
    differences = [
        max(_difference(a, b[:, -len(_TOKENS) :]) for a, b in zip(one.kv, other.kv, strict=True))
        for one, other in zip(alone, packed, strict=True)
    ]
    unlike = sum(difference > _TOLERANCE for difference in differences)
    if differences[0] > _FIRST_LAYER_TOLERANCE or unlike > len(differences) // 2:
        raise _refusal(
            model, "a token's K and V depend on what stands before it in a packed row, or not on its given position"
        )


def _difference(a: Tensor, b: Tensor) -> float:
    """Return |a - b| / |a|, 0 when both are 0."""
    a, b = a.double(), b.double()
    return float((a - b).norm() / a.norm().clamp_min(1e-30))


@contextmanager
def _recording(model: PreTrainedModel, calls: list[_Call]) -> Iterator[None]:
    # The name is unique, so that two loads in one process cannot record into each other's list.
    name = f"halocline_probe_{id(calls)}"

    def record(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        calls.append(_describe_call(module, (query, key, value), attention_mask, kwargs))
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
    module: torch.nn.Module, qkv: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, kwargs: dict[str, Any]
) -> _Call:
    query, key, value = qkv
    problem = None
    if mask is not None:
        problem = "it builds a mask of its own"
    elif kwargs.get("position_bias") is not None:
        problem = "it adds a bias to the scores"
    elif not kwargs.get("is_causal", getattr(module, "is_causal", True)):
        problem = "it is not causal"
    elif key.shape[2] != query.shape[2]:
        problem = f"it attends over {key.shape[2]} positions where {query.shape[2]} were given"
    return _Call(
        layer=int(getattr(module, "layer_idx", -1)),
        kv=(key[0], value[0]),
        problem=problem,
        window_tokens=kwargs.get("sliding_window"),
        names_window="sliding_window" in kwargs,
    )


def _refusal(model: PreTrainedModel, reason: str) -> ModelError:
    return ModelError(f"{type(model).__name__} cannot be served from pages: {reason}")
