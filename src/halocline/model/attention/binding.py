"""What ties a model of `transformers` to the arena: our attention function and who it works for.

    runner          binding = ArenaAttention(arena, layout, dtype, backend); binding.attach(model)
    every step      binding.begin(plan); model(...)
    in each layer   attend(module, q, k, v)  ->  module's LayerBinding  ->  write K and V, attend

The function registered with `transformers` is one for the process, but it keeps nothing: each attention module
carries its own binding, so several models can run side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from halocline.errors import InvariantError, ModelError
from halocline.memory.layout import ArenaLayout
from halocline.memory.retention import Sliding
from halocline.model.attention.facts import AttentionStep, LayerView, Scores, layer_views
from halocline.step import StepPlan

ATTENTION = "halocline_arena"
"""The name under which our attention is registered with `transformers`."""

_SLOT = "halocline_binding"


class AttentionBackend(Protocol):
    """How attention is computed. Siblings: `reference`, `cpu` and `blocked`."""

    name: str

    def attend(
        self,
        query: Tensor,
        new: tuple[Tensor, Tensor] | None,
        layer: LayerView,
        step: AttentionStep,
        scores: Scores,
    ) -> Tensor:
        """Put the step's new K and V into their pages, then return the attention of `query` over all its pages.

        Only rows that the pool's facts name are written (`PoolFacts.write_rows`): the rest lies in pages of the prefix
        cache, which other requests read.

        `query` is (T, heads, k_dim) and the result (T, heads, v_dim) of the same type. `new` is K (T, kv_heads, k_dim)
        and V (T, kv_heads, v_dim), or None for a layer that reads what an earlier one has written.
        """
        ...


class ArenaAttention:
    """One model's attention over one arena. Belongs to one runner."""

    def __init__(
        self,
        arena: Tensor,
        layout: ArenaLayout,
        dtype: torch.dtype,
        backend: AttentionBackend,
        model_name: str = "target",
    ) -> None:
        """Make the layers' views over `arena` (uint8); `dtype` is the element type of K and V in it."""
        self.layout = layout
        self.backend = backend
        self.layers = layer_views(arena, layout, dtype, model_name)
        self.step: AttentionStep | None = None
        self._device = arena.device
        self._modules: list[nn.Module] = []

    def attach(self, model: nn.Module) -> None:
        """Make every attention layer of `model` (a `PreTrainedModel`) attend through this binding.

        Raises ModelError when a layer of the layout has no attention module in the model.
        """
        register()
        bound = dict(self._bindings(model))
        missing = set(self.layers) - {binding.view.layer for binding in bound.values()}
        if missing:
            raise ModelError(f"the layout has layers {sorted(missing)}, which {type(model).__name__} lacks")
        taken = sorted(binding.view.layer for module, binding in bound.items() if _SLOT in vars(module))
        if taken:
            raise InvariantError([f"layers {taken} of {type(model).__name__} already serve another runner"])
        model.set_attn_implementation(ATTENTION)  # type: ignore[operator]
        if model.config._attn_implementation != ATTENTION:  # type: ignore[union-attr]  # noqa: SLF001
            raise ModelError(f"{type(model).__name__} does not let its attention be replaced; it cannot be served")
        for module, binding in bound.items():
            setattr(module, _SLOT, binding)
        self._modules = list(bound)

    def _bindings(self, model: nn.Module) -> Iterator[tuple[nn.Module, LayerBinding]]:
        for module, layer_idx in _layers_of(model):
            writes = layer_idx in self.layers
            source = layer_idx if writes else _sharing_source(module, layer_idx, self.layers)
            if source is not None:
                yield module, LayerBinding(self, self.layers[source], writes)

    def detach(self) -> None:
        """Let go of the model, so that another runner may take it."""
        for module in self._modules:
            delattr(module, _SLOT)
        self._modules.clear()

    def begin(self, plan: StepPlan) -> AttentionStep:
        """Derive the facts of `plan`; the next forward of the model computes this step."""
        self.step = AttentionStep.of(plan, self.layout, self._device)
        return self.step


