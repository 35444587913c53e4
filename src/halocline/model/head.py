"""A faster way through torch's bfloat16 matrix product for the output head of a decode step, on x86 CPUs.

For x (rows, in) and W (out, in) oneDNN reorders all of W in every call of `linear`; as W x^T it reorders only x:

    rows            1      2     16     64          W of 262,144 x 640, one core of Sapphire Rapids, in ms
    linear         48     52     52     87
    W x^T          46     30     30     57

The head is most of a small model's weights. Smaller matrices gain as little as the transposed result costs later.
"""

from __future__ import annotations

import platform

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

MAX_ROWS = 64
MIN_OUT_FEATURES = 16_384


class FewRowsLinear(nn.Linear):
    """`nn.Linear` that computes W x^T for up to 64 rows; the result is then a transposed view."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b; shapes (..., in) and (..., out)."""
        rows = x.numel() // self.in_features
        if not 0 < rows <= MAX_ROWS:
            return nn.functional.linear(x, self.weight, self.bias)
        flat = x.reshape(rows, self.in_features)
        # A single column would be computed as a vector, which is the slow way again.
        columns = flat.expand(2, -1).t() if rows == 1 else flat.t()
        out = torch.mm(self.weight, columns)[:, :rows]
        if self.bias is not None:
            out = out + self.bias[:, None]
        return out.t().view(*x.shape[:-1], self.out_features)


def speed_up_head(model: PreTrainedModel) -> bool:
    """Make the output head of `model` compute W x^T if that is faster there; return whether it was done."""
    head = model.get_output_embeddings()
    is_fit = (
        type(head) is nn.Linear
        and head.out_features >= MIN_OUT_FEATURES
        and head.weight.dtype == torch.bfloat16
        and head.weight.device.type == "cpu"
        and platform.machine() in {"x86_64", "AMD64"}
    )
    if is_fit:
        # Only the way of computing changes: the parameters, and who else shares them, stay as they are.
        head.__class__ = FewRowsLinear
    return is_fit
