"""One row of the matrix of features: its settings, its requests, and what must have happened when it has run.

A row is run by real workers (`testing.group`) on a tiny model with random weights. Its arena is the smallest in which
what it asks for fits, found by asking the program itself, so that nothing in the matrix is sized by hand.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from transformers import PreTrainedConfig

from halocline.compose import Memory, lay_out
from halocline.config import Config
from halocline.errors import ConfigError
from halocline.memory.arena import Arena
from halocline.memory.demand import Demand, floor_demand, resident, zero
from halocline.memory.retention import describe
from halocline.model.layers import kv_layers
from halocline.params import SamplingParams
from testing.group import Asked, Worker, group, leftovers, together
from testing.models import FAMILIES, VOCAB, save_tiny, tiny_config, tiny_model, tiny_prompt
from testing.serving import LONGEST, PAGES, SPOKEN, Expected, differences, generate
from testing.serving import SIZES as SERVED_SIZES
from testing.serving import prompts as served_prompts

SIZES = (*SERVED_SIZES, (2, 15), (3, 12), (4, 13))
"""(prompt tokens, new tokens): those of the matrix without links, and short ones, whose windows grow while they decode:
where all layers have windows, nothing else would grow, and nobody be retracted."""
SAID = (*SPOKEN, 4, 0, 1)
"""When it is asked for again, how many tokens of its answer each request brings along in its prompt."""
AGAIN = (6, 5, 4, 3, 2, 1, 0, 9, 8, 7)
"""The order in which they come again: first what a small cache still has; the last ones are too short to be cached."""
FLOOD = ((45, 1), (41, 1), (50, 1), (48, 1), (54, 1))
"""Requests of others that come in between where a host arena is to be used: what was cached must make room for them."""
LINKS = ("none", "shm", "tcp", "shm, other pages", "tcp, other pages")
"""How prompts come from the worker that computes them; none: there is one worker only."""
OTHER_PAGES = {
    "1": "4",
    "4": "2 full, 16 local",
    "16": "4",
    "16 full, 4 local": "1",
    "2 full, 16 local": "16 full, 4 local",
}
"""The lengths of pages of the other worker, where they are to differ from those of this one: in every pool."""
HOSTS = {"none": 0, "ample": 8}
"""How many times the bytes of the arena the host arena has."""
SLOTS = {"forced": 6, "none": 2}
ANSWERS = "answers"
PROMPTS = "prompts"
"""The two workers by what they are for."""
MIXED_AT = {**dict.fromkeys((0, 1, 4, 7, 8, 9), PROMPTS), 2: ""}
"""With mixed chunks: who has its prompt computed elsewhere, and who (request 2) is the other worker's own. The rest is
computed and answered at the worker for answers."""
STEP_GROWTH = 1.05
MOST_BYTES = 1 << 26


@dataclass(frozen=True)
class Row:
    """One combination of features."""

    family: str = "gemma3"
    pages: str = "4"
    link: str = "shm"
    cache: str = "on"
    host: str = "none"
    chunks: str = "mixed"
    """`mixed`: steps hold decodes and pieces of prompts. `whole`: steps are long enough for all prompts at once, and
    where there are two workers one computes prompts only and one answers only."""
    retraction: str = "none"
    """`forced`: six requests at once in an arena that holds the longest and a short one. `none`: two at once in one
    that holds the two longest, so that nobody ever has to leave."""
    policy: str = "shared"
    admission: str = "expected"
    attention: str = "cpu"

    def __str__(self) -> str:
        return "-".join(map(str, vars(self).values())).replace(" ", "_")

    @property
    def link_kind(self) -> str:
        """`shm`, `tcp`, or `none`."""
        return self.link.split(",")[0]

    @property
    def is_retracting(self) -> bool:
        """Whether somebody must be retracted: who was granted everything never is."""
        return self.retraction == "forced" and self.admission == "expected"


@dataclass(frozen=True)
class Outcome:
    """What came of a row."""

    wrong: tuple[str, ...]
    """Tokens that differ from those of `generate`."""
    missing: tuple[str, ...]
    """What should have happened and did not, or the other way round."""


def prompts() -> list[list[int]]:
    """Return the prompts of all requests."""
    served = served_prompts()
    return served + [tiny_prompt(tokens, seed=index) for index, (tokens, _) in enumerate(SIZES) if index >= len(served)]


@cache
def expected(family: str) -> tuple[Expected, ...]:
    """transformers' greedy continuation of every prompt; computed once per session."""
    model = tiny_model(family)
    model.generation_config.eos_token_id = None
    return tuple(generate(model, prompt, new) for prompt, (_, new) in zip(prompts(), SIZES, strict=True))


