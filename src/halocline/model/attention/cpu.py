"""The compiled CPU backend: kernel.cpp through ctypes, on torch's data pointers and torch's own OpenMP threads."""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_double, c_int32, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from halocline.memory.retention import Chunked, Sliding
from halocline.model.attention.build import BuildError, library_path
from halocline.model.attention.facts import AttentionStep, LayerView, Scores, pool_facts

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}


class _Layer(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("k", "v")),
        *((name, c_int64) for name in ("k_page_stride", "v_page_stride")),
        *((name, c_int32) for name in ("page_tokens", "kv_heads", "k_dim", "v_dim", "type")),
        *((name, c_int32) for name in ("window_tokens", "chunk_tokens")),
    )


class _Step(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("query_starts", "starts", "pages", "page_starts", "first_page")),
        *((name, c_void_p) for name in ("write_rows", "write_pages", "write_slots")),
        *((name, c_int32) for name in ("segments", "tokens", "writes")),
    )


class _Call(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("query", "key", "value", "sinks", "output")),
        *((name, c_int64) for name in ("query_row", "query_head", "key_row", "key_head", "value_row", "value_head")),
        *((name, c_double) for name in ("scaling", "softcap")),
        *((name, c_int32) for name in ("heads", "query_type", "new_type", "sinks_type", "threads")),
    )


class CpuAttention:
    """Walks the pages where they lie; nothing is gathered. Belongs to one `ArenaAttention`."""

    name = "cpu"

    def __init__(self) -> None:
        """Load the kernel, building it if need be. Raises BuildError where that cannot be done."""
        self._attend = _library().halocline_attend
        self._layers: dict[int, tuple[LayerView, _Layer]] = {}
        self._step: AttentionStep | None = None
        self._steps: dict[int, _Step] = {}

    def attend(
        self,
        query: Tensor,
        new: tuple[Tensor, Tensor] | None,
        layer: LayerView,
        step: AttentionStep,
        scores: Scores,
    ) -> Tensor:
        """Write `new` K and V into their pages, if any, and attend; see `AttentionBackend.attend`."""
        tokens, heads, _ = query.shape
        output = torch.empty((tokens, heads, layer.v.shape[3]), dtype=query.dtype)
        query, key, value, sinks = (_rows(x) for x in (query, *(new or (None, None)), scores.sinks))
        call = _Call(
            query=_pointer(query),
            key=_pointer(key),
            value=_pointer(value),
            sinks=_pointer(sinks),
            output=output.data_ptr(),
            scaling=scores.scaling,
            softcap=scores.softcap or 0.0,
            heads=heads,
            query_type=TYPES[output.dtype],
            threads=torch.get_num_threads(),
        )
        call.query_row, call.query_head, _ = query.stride()
        if key is not None and value is not None:
            assert key.dtype == value.dtype, f"the new keys are {key.dtype}, but the values {value.dtype}"
            call.key_row, call.key_head, _ = key.stride()
            call.value_row, call.value_head, _ = value.stride()
            call.new_type = TYPES[key.dtype]
        if sinks is not None:
            call.sinks_type = TYPES[sinks.dtype]
        failed = self._attend(
            ctypes.byref(self._layer_args(layer)), ctypes.byref(self._step_args(step, layer)), ctypes.byref(call)
        )
        assert not failed, f"the kernel knows no K and V of {layer.k.dtype}"
        return output

    def _layer_args(self, layer: LayerView) -> _Layer:
        known = self._layers.get(id(layer))
        if known is None:
            known = self._layers[id(layer)] = layer, _layer_args(layer)
        return known[1]

    def _step_args(self, step: AttentionStep, layer: LayerView) -> _Step:
        if step is not self._step:
            self._step = step
            self._steps = {}
        args = self._steps.get(layer.pool)
        if args is None:
            args = self._steps[layer.pool] = _step_args(step, layer)
        return args


@cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(library_path()))
    except OSError as error:
        raise BuildError(f"the compiled kernel cannot be loaded: {error}") from error
    library.halocline_attend.argtypes = (c_void_p, c_void_p, c_void_p)
    library.halocline_attend.restype = ctypes.c_int
    return library


def _layer_args(layer: LayerView) -> _Layer:
    assert layer.k.is_cpu, f"the cpu backend cannot reach an arena on {layer.k.device}"
    retention = layer.retention
    return _Layer(
        k=layer.k.data_ptr(),
        v=layer.v.data_ptr(),
        k_page_stride=layer.k.stride(0),
        v_page_stride=layer.v.stride(0),
        page_tokens=layer.page_tokens,
        kv_heads=layer.k.shape[2],
        k_dim=layer.k.shape[3],
        v_dim=layer.v.shape[3],
        type=TYPES[layer.k.dtype],
        window_tokens=retention.window_tokens if isinstance(retention, Sliding) else 0,
        chunk_tokens=retention.chunk_tokens if isinstance(retention, Chunked) else 0,
    )


def _step_args(step: AttentionStep, layer: LayerView) -> _Step:
    facts = pool_facts(step, layer)
    return _Step(
        query_starts=step.query_starts.data_ptr(),
        starts=step.starts.data_ptr(),
        pages=facts.pages.data_ptr(),
        page_starts=facts.page_starts.data_ptr(),
        first_page=facts.first_page.data_ptr(),
        write_rows=_pointer(facts.write_rows),
        write_pages=facts.write_pages.data_ptr(),
        write_slots=facts.write_slots.data_ptr(),
        segments=step.segments,
        tokens=step.tokens,
        writes=facts.write_pages.numel(),
    )


def _rows(tensor: Tensor | None) -> Tensor | None:
    """Return `tensor` with unit stride along its last dimension, as the kernel reads it."""
    return tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous()


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
