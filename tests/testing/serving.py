"""Greedy tokens from scheduler, arena and torch backend together, beside those of transformers' own `generate`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from math import ceil

import numpy as np
import torch
import transformers

from halocline.cache.node import TOMBSTONE
from halocline.memory.arena import Arena
from halocline.memory.demand import Demand
from halocline.memory.grant import NO_HANDLES, Grant, Handles, Order
from halocline.memory.host import HostArena, HostCosts
from halocline.memory.layout import ArenaLayout, LayerKV, solve_layout
from halocline.memory.retention import Full
from halocline.memory.sizing import Limits, longest_request, start_problems, static_caps
from halocline.model.layers import kv_layers
from halocline.model.loading import LoadedModel
from halocline.model.runner import TorchBackend
from halocline.params import SamplingParams
from halocline.schedule.events import Admitted, Arrive, NewToken, Update
from halocline.schedule.figures import CacheFigures, HostFigures, Totals
from halocline.schedule.rules import Rules
from halocline.schedule.scheduler import Scheduler
from halocline.step import StepPlan, StepResult
from testing.models import PAD, VOCAB, tiny_loaded, tiny_model, tiny_prompt

TIE = 1e-4
"""Two logits nearer than this may change places in float32."""
RUNNING = 6
SIZES = ((30, 12), (1, 16), (13, 13), (5, 11), (47, 10), (12, 12), (24, 9))
"""(prompt tokens, new tokens) of each request: below, at and beyond the window of 12. One class of output lengths."""
SHARED = {0: 30, 5: 12, 6: 17}
"""These requests begin as request 4 does, for so many tokens: all of the prompt, or a part that ends inside a page."""
LONG = 4
"""The request whose beginning others share."""
SPOKEN = (0, 3, 0, 5, 2, 0, 7)
"""With a hot cache, how many tokens of its answer each request brings along in its prompt."""
LONGEST = max(map(sum, SIZES))
PAGES: dict[str, int | Mapping[str, int]] = {
    "1": 1,
    "4": 4,
    "16": 16,
    "16 full, 4 local": {"full": 16, "sliding-12": 4, "chunked-12": 4},
    "2 full, 16 local": {"full": 2, "sliding-12": 16, "chunked-12": 16},
}
ARENAS = {"tight": 1, "small": 1.5, "roomy": len(SIZES)}
"""How many times the fewest slabs that the longest request can do with."""
HOSTS = {"none": 0.0, "scant": 0.25, "ample": 8.0}
"""How many times the device's slabs the host arena has."""
STEP_TOKENS = {"least": 0, "odd": 13, "wide": 250}
"""Beyond what a step needs at least: one token per running request and one granule."""


@dataclass(frozen=True)
class Setting:
    """One memory schedule under which the tokens must be the same."""

    page_tokens: str = "4"
    step: str = "odd"
    admission: str = "expected"
    policy: str = "shared"
    arena: str = "tight"
    cache: str = "others"
    """`others`: no prefix cache, but pages of somebody else's cache fill every hole, so that the arena must evict and
    move. `cold`: the prefix cache, empty at first. `hot`: all requests have been answered before, and some come with
    a part of their answer. `off`: nothing of it."""
    host: str = "none"
    """The host arena: none, less than what one request holds, or more than all of them do."""
    attention: str = "cpu"
    dtype: torch.dtype = torch.float64
    eos: tuple[int, ...] = ()


@dataclass
class Outcome:
    """What came of it, and how the memory was used."""

    rounds: list[list[list[int]]]
    """Of each round, the tokens of each request; with a hot cache there are two."""
    totals: Totals
    most_segments: int
    mixed_steps: int
    """Steps that held decodes and prefill chunks."""
    cache: CacheFigures | None
    host: HostFigures | None = None

    @property
    def tokens(self) -> list[list[int]]:
        """What the requests got at last."""
        return self.rounds[-1]


@dataclass(frozen=True)
class Expected:
    """What `generate` says, and by how much its best logit leads at each place."""

    tokens: tuple[int, ...]
    leads: tuple[float, ...]