# ---- settings


@cache
def _folder(family: str) -> tuple[Path, tempfile.TemporaryDirectory[str]]:
    # The second value keeps the folder until the process ends.
    folder = tempfile.TemporaryDirectory(prefix="halocline-model-")
    return save_tiny(Path(folder.name), family, eos_token_id=None), folder


@cache
def configs(row: Row) -> dict[str, Config]:
    """Return the settings of each worker, as an operator would write them."""
    if row.link == "none":
        return {ANSWERS: settings(row, row.pages)}
    whole = row.chunks == "whole"
    other = OTHER_PAGES[row.pages] if row.link.endswith("other pages") else row.pages
    made = {
        ANSWERS: replace(settings(row, row.pages), role="decode" if whole else "both"),
        PROMPTS: replace(settings(row, other), role="prefill" if whole else "both"),
    }
    layouts = [lay_out(config, tiny_config(row.family), int(config.kv_bytes)).layout for config in made.values()]
    # Room for one page only that waits to be cut, of whichever worker.
    staging_bytes = max(pool.page_bytes for layout in layouts for pool in layout.pools)
    return {name: replace(config, staging_bytes=staging_bytes) for name, config in made.items()}


def settings(row: Row, pages: str) -> Config:
    """Return the settings of a worker that works alone, in the smallest arena that will do."""
    model = tiny_config(row.family)
    dtype = FAMILIES[row.family].dtype
    names = {describe(layer.retention) for layer in kv_layers(model, dtype.itemsize)}
    lengths = PAGES[pages]
    if not isinstance(lengths, int):
        lengths = ",".join(f"{name}={tokens}" for name, tokens in lengths.items() if name in names)
    return sized(
        row,
        Config(
            model=str(_folder(row.family)[0]),
            dtype=str(dtype).removeprefix("torch."),
            device="cpu",
            threads=1,
            page_tokens=lengths,
            kv_bytes=1 << 12,
            step_tokens=250 if row.chunks == "whole" else SLOTS[row.retraction] + 16,
            max_running_requests=SLOTS[row.retraction],
            max_model_len=LONGEST,
            admission="expected:0.9" if row.admission == "expected" else "guaranteed",
            policy="shared" if row.policy == "shared" else "static:0.8",
            prefix_cache=row.cache,
            attention=row.attention,
            audit="every",
            log_level="error",
            link_kind="shm" if row.link == "none" else row.link_kind,
            lease_seconds=30.0,
            decode_reserve_tokens=0,
        ),
        model,
    )


def sized(row: Row, config: Config, model: PreTrainedConfig) -> Config:
    """Return the settings with the smallest arena that will do; raise the last refusal where none does."""
    # What one request of that length reads at its end is less than anything that could do.
    layers = kv_layers(model, FAMILIES[row.family].dtype.itemsize)
    budget_bytes = sum((LONGEST - layer.retention.first_needed(LONGEST - 1)) * layer.token_bytes for layer in layers)
    refusal: ConfigError | None = None
    while budget_bytes <= MOST_BYTES:
        try:
            memory = lay_out(config, model, budget_bytes)
        except ConfigError as error:
            refusal = error
        else:
            if _suffices(row, memory):
                return replace(config, kv_bytes=budget_bytes, host_bytes=HOSTS[row.host] * budget_bytes)
        budget_bytes = int(budget_bytes * STEP_GROWTH)
    raise refusal or AssertionError(f"no arena suffices for {row}")


