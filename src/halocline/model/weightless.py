"""What a model is like without its weights: counted and checked on the meta device, where tensors have no values.

A config does not say everything. `examine` builds the model that the config's own class would build, without memory,
counts its parameters, and lets it hand one short row to its attention: so the calculator refuses what the engine would
refuse at start, and says how many bytes a layer keeps only where the model agrees. A few tenths of a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from halocline.memory.layout import LayerKV
from halocline.model.probe import check_layers
from halocline.model.progress import transformers_is_silent


@dataclass(frozen=True, slots=True)
class Weightless:
    """What was found."""

    parameters: int | None
    """All parameters, shared ones once; None where the model could not be built without weights."""
    is_checked: bool
    """Whether the layers were compared with what the model hands to its attention."""


def examine(config: PreTrainedConfig, layers: Sequence[LayerKV]) -> Weightless:
    """Build the model of `config` without memory; raises ModelError when it does not keep what `layers` says."""
    try:
        with transformers_is_silent(), torch.device("meta"):
            # In bfloat16, as published: some models' experts have no kernel for anything wider.
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.bfloat16)
    except Exception:  # configurations can fail anywhere in their family's class, and then nothing is known
        return Weightless(None, is_checked=False)
    is_checked = check_layers(model.eval(), layers)
    model.tie_weights()
    return Weightless(sum(parameter.numel() for parameter in model.parameters()), is_checked)
