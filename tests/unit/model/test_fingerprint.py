"""A model's fingerprint is that of its weights and settings, not of its folder."""

from __future__ import annotations

import dataclasses

import torch

from halocline.model.fingerprint import fingerprint_of
from testing.models import tiny_loaded


def test_equal_models_have_equal_fingerprints_wherever_they_lie() -> None:
    one, other = tiny_loaded("gemma3"), tiny_loaded("gemma3")
    other.config._name_or_path = "/somewhere/else"
    assert fingerprint_of(one) == fingerprint_of(other)
    assert len(fingerprint_of(one)) == 32


def test_other_weights_other_settings_and_other_architectures_are_other_models() -> None:
    loaded = tiny_loaded("gemma3")
    found = {fingerprint_of(loaded), fingerprint_of(tiny_loaded("gemma2"))}
    with torch.no_grad():
        for weights in loaded.model.parameters():
            weights.add_(1e-6)
    found.add(fingerprint_of(loaded))
    config = type(loaded.config).from_dict(loaded.config.to_dict() | {"sliding_window": 8})
    found.add(fingerprint_of(dataclasses.replace(loaded, config=config)))
    assert len(found) == 4