def _suffices(row: Row, memory: Memory) -> bool:
    """Whether the two longest fit at once; or, where retractions are wanted, the longest and a short one."""
    layout = memory.layout
    longest = resident(layout, 1, LONGEST - 1)
    beside = longest if row.retraction == "none" else resident(layout, *SIZES[0])
    return Arena(layout, memory.caps).fits_empty(longest.plus(beside).plus(floor_demand(layout, row.cache == "on")))


def everybody_fits(row: Row, config: Config) -> bool:
    """Whether all requests would fit at once: then nothing could force a retraction."""
    memory = lay_out(config, tiny_config(row.family), int(config.kv_bytes))
    total = zero(len(memory.layout.pools))
    for prompt, new in SIZES[: SLOTS[row.retraction]]:
        total = total.plus(Demand(resident(memory.layout, prompt, new)))
    return Arena(memory.layout, memory.caps).fits_empty(total)


# ---- the run


@contextmanager
def running(row: Row) -> Iterator[dict[str, Worker]]:
    """Start the workers of a row."""
    with group(configs(row)) as workers:
        yield workers


def run(row: Row) -> Outcome:
    """Ask for all continuations, with a prefix cache twice, and compare tokens and figures with what they must be."""
    with running(row) as workers:
        answers = workers[ANSWERS]
        if row.is_retracting:
            _teach_short_outputs(workers)
        retracted = answers.scheduler.figures().totals.retractions
        rounds = [_round(row, workers, "first", (0,) * len(SIZES))]
        if row.cache == "on":
            if row.host == "ample":
                _flood(row, workers)
            rounds.append(_round(row, workers, "again", SAID))
        wrong = [told for tokens in rounds for told in differences(expected(row.family), tokens)]
        missing = _missing(row, workers, retracted, len(rounds))
        missing += [f"{name} keeps {what}" for name, worker in workers.items() for what in leftovers(worker)]
    return Outcome(tuple(wrong), tuple(missing))


def _round(row: Row, workers: Mapping[str, Worker], name: str, spoken: tuple[int, ...]) -> list[list[int]]:
    """Continue all prompts at once, a part of each answer already in them; return the whole answers."""
    asked, said = [], []
    for number, (prompt, (_, new)) in enumerate(zip(prompts(), SIZES, strict=True)):
        known = list(expected(row.family)[number].tokens[: spoken[number]])
        at, prefill_at = _places(row, number)
        said.append(known)
        asked.append(Asked(f"{name}{number}", prompt + known, new - len(known), at, prefill_at))
    tokens = together(workers, [asked[number] for number in AGAIN] if any(spoken) else asked)
    return [known + tokens[each.name] for known, each in zip(said, asked, strict=True)]


def _places(row: Row, number: int) -> tuple[str, str]:
    if row.link == "none":
        return ANSWERS, ""
    if row.chunks == "whole":
        return ANSWERS, PROMPTS
    prefill_at = MIXED_AT.get(number)
    return (PROMPTS, "") if prefill_at == "" else (ANSWERS, prefill_at or "")


def _flood(row: Row, workers: Mapping[str, Worker]) -> None:
    """Let other prompts through every worker, which nobody has seen."""
    prefill_at = "" if row.link == "none" else PROMPTS
    asked = [
        Asked(f"flood{number}", tiny_prompt(length, seed=100 + number), new, ANSWERS, prefill_at)
        for number, (length, new) in enumerate(FLOOD)
    ]
    together(workers, asked)


def _teach_short_outputs(workers: Mapping[str, Worker]) -> None:
    """Finish enough requests at their first token, so that `expected` grants too little afterwards."""
    ends_at_once = SamplingParams(temperature=0.0, stop_token_ids=tuple(range(VOCAB)))
    together(workers, [Asked(f"short{n}", [5], SIZES[0][1], ANSWERS, params=ends_at_once) for n in range(33)])


# ---- what must have happened