def prompts() -> list[list[int]]:
    own = [tiny_prompt(tokens, seed=index) for index, (tokens, _) in enumerate(SIZES)]
    return [own[LONG][: SHARED.get(index, 0)] + prompt[SHARED.get(index, 0) :] for index, prompt in enumerate(own)]


@cache
def generated(family: str, dtype: torch.dtype) -> tuple[Expected, ...]:
    """transformers' greedy continuation of every prompt; computed once per session."""
    model = tiny_model(family, dtype=dtype)
    model.generation_config.eos_token_id = None
    return tuple(generate(model, prompt, new) for prompt, (_, new) in zip(prompts(), SIZES, strict=True))


def generate(model: transformers.PreTrainedModel, prompt: list[int], new: int) -> Expected:
    """Continue one prompt greedily with the model's own `generate`."""
    inputs = torch.tensor([prompt])
    settings = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=new, pad_token_id=PAD, output_logits=True, return_dict_in_generate=True
    )
    output = model.generate(inputs, attention_mask=torch.ones_like(inputs), generation_config=settings)
    best = [logits[0].double().topk(2).values for logits in output.logits]
    return Expected(tuple(output.sequences[0, len(prompt) :].tolist()), tuple(float(b[0] - b[1]) for b in best))


def differences(expected: tuple[Expected, ...], got: list[list[int]], tie: float = TIE) -> list[str]:
    """Say where tokens differ. What follows a difference at a tie is another text, and not compared."""
    found = []
    for request, (wanted, tokens) in enumerate(zip(expected, got, strict=True)):
        if len(tokens) != len(wanted.tokens):
            found.append(f"request {request} has {len(tokens)} of {len(wanted.tokens)} tokens")
        for place, (theirs, ours) in enumerate(zip(wanted.tokens, tokens, strict=False)):
            if theirs != ours:
                if wanted.leads[place] > tie:
                    found.append(f"request {request}, token {place}: {ours}, but generate says {theirs}")
                break
    return found


@cache
def loaded(family: str, dtype: torch.dtype) -> LoadedModel:
    return tiny_loaded(family, dtype=dtype)


def layout_for(layers: tuple[LayerKV, ...], setting: Setting) -> tuple[ArenaLayout, tuple[int | None, ...] | None]:
    """Return a layout and its caps: no larger than the longest request needs, or a multiple of that."""
    layout = _solved(layers, setting.page_tokens)
    fewest = _fits(layout, setting.policy, len(layout.pools))
    layout = _with_slabs(layout, _fits(layout, setting.policy, int(fewest * ARENAS[setting.arena])))
    return layout, _caps(layout, setting.policy)


@cache
def _solved(layers: tuple[LayerKV, ...], page_tokens: str) -> ArenaLayout:
    # The budget decides how long slabs may be; it is about what a handful of requests needs.
    lengths = PAGES[page_tokens]
    if not isinstance(lengths, int):
        known = {pool.name for pool in solve_layout(layers, 4 * LONGEST * _token_bytes(layers), 4).pools}
        lengths = {name: tokens for name, tokens in lengths.items() if name in known}
    return solve_layout(layers, 4 * LONGEST * _token_bytes(layers), lengths)


def _token_bytes(layers: tuple[LayerKV, ...]) -> int:
    return sum(layer.token_bytes for layer in layers)


def _caps(layout: ArenaLayout, policy: str) -> tuple[int | None, ...] | None:
    return None if policy == "shared" else static_caps(layout, 0.8)


def _with_slabs(layout: ArenaLayout, slabs: int) -> ArenaLayout:
    return replace(layout, slabs=slabs, budget_bytes=slabs * layout.slab_bytes)


def _fits(layout: ArenaLayout, policy: str, slabs: int) -> int:
    """Return the fewest slabs, from `slabs` on, that hold the longest request: a static split rounds its shares."""
    limits = Limits(step_tokens=1 << 20, max_running_requests=RUNNING, max_model_len=LONGEST)
    while True:
        sized = _with_slabs(layout, slabs)
        caps = _caps(sized, policy)
        if not start_problems(sized, caps, limits) and longest_request(sized, caps) >= LONGEST:
            return slabs
        slabs += 1


