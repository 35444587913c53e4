"""What a retracted request costs when it comes back: its pages from the host arena, against computing them again.

    python benchmarks/disagg_retraction.py [--rounds 5] [--prompt-tokens 1500] [--model gemma3-270m]

Two requests outgrow what they were expected to need, in an arena that holds one of them and a half; the junior one is
retracted by memory pressure. Then the senior's client leaves, and the junior comes back. Timed is from there on:

    back        steps and seconds to its next token
    throughput  its next 16 tokens, per second, against the same 16 tokens of a request that nobody retracted

With and without a host arena by turns, same model, same arena, same prompts; medians. The tokens must be the same in
all of them, and those of the host arena must come without computing one token twice. The last line is one JSON object:

    retraction_vs_recompute   tokens per second after the return, host arena against recomputing
    host_vs_undisturbed       the same with the host arena against a request that was never retracted
    back_steps, recompute_steps   steps from the return to the next token
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from statistics import median

import torch

from halocline.memory.arena import Arena
from halocline.memory.demand import resident
from halocline.memory.host import HostArena
from halocline.memory.layout import ArenaLayout, solve_layout
from halocline.model.host_costs import measure_costs
from halocline.model.layers import kv_layers
from halocline.model.loading import LoadedModel, load
from halocline.model.runner import TorchBackend
from halocline.model.sources import resolve
from halocline.params import SamplingParams
from halocline.schedule.events import Abort, Arrive, NewToken
from halocline.schedule.rules import Rules
from halocline.schedule.scheduler import Scheduler
from halocline.units import MIB, ceil_div, format_bytes

OUTPUT_TOKENS = 256
TIMED_TOKENS = 16
STEP_TOKENS = 512
JUNIOR = "junior"


@dataclass(frozen=True)
class Return:
    """One return, timed from the moment when room came free."""

    steps: int
    first_seconds: float
    all_seconds: float
    tokens: tuple[int, ...]
    recomputed_tokens: int


class Bench:
    """One model on one arena; each run gets a scheduler of its own."""

    def __init__(self, loaded: LoadedModel, prompt_tokens: int) -> None:
        self.loaded = loaded
        self.prompt_tokens = prompt_tokens
        self.layout = self._lay_out()
        self.host_bytes = self.layout.arena_bytes
        self.costs = measure_costs(loaded, STEP_TOKENS)
        self.backend = TorchBackend(loaded, self.layout, host_bytes=self.host_bytes)

    def _lay_out(self) -> ArenaLayout:
        """Return an arena in which both prompts start, and not both outputs end."""
        layers = kv_layers(self.loaded.config, self.loaded.dtype.itemsize)
        layout = solve_layout(layers, 64 * MIB, 16)
        start, whole = (self._slabs(layout, output) for output in (TIMED_TOKENS, OUTPUT_TOKENS))
        slabs = (start + whole) // 2
        return replace(layout, slabs=slabs, budget_bytes=slabs * layout.slab_bytes)

    def _slabs(self, layout: ArenaLayout, output_tokens: int) -> int:
        pages = resident(layout, self.prompt_tokens, output_tokens)
        return 1 + sum(ceil_div(2 * n, pool.pages_per_slab) for n, pool in zip(pages, layout.pools, strict=True))

    def scheduler(self, *, with_host: bool) -> Scheduler:
        """Return a scheduler that expects outputs of a token or two: it has seen many end so early."""
        rules = Rules(
            step_tokens=STEP_TOKENS,
            max_running_requests=8,
            max_model_len=self.prompt_tokens + OUTPUT_TOKENS,
            vocab_size=self.loaded.vocab_size,
            prefix_cache=False,
            host_costs=self.costs,
        )
        host = HostArena(self.layout, self.host_bytes) if with_host else None
        scheduler = Scheduler(Arena(self.layout), rules, host)
        for number in range(40):
            early = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS)
            scheduler.handle(Arrive(f"short{number}", (2,), early, 0))
            self.step(scheduler)
            scheduler.handle(Abort(f"short{number}", "stop"))
        return scheduler

    def step(self, scheduler: Scheduler) -> list[NewToken]:
        """Compute one step; return its tokens."""
        plan = scheduler.plan(0.0)
        assert plan is not None, f"nothing to compute: {scheduler.reasons()}"
        return [u for u in scheduler.apply(self.backend.run(plan)) if isinstance(u, NewToken)]

    def arrive(self, scheduler: Scheduler, name: str, salt: int) -> None:
        """Send a long prompt."""
        prompt = tuple(5 + (i * 7919 + salt * 104_729) % 20_000 for i in range(self.prompt_tokens))
        params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=False, min_tokens=OUTPUT_TOKENS)
        scheduler.handle(Arrive(name, prompt, params, 0))

    def run(self, *, with_host: bool, is_retracted: bool = True) -> Return:
        """Let the junior be retracted, or only wait so long, and come back."""
        scheduler = self.scheduler(with_host=with_host)
        self.arrive(scheduler, "senior", 1)
        self.arrive(scheduler, JUNIOR, 2)
        before: list[int] = []
        while not scheduler.totals.retractions:
            before += [t.token_id for t in self.step(scheduler) if t.request_id == JUNIOR and t.token_id is not None]
            if not is_retracted and len(before) > 1:
                break
        scheduler.handle(Abort("senior"))
        tokens: list[int] = []
        began = time.perf_counter()
        steps, first = 0, 0.0
        while len(tokens) < TIMED_TOKENS:
            tokens += [t.token_id for t in self.step(scheduler) if t.request_id == JUNIOR and t.token_id is not None]
            steps += not first
            first = first or (time.perf_counter() - began if tokens else 0.0)
        taken = time.perf_counter() - began
        return Return(steps, first, taken, (*before, *tokens), scheduler.totals.recomputed_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--model", default="gemma3-270m")
    parser.add_argument("--threads", type=int, default=None)
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    bench = Bench(load(resolve(given.model, quiet=True), "bfloat16", device), given.prompt_tokens)
    costs, layout = bench.costs, bench.layout
    print(
        f"arena {format_bytes(layout.arena_bytes)}, host arena {format_bytes(bench.host_bytes)} on {device}; measured:"
    )
    print(
        f"  copies {costs.copy_bytes_per_second / 1e9:.2f} GB/s, prefill {costs.compute_tokens_per_second:.0f} tokens/s"
    )
    print(json.dumps(measure(bench, given.rounds)))


def measure(bench: Bench, rounds: int) -> dict[str, float]:
    """Take turns; return medians and their ratios."""
    sides = {
        "host": lambda: bench.run(with_host=True),
        "recompute": lambda: bench.run(with_host=False),
        "undisturbed": lambda: bench.run(with_host=True, is_retracted=False),
    }
    seen: dict[str, list[Return]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, run in sides.items():
            one = run()
            seen[name].append(one)
            print(
                f"round {number + 1}: {name:12} back after {one.steps} steps, {one.first_seconds * 1e3:8.1f} ms; "
                f"{TIMED_TOKENS} tokens in {one.all_seconds * 1e3:8.1f} ms; {one.recomputed_tokens} computed twice",
                flush=True,
            )
    texts = [one.tokens for side in seen.values() for one in side]
    shortest = min(map(len, texts))
    assert len({text[:shortest] for text in texts}) == 1, "the tokens depend on where the pages come from"
    assert all(one.recomputed_tokens == 0 for one in seen["host"]), "the host arena was meant to save all computing"
    assert all(one.recomputed_tokens > 0 for one in seen["recompute"])
    rate = {name: TIMED_TOKENS / median(one.all_seconds for one in side) for name, side in seen.items()}
    for name, side in seen.items():
        first = median(one.first_seconds for one in side)
        print(f"{name:12} median {rate[name]:8.1f} tokens/s after the return, next token after {first * 1e3:8.1f} ms")
    return {
        "retraction_vs_recompute": round(rate["host"] / rate["recompute"], 3),
        "host_vs_undisturbed": round(rate["host"] / rate["undisturbed"], 3),
        "back_steps": max(one.steps for one in seen["host"]),
        "recompute_steps": max(one.steps for one in seen["recompute"]),
        "back_ms": round(median(one.first_seconds for one in seen["host"]) * 1e3, 1),
        "recompute_ms": round(median(one.first_seconds for one in seen["recompute"]) * 1e3, 1),
    }


if __name__ == "__main__":
    main()