def _missing(row: Row, workers: Mapping[str, Worker], retracted: int, rounds: int) -> list[str]:
    answers, config = workers[ANSWERS], configs(row)[ANSWERS]
    # A prompt on its way that gives way to a senior counts as retracted, too: here an answer must have been.
    retracted += answers.transfers.get("attempts_lost", 0)
    claims = {
        "an answer was retracted": (answers.scheduler.figures().totals.retractions > retracted) is row.is_retracting,
        "all fit at once": row.retraction == "none" or not everybody_fits(row, config),
        "arenas are split": (lay_out_caps(row, config) is None) is (row.policy == "shared"),
    }
    if row.retraction == "forced" and row.admission == "guaranteed":
        claims["somebody waited for memory"] = answers.waits["memory"] > 0
    claims |= _cache_claims(row, workers) | _host_claims(row, workers) | _chunk_claims(row, workers)
    if row.link != "none":
        claims |= _link_claims(row, workers, rounds)
    return [f"not as it must be: {claim}" for claim, holds in claims.items() if not holds]


def lay_out_caps(row: Row, config: Config) -> tuple[int | None, ...] | None:
    """Return the caps of the arena of these settings."""
    return lay_out(config, tiny_config(row.family), int(config.kv_bytes)).caps


def _cache_claims(row: Row, workers: Mapping[str, Worker]) -> dict[str, bool]:
    caches = [worker.scheduler.figures().cache for worker in workers.values()]
    if row.cache == "off":
        return {"there is no cache": all(cache is None for cache in caches)}
    return {"prompts were found cached": sum(cache.hit_tokens for cache in caches if cache is not None) > 0}


def _host_claims(row: Row, workers: Mapping[str, Worker]) -> dict[str, bool]:
    figures = [worker.scheduler.figures() for worker in workers.values()]
    hosts = [each.host for each in figures if each.host is not None]
    if row.host == "none":
        return {"there is no host arena": not hosts}
    tiers = [each.cache.tier for each in figures if each.cache is not None and each.cache.tier is not None]
    loads = sum(host.restored for host in hosts) + sum(tier.loads for tier in tiers)
    claims = {"every worker has a host arena": len(hosts) == len(workers)}
    if row.cache == "on" or row.is_retracting:
        claims["something came back from the host"] = loads > 0
    else:
        claims["nothing went to the host"] = sum(host.offloaded for host in hosts) == 0
    if row.cache == "off" and row.is_retracting:
        claims["nothing was computed again"] = figures[0].totals.recomputed_tokens == 0
    return claims


def _chunk_claims(row: Row, workers: Mapping[str, Worker]) -> dict[str, bool]:
    backend = workers[ANSWERS].backend
    if row.chunks == "mixed":
        return {
            "prompts were cut into chunks": max(max(each.backend.chunks.values()) for each in workers.values()) > 1,
            "steps held decodes and chunks": backend.mixed_steps > 0,
        }
    if row.link != "none" and not row.is_retracting:
        return {"the worker for answers computed no prompt": backend.chunks == {}}
    return {}


def _link_claims(row: Row, workers: Mapping[str, Worker], rounds: int) -> dict[str, bool]:
    here, there = workers[ANSWERS].transfers, workers[PROMPTS].transfers
    linked = rounds * sum(_places(row, number)[1] == PROMPTS for number in range(len(SIZES)))
    linked += len(FLOOD) * (row.cache == "on" and row.host == "ample")
    lengths = [[pool.page_tokens for pool in worker.scheduler._arena.layout.pools] for worker in workers.values()]
    return {
        "every prompt travelled once": here["received"] == there["sent"] == linked,
        "no lease was lost": there["leases_lost"] == here["leases_lost"] == 0,
        "attempts were lost to seniors only": row.is_retracting or here["attempts_lost"] == 0,
        "pages travelled": here["received_page_bytes"] > 0,
        "pages arrived as they were sent": here["received_page_bytes"] == there["sent_page_bytes"],
        "pages differ in length": (lengths[0] != lengths[1]) is row.link.endswith("other pages"),
    }
