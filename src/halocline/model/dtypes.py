"""Which number type and device a model runs in when nobody says: the only place that asks the hardware."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig

from halocline.errors import ModelError
from halocline.model.layers import text_config

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def choose_device(name: str = "auto") -> torch.device:
    """Return the device called `name`; `auto` is the first CUDA device if there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ModelError(f"device is {name!r}; it must be auto, cpu, cuda or cuda:N") from None
    if device.type != "cuda":
        return device
    # torch keeps the index in a signed byte: cuda:999 has a negative one.
    index, count = device.index or 0, torch.cuda.device_count()
    if not 0 <= index < count:
        raise ModelError(f"device {name!r} is not there: {count} CUDA devices are visible; use --device cpu")
    return torch.device("cuda", index)


def choose_dtype(name: str, config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    """Return the weights' type: the one called `name`, or for `auto` the config's.

    A CPU that can only emulate that type gets float32, which is faster there and no less exact.
    """
    if name != "auto":
        return _named(name)
    own = text_config(config).dtype or config.dtype or torch.float32
    if own not in DTYPES.values():
        own = _named(own)
    if device.type == "cpu" and own.itemsize == 2 and not _cpu_computes(own):
        return torch.float32
    return own


def choose_kv_dtype(name: str, weights: torch.dtype) -> torch.dtype:
    """Return the type of K and V in the arena: the one called `name`, or for `auto` the weights'."""
    return weights if name == "auto" else _named(name)


def _named(name: object) -> torch.dtype:
    dtype = DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise ModelError(f"dtype is {name!r:.60}; it must be auto or one of {', '.join(DTYPES)}")
    return dtype


def _cpu_computes(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions for `dtype` (16 bits); where torch cannot tell, it has not."""
    features = torch.cpu.get_capabilities()
    names = ("avx512_bf16", "amx_bf16", "bf16") if dtype == torch.bfloat16 else ("avx512_fp16", "amx_fp16", "fp16")
    return any(features.get(name, False) for name in names)
