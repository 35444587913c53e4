"""How much memory of a device is left for the arena: measured with the weights in place, by one step's forward."""

from __future__ import annotations

import torch

from halocline.memory.sizing import auto_device_kv_bytes
from halocline.model.loading import LoadedModel

SAMPLING_COPIES = 3
"""Sampling sorts the logits and works on float32 copies of them, beside the logits themselves."""


@torch.inference_mode()
def device_kv_bytes(loaded: LoadedModel, step_tokens: int, sampled_rows: int) -> int:
    """Return the arena's bytes on a CUDA device: what is free less the peak of a step of `step_tokens` tokens.

    `sampled_rows` is the most rows of logits in one step. Raises ConfigError when nothing is left.
    """
    device = loaded.device
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    ids = torch.zeros(1, step_tokens, dtype=torch.long, device=device)
    positions = torch.arange(step_tokens, device=device)[None]
    loaded.model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=min(sampled_rows, step_tokens))
    torch.cuda.synchronize(device)
    activations = torch.cuda.max_memory_allocated(device) - before
    logits = 4 * sampled_rows * loaded.vocab_size * SAMPLING_COPIES
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return auto_device_kv_bytes(free + before, before, activations + logits)