@dataclass(frozen=True, slots=True)
class LayerBinding:
    """What one attention module knows: whose step it computes, and its place in the arena."""

    owner: ArenaAttention
    view: LayerView
    writes: bool
    """False for a layer that attends to an earlier layer's K and V, which are already in place."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as `transformers` calls it: q (1, heads, T, k_dim), k and v (1, kv_heads, T, dim) of the new tokens.

    Returns ((1, T, heads, v_dim), None). Windows and chunks are the pool's; where the model names its window too,
    both must agree.
    """
    binding: LayerBinding | None = vars(module).get(_SLOT)
    if binding is None or binding.owner.step is None:
        raise InvariantError([f"{type(module).__name__} attends before a runner attached it and began a step"])
    _check_call(module, binding.view, attention_mask, scaling, kwargs)
    assert scaling is not None, "checked above"
    owner, view, step = binding.owner, binding.view, binding.owner.step
    _check_shapes(query, key, value, view, step)
    new = (key[0].transpose(0, 1), value[0].transpose(0, 1)) if binding.writes else None
    scores = Scores(scaling, kwargs.get("softcap"), kwargs.get("s_aux"))
    return owner.backend.attend(query[0].transpose(0, 1), new, view, step, scores)[None], None


def register() -> None:
    """Tell `transformers` about our attention, and that it needs no mask. Doing so twice changes nothing."""
    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, _no_mask)


def _no_mask(*args: object, **kwargs: object) -> None:
    """Build no mask: which positions are seen follows from the positions and the pool's retention."""
    del args, kwargs


def _check_call(
    module: nn.Module, view: LayerView, attention_mask: Tensor | None, scaling: float | None, kwargs: dict[str, Any]
) -> None:
    problems = []
    if attention_mask is not None:
        problems.append("it builds a mask of its own")
    if scaling is None:
        problems.append("it gives no scaling")
    if kwargs.get("position_bias") is not None:
        problems.append("it adds a bias to the scores")
    if not kwargs.get("is_causal", vars(module).get("is_causal", True)):
        problems.append("it is not causal")
    window = kwargs.get("sliding_window")
    ours = view.retention.window_tokens if isinstance(view.retention, Sliding) else None
    # A model that passes no window at all leaves it to the mask that we do not build; then the pool's rule holds.
    if "sliding_window" in kwargs and window != ours:
        problems.append(f"its window is {window}, but its pool keeps {view.retention}")
    if problems:
        raise ModelError(f"layer {view.layer} ({type(module).__name__}) cannot be served: {'; '.join(problems)}")


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, view: LayerView, step: AttentionStep) -> None:
    # A kernel on bare pointers would take whatever lies there; torch would broadcast one KV head over many.
    _, _, kv_heads, k_dim = view.k.shape
    heads, tokens = query.shape[1], step.tokens
    expected = ((1, heads, tokens, k_dim), (1, kv_heads, tokens, k_dim), (1, kv_heads, tokens, view.v.shape[3]))
    got = (tuple(query.shape), tuple(key.shape), tuple(value.shape))
    if got != expected or heads % kv_heads:
        raise InvariantError([f"layer {view.layer}: q, k, v are {got}, but arena and step are made for {expected}"])


def _layers_of(model: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    for module in model.modules():
        layer_idx = vars(module).get("layer_idx")
        if isinstance(layer_idx, int):
            yield module, layer_idx


def _sharing_source(module: nn.Module, layer_idx: int, layers: dict[int, LayerView]) -> int | None:
    """Return the earlier layer whose K and V this one attends to: the last that stores and is of the same type.

    That is the rule of every family with KV-sharing layers (gemma3n, gemma4); the layout has no place for the rest.
    """
    types = vars(module).get("config") and getattr(module.config, "layer_types", None)
    if not types or layer_idx >= len(types):
        return None
    same = [layer for layer in layers if layer < layer_idx and types[layer] == types[layer_idx]]
    return max(same, default=None)
