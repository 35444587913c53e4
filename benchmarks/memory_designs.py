"""What the designs that were not chosen cost, measured on the lengths of two public traces.

    python benchmarks/memory_designs.py [--requests 300] [--part all|stacks|pages|grants|rings|policies] [--json FILE]

stacks    the pages that the shipped scheduler took and gave back, replayed into two stacks that grow towards each other
          and, with a third kind, a float between them: bytes moved, and how often nothing fits without compaction
pages     every kind padded to one page size, beside slabs: padding and concurrency
grants    each request granted its prefill peak, while its prompt is computed or for life, beside resident grants
rings     windows in a ring per request, or in rings for all request slots, beside windows taken on demand
policies  concurrency of every policy on two shapes
wrong     what policies do that some engine had: the same queues, in smaller arenas

Lengths come from `mooncake_conversation.jsonl` and `azure2023_conv.csv` in the folder $HALOCLINE_DATA; where they are
absent, from a generator with their means (the JSON line says which). Every run is a saturated queue: somebody always
waits. Nothing is random besides these lengths, so all figures repeat exactly. With far fewer than 300 requests the
queue ends before these arenas are full, and nothing is measured. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean

from two_stacks import History, Json, percent, recording, replay

from halocline.memory.demand import resident
from halocline.memory.layout import LayerKV
from halocline.memory.retention import Full, Sliding
from halocline.units import GIB, MIB

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # the policies exist in tests only

from testing import wrong
from testing.layouts import GEMMA_3_27B, MIMO_V2_FLASH_LIKE, QWEN3_NEXT_80B, layers_of
from testing.policies import (
    EQUAL,
    FULL,
    KEEPING,
    RINGS_PER_REQUEST,
    SELFISH,
    SHARED,
    KeepingArena,
    Policy,
    by_slabs,
    equal_groups,
    padding_share,
    peak_grants,
    ring_pages,
    rings,
    static,
)
from testing.saturated import Lengths, Outcome, Queue, saturate, trace_lengths

DRAFT = tuple(LayerKV(layer, Sliding(2048), 8, 128, 128, model="draft") for layer in range(5))
GEMMA_AND_DRAFT = (*GEMMA_3_27B, *DRAFT)
SHAPES: dict[str, tuple[tuple[LayerKV, ...], int]] = {
    "gemma-3-27b": (GEMMA_3_27B, 64 * GIB),
    "20 + 30 layers": (layers_of((20, Full()), (30, Sliding(1024)), heads=8, dim=128), 24 * GIB),
    "qwen3-next-80b": (QWEN3_NEXT_80B, 16 * GIB),
    "9 + 39 and a draft of 5": ((*MIMO_V2_FLASH_LIKE, *DRAFT), 10 * GIB),
    "gemma-3-27b and a draft of 5": (GEMMA_AND_DRAFT, 64 * GIB),
}
"""Layers and the bytes of an arena that holds some dozens of requests."""


# ---- stacks


def part_stacks(requests: int) -> Json:
    """Replay the same histories into stacks: steady and changing traffic, two and three kinds, pages kept or not."""
    long, short = lengths("mooncake", requests), lengths("azure", requests)
    third = requests // 3
    traffics = {
        "mooncake": long,
        "azure": short,
        "azure, mooncake, azure": short[:third] + long[:third] + short[third : 2 * third],
    }
    found: Json = {}
    print(f"{'stacks: kinds, traffic':<44}{'written':>9}{'moved: slabs':>14}{'stacks':>9}{'no room':>9}{'late':>8}")
    for name in ("gemma-3-27b", "gemma-3-27b and a draft of 5"):
        layers, budget_bytes = SHAPES[name]
        for traffic, queue in traffics.items():
            for kept, base in (("", SHARED.arena), (", all kept", KeepingArena)):
                books: list[History] = []
                policy = Policy("recorded", by_slabs, arena=recording(base, books))
                outcome = saturate(policy, layers, budget_bytes, queue)
                assert outcome.finished == len(queue), f"{outcome} of {len(queue)}"
                row = replay(books[0])
                kinds = len(books[0].page_bytes)
                found[f"{kinds} kinds, {traffic}{kept}"] = row
                print(
                    f"{f'{kinds} kinds, {traffic}{kept}':<44}{row['written_gib']:>5} GiB"
                    f"{row['slabs_moved_percent']:>12} %{row['stacks_moved_percent']:>7} %"
                    f"{row['stacks_commits_without_room_percent']:>7} %{row['stacks_requests_delayed_percent']:>6} %",
                    flush=True,
                )
    return found


# ---- equal pages


def part_pages(requests: int) -> Json:
    """Padding and concurrency of equal pages beside slabs."""
    found: Json = {}
    print(f"{'pages: shape':<30}{'traffic':<10}{'empty layers':>13}{'padding':>9}{'equal':>8}{'slabs':>8}{'fewer':>8}")
    for name, (layers, budget_bytes) in SHAPES.items():
        groups, room, _ = equal_groups(layers)
        layout = EQUAL.lay_out(layers, budget_bytes)
        empty = len(groups) * room - len(layers)
        for traffic in ("mooncake", "azure"):
            queue = lengths(traffic, requests)
            padded = mean(padding_share(layout, resident(layout, *pair)) for pair in queue)
            ours, theirs = (saturate(policy, layers, budget_bytes, queue).concurrency for policy in (SHARED, EQUAL))
            found[f"{name}, {traffic}"] = {
                "empty_layers": empty,
                "longest_page_tokens": max(pool.page_tokens for pool in layout.pools),
                "padding_percent": percent(padded, 1),
                "equal": round(theirs, 1),
                "slabs": round(ours, 1),
            }
            print(
                f"{name:<30}{traffic:<10}{empty:>13}{padded:>9.1%}{theirs:>8.1f}{ours:>8.1f}{1 - theirs / ours:>8.1%}",
                flush=True,
            )
    return found


# ---- grants


def part_grants(requests: int) -> Json:
    """Concurrency when every request is granted its prefill peak, by traffic and by the tokens of a step."""
    found: Json = {}
    print(f"{'grants: shape':<30}{'traffic, step tokens':<22}{'resident':>9}{'while prefilling':>19}{'for life':>19}")
    for name in ("gemma-3-27b", "20 + 30 layers", "gemma-3-27b and a draft of 5"):
        layers, budget_bytes = SHAPES[name]
        for traffic, step_tokens in (("mooncake", 8192), ("azure", 8192), ("mooncake", 2048)):
            queue = lengths(traffic, requests)
            policies = (SHARED, peak_grants(step_tokens), peak_grants(step_tokens, for_life=True))
            row = [
                saturate(policy, layers, budget_bytes, queue, step_tokens=step_tokens, max_running_requests=1024)
                for policy in policies
            ]
            found[f"{name}, {traffic}, steps of {step_tokens}"] = {
                label: {"concurrency": round(outcome.concurrency, 1), "steps": outcome.steps}
                for label, outcome in zip(("resident", "prefill", "life"), row, strict=True)
            }
            most = row[0].concurrency
            shares = "".join(f"{o.concurrency:>12.1f} ({o.concurrency / most - 1:+.0%})" for o in row[1:])
            print(f"{name:<30}{f'{traffic}, {step_tokens}':<22}{most:>9.1f}{shares}", flush=True)
    return found


# ---- rings


def part_rings(requests: int) -> Json:
    """Bytes held by rings and by windows on demand, and the concurrency that they leave."""
    found: Json = {}
    layers, budget_bytes = SHAPES["gemma-3-27b"]
    layout = by_slabs(layers, budget_bytes)
    window = next(index for index, pool in enumerate(layout.pools) if isinstance(pool.retention, Sliding))
    pool, ring = layout.pools[window], ring_pages(layout.pools[window])
    for traffic in ("mooncake", "azure", "at most 128 tokens"):
        queue = [(96, 32)] * requests if "128" in traffic else lengths(traffic, requests)
        ours = saturate(SHARED, layers, budget_bytes, queue)
        demand = mean(resident(layout, *pair)[window] for pair in queue)
        row: Json = {
            "ring_mib": round(ring * pool.stride_bytes / MIB, 1),
            "on_demand_mib": round(demand * pool.stride_bytes / MIB, 1),
            "held_gib": round(ours.held_pages[window] * pool.stride_bytes / GIB, 1),
            "rings_gib": round(ours.concurrency * ring * pool.stride_bytes / GIB, 1),
            "concurrency": round(ours.concurrency, 1),
            "ring_per_request": round(saturate(RINGS_PER_REQUEST, layers, budget_bytes, queue).concurrency, 1),
        }
        for slots in (32, 64, 128, 256):
            row[f"rings_x_{slots}"] = _with_slots(layers, budget_bytes, queue, slots)
        found[traffic] = row
        print(f"rings, {traffic}: {json.dumps(row)}", flush=True)
    return found


def _with_slots(layers: Sequence[LayerKV], budget_bytes: int, queue: Lengths, slots: int) -> float | str:
    from halocline.errors import ConfigError

    try:
        outcome = saturate(rings(slots), layers, budget_bytes, queue)
    except ConfigError:
        return "does not start"
    served = f", {outcome.rejected} of {len(queue)} refused" if outcome.rejected else ""
    return f"{outcome.concurrency:.1f}{served}" if served else round(outcome.concurrency, 1)


# ---- all policies


def part_policies(requests: int) -> Json:
    """Concurrency of every policy on two shapes and both traces."""
    found: Json = {}
    policies = (SHARED, static(0.8), static(0.1), static(0.8, 2.0), EQUAL, FULL)
    print(f"{'policies: shape, traffic':<28}" + "".join(f"{policy.name:>14}" for policy in policies))
    for name in ("gemma-3-27b", "qwen3-next-80b"):
        layers, budget_bytes = SHAPES[name]
        for traffic in ("mooncake", "azure"):
            queue = lengths(traffic, requests)
            row = {policy.name: _concurrency(Queue(policy, layers, budget_bytes).run(queue)) for policy in policies}
            found[f"{name}, {traffic}"] = row
            print(f"{f'{name}, {traffic}':<28}" + "".join(f"{value:>14}" for value in row.values()), flush=True)
    return found


# ---- wrong policies


def part_wrong(requests: int) -> Json:
    """Gemma 3 27B in 24 GiB under policies that are wrong on purpose; each pair of rows has the right one first."""
    long, short = lengths("mooncake", requests // 4), lengths("azure", requests // 2)
    tiny: Lengths = [(49, 17)] * requests  # one token more than whole pages
    twice = Policy("rounded twice", by_slabs, price=wrong.price_rounded_twice)
    dear = Policy("full length", by_slabs, price=wrong.price_of_a_full_length_window)
    runs: list[tuple[str, Policy, int, Lengths, Callable[[Queue], None] | None]] = [
        ("mooncake", SHARED, 24, long, None),
        ("mooncake, chunk pages from others' grants", SHARED, 24, long, wrong.takes_granted_room),
        ("mooncake, windows kept while decoding", SHARED, 24, long, wrong.keeps_windows_while_decoding),
        ("mooncake, windows priced at full length", dear, 24, long, None),
        ("49 + 17 tokens, in 2 GiB", SHARED, 2, tiny, None),
        ("49 + 17 tokens, in 2 GiB, rounded twice", twice, 2, tiny, None),
        ("azure, then mooncake, all kept", KEEPING, 24, short + long, None),
        ("azure, then mooncake, a pool evicts only itself", SELFISH, 24, short + long, None),
    ]
    found: Json = {}
    print(f"{'wrong: queue, policy':<50}  at once       of finished   failed retracted  again    stuck")
    for name, policy, gib, queue, spoil in runs:
        made = Queue(policy, GEMMA_3_27B, gib * GIB)
        if spoil is not None:
            spoil(made)
        outcome = made.run(queue)
        row: Json = {
            "concurrency": round(outcome.concurrency, 1),
            "requests": len(queue),
            "finished": outcome.finished,
            "failed": outcome.failed,
            "retractions": outcome.retractions,
            "recomputed_tokens": outcome.recomputed_tokens,
            "stuck": "yes" if outcome.stuck else "no",
        }
        found[name] = row
        print(f"{name:<50}" + "".join(f"{value!s:>9}" for value in row.values()), flush=True)
    return found


def _concurrency(outcome: Outcome) -> float:
    assert not outcome.stuck, f"{outcome}: work is left and nothing runs"
    return round(outcome.concurrency, 1)


SOURCES: dict[str, str] = {}


def lengths(trace: str, count: int) -> Lengths:
    """Return lengths of a trace and note where they came from."""
    found, SOURCES[trace] = trace_lengths(trace, count)
    return found


PARTS = {
    "policies": part_policies,
    "stacks": part_stacks,
    "pages": part_pages,
    "grants": part_grants,
    "rings": part_rings,
    "wrong": part_wrong,
}


def main() -> None:
    """Measure, print, and print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=300, help="requests of each queue")
    parser.add_argument("--part", choices=["all", *PARTS], default="all")
    parser.add_argument("--json", type=Path, help="write the JSON object to FILE, too")
    arguments = parser.parse_args()
    chosen = PARTS if arguments.part == "all" else {arguments.part: PARTS[arguments.part]}
    result: Json = {name: measure(arguments.requests) for name, measure in chosen.items()}
    result |= {"requests": arguments.requests, "lengths": SOURCES}
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
