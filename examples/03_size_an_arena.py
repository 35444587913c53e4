"""How many requests do 256 MiB hold? Layout and prices alone: no model, no weights, no torch."""

from __future__ import annotations

from halocline.memory.layout import LayerKV, solve_layout
from halocline.memory.retention import Full, Sliding
from halocline.memory.sizing import Limits, capacity_facts
from halocline.units import MIB


def main() -> None:
    # Gemma 3 270M: every sixth layer is full; one KV head of 256 elements, bf16.
    layers = [
        LayerKV(index, Full() if index % 6 == 5 else Sliding(512), kv_heads=1, k_dim=256, v_dim=256)
        for index in range(18)
    ]
    layout = solve_layout(layers, 256 * MIB)
    limits = Limits(step_tokens=512, max_running_requests=256, model_tokens=32768)
    print("\n".join(capacity_facts(layout, None, limits).lines()))


if __name__ == "__main__":
    main()