NOT_FINITE = "is not finite"
"""What the engine says where the model's output is no number."""


def serve(family: str, setting: Setting) -> Outcome:
    """Run all requests at once under `setting`, with an audit of everything after every step."""
    with engine(family, setting) as run:
        return run.run(generated(family, setting.dtype))


def told_apart(family: str, setting: Setting) -> list[str]:
    """Return by what a fault under `setting` shows: tokens that differ, or that the engine met numbers that are none.

    A fault may leave memory unwritten, and what lies there may be no number at all; the engine reports that itself.
    """
    expected = generated(family, setting.dtype)
    try:
        outcome = serve(family, setting)
    except AssertionError as error:
        if NOT_FINITE not in str(error):
            raise
        return [str(error)]
    return [each for tokens in outcome.rounds for each in differences(expected, tokens)]


@contextmanager
def engine(family: str, setting: Setting) -> Iterator[Run]:
    """Put scheduler, arena and torch backend together for one model."""
    model = loaded(family, setting.dtype)
    layout, caps = layout_for(kv_layers(model.config, setting.dtype.itemsize), setting)
    rules = Rules(
        step_tokens=RUNNING + layout.granule_tokens + STEP_TOKENS[setting.step],
        max_running_requests=RUNNING,
        max_model_len=LONGEST,
        vocab_size=VOCAB,
        eos_token_ids=setting.eos,
        admission=("expected", 0.9) if setting.admission == "expected" else ("guaranteed",),
        prefix_cache=setting.cache in ("cold", "hot"),
        host_costs=HostCosts(1e12, 1.0),  # every copy is worth it
    )
    host_bytes = ceil(HOSTS[setting.host] * layout.slabs) * layout.slab_bytes
    backend = TorchBackend(model, layout, attention=setting.attention, host_bytes=host_bytes)
    try:
        arena = Arena(layout, caps)
        scheduler = Scheduler(arena, rules, HostArena(layout, host_bytes) if host_bytes else None)
        yield Run(setting, arena, scheduler, backend)
    finally:
        backend.close()


class Filler:
    """Fills free pages with cached ones, a few per step, as a prefix cache does; the arena evicts them at need."""

    def __init__(self, arena: Arena, backend: TorchBackend) -> None:
        self.arena, self.backend = arena, backend
        self.random = np.random.default_rng(0)

    def fill(self) -> None:
        for _ in range(4):
            pages = [0] * len(self.arena.layout.pools)
            pool = int(self.random.integers(len(pages)))
            pages[pool] = int(self.random.integers(1, 4))
            demand = Demand(pages)
            if self.arena.fits_untouched(demand):
                grant = self.arena.reserve("others", demand)
                assert isinstance(grant, Grant), "what fits untouched fits"
                commit = self.arena.commit([Order(grant, demand)])
                self.backend._mover.move(commit.moves)
                self.arena.cache(grant, pool, commit.handles[0][pool])
                self.arena.release(grant)


