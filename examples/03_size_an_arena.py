"""How many requests do 256 MiB hold? The solver and the prices alone: no model, no weights, no torch."""

from __future__ import annotations

from halocline.memory.layout import LayerKV
from halocline.memory.retention import Full, Sliding, describe
from halocline.units import MIB, format_bytes


def main() -> None:
    # Gemma 3 270M: every sixth layer is full; one KV head of 256 elements, bf16.
    layers = [
        LayerKV(index, Full() if index % 6 == 5 else Sliding(512), kv_heads=1, k_dim=256, v_dim=256)
        for index in range(18)
    ]
    print({describe(layer.retention) for layer in layers}, format_bytes(256 * MIB))


if __name__ == "__main__":
    main()
