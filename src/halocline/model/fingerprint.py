"""Which model this is: a short word that is equal for equal weights, however they were stored.

Workers of a group compare it before one reads pages of another. The weights are sampled, not read: at fixed places in
every tensor, which tells any training step from the one before it, in milliseconds for billions of parameters.
"""

from __future__ import annotations

import hashlib
import json

import torch

from halocline.model.loading import LoadedModel

SAMPLES_PER_TENSOR = 256
NOT_THE_MODEL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation_autoset")
"""Entries of a config that say where it came from, not what it computes; the type of the weights is told apart."""


def fingerprint_of(loaded: LoadedModel) -> str:
    """Return 32 hexadecimal digits that depend on the architecture, its settings and the weights."""
    digest = hashlib.blake2b(digest_size=16)
    settings = {name: value for name, value in loaded.config.to_dict().items() if name not in NOT_THE_MODEL}
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, weights in loaded.model.named_parameters():
        digest.update(f"{name} {tuple(weights.shape)} {weights.dtype}".encode())
        digest.update(_sample(weights.detach()))
    return digest.hexdigest()


def _sample(weights: torch.Tensor) -> bytes:
    """Return the values at evenly spaced places, widened without loss so that every type can be written down."""
    flat = weights.reshape(-1)
    if not len(flat):
        return b""
    places = torch.linspace(0, len(flat) - 1, SAMPLES_PER_TENSOR, dtype=torch.float64).long().to(flat.device)
    values: bytes = flat[places].double().cpu().numpy().tobytes()
    return values