class Run:
    """Requests on one scheduler and backend, with an audit of everything after every step."""

    def __init__(self, setting: Setting, arena: Arena, scheduler: Scheduler, backend: TorchBackend) -> None:
        self.setting, self.arena, self.scheduler, self.backend = setting, arena, scheduler, backend
        self.filler = Filler(arena, backend) if setting.cache == "others" else None
        self.tokens: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        """Tokens of each prompt that needed no computing."""
        self.most_segments = self.mixed_steps = 0

    def run(self, expected: Sequence[Expected]) -> Outcome:
        """Serve all requests at once; with a hot cache a second time, a part of the answer in the prompt."""
        if self.setting.admission == "expected":
            self._teach_short_outputs()
        before = self.scheduler.figures().totals
        rounds = [self.together("r", prompts(), [new for _, new in SIZES])]
        if self.setting.cache == "hot":
            spoken = [list(one.tokens[:count]) for one, count in zip(expected, SPOKEN, strict=True)]
            longer = [prompt + said for prompt, said in zip(prompts(), spoken, strict=True)]
            rest = [new - len(said) for (_, new), said in zip(SIZES, spoken, strict=True)]
            again = self.together("again", longer, rest)
            rounds.append([said + tokens for said, tokens in zip(spoken, again, strict=True)])
        figures = self.scheduler.figures()
        figures.totals.retractions -= before.retractions
        figures.totals.moves -= before.moves
        return Outcome(rounds, figures.totals, self.most_segments, self.mixed_steps, figures.cache, figures.host)

    def together(self, name: str, given: Sequence[list[int]], new: Sequence[int]) -> list[list[int]]:
        """Continue prompts all at once, greedily, and return their tokens."""
        for index, (prompt, tokens) in enumerate(zip(given, new, strict=True)):
            self._arrive(f"{name}{index}", prompt, SamplingParams(temperature=0.0, max_tokens=tokens))
        self._until_done()
        return [self.tokens[f"{name}{index}"] for index in range(len(given))]

    def drop_windows(self, first_page: int = 0) -> int:
        """Evict the cached pages of all windows, from the given page of a prefix on; return how many there were."""
        tree = self.scheduler._sharing.tree
        died: list[Handles] = []
        for number, pool in enumerate(self.arena.layout.pools):
            pages = [NO_HANDLES]
            if not isinstance(pool.retention, Full):
                for node in tree.forest.nodes.values():
                    begin = node.start * tree.shape.pages_per_granule[number]
                    held = node.pages[number][max(0, first_page - begin) :]
                    pages.append(held[held != TOMBSTONE])
            died.append(np.concatenate(pages))
            self.arena.evict(number, died[-1])
        self.scheduler._sharing.forget(died, ())
        assert self.scheduler.audit() == [], self.scheduler.audit()
        return sum(map(len, died))

    def spoil_what_nobody_has(self) -> None:
        """Write NaN over every byte that is in no cached page: what a page held before must not help."""
        kept = []
        for number, pages in enumerate(self.backend._mover._pages):
            held = [node.pages[number] for node in self.scheduler._sharing.tree.forest.nodes.values()]
            handles = np.concatenate([NO_HANDLES, *(each[each != TOMBSTONE] for each in held)])
            places = torch.from_numpy(self.arena.physical(number, handles).astype(np.int64))
            kept.append((pages, places, pages[places]))
        for pages, _, _ in kept:
            pages.fill_(0xFF)
        for pages, places, contents in kept:
            pages[places] = contents

    def _teach_short_outputs(self) -> None:
        """Finish enough requests of the same class at their first token, so that `expected` grants too little."""
        any_token = tuple(range(VOCAB))
        for index in range(33):
            params = SamplingParams(temperature=0.0, max_tokens=SIZES[0][1], stop_token_ids=any_token)
            self._arrive(f"short{index}", [5], params)
        self._until_done()

    def _arrive(self, name: str, prompt: list[int], params: SamplingParams) -> None:
        self.tokens[name] = []
        self._note(self.scheduler.handle(Arrive(name, tuple(prompt), params, seed=0)))

    def _until_done(self) -> None:
        idle = 0
        while self.scheduler.has_work:
            if self.filler:
                self.filler.fill()
            plan = self.scheduler.plan(0.0)
            self._note(self.scheduler.take_updates())
            idle = idle + 1 if plan is None else 0
            assert idle < 3, f"nothing moves: {self.scheduler.reasons()}"
            if plan is not None:
                self._count(plan)
                result: StepResult = self.backend.run(plan)
                self._note(self.scheduler.apply(result))
                assert self.scheduler.audit() == [], self.scheduler.audit()

    def _count(self, plan: StepPlan) -> None:
        self.most_segments = max(self.most_segments, len(plan.segments))
        decodes = sum(segment.tokens == 1 for segment in plan.segments)
        self.mixed_steps += 0 < decodes < len(plan.segments)

    def _note(self, updates: tuple[Update, ...]) -> None:
        for update in updates:
            if isinstance(update, NewToken) and update.token_id is not None:
                self.tokens[update.request_id].append(update.token_id)
            elif isinstance(update, Admitted):
                assert update.request_id not in self.cached, f"{update} is told twice"
                self.cached[update.request_id] = update.cached_tokens
            elif type(update).__name__ in {"Failed", "Rejected"}:
                raise AssertionError(f"{update}")
