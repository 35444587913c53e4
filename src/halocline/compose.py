"""How settings become an engine: the one place where model, memory and scheduler are put together.

    begin_engine()       front end's process: starts the engine's, which imports what it will need
    prepare(config)      front end's process: model found, memory laid out and checked, before anything heavy is done
    open_front(...)      front end's process: tells the engine what to build, loads the tokenizer meanwhile
    build_engine(...)    engine's process: weights, arena, scheduler; named by `Spec.builder`

Both lay out memory with the same function from the same numbers, so what was printed is what is built.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halocline.config import Config
from halocline.disagg.arena_pages import ArenaPages
from halocline.disagg.exchange import Exchange
from halocline.disagg.landings import Landings
from halocline.disagg.links import LinkPost, listen_for_links
from halocline.disagg.messages import Hello as WorkerHello
from halocline.disagg.messages import PoolFacts, facts_of
from halocline.disagg.nixl_agent import missing
from halocline.disagg.nixl_pull import NixlLinks
from halocline.engine.client import EngineClient
from halocline.engine.core import EngineParts
from halocline.engine.front import FrontEnd
from halocline.engine.launch import EngineProcess, begin
from halocline.engine.messages import LinkFacts, ModelFacts, Spec
from halocline.errors import ConfigError, LinkError
from halocline.memory.arena import Arena
from halocline.memory.facts import CapacityFacts
from halocline.memory.host import HostArena, host_layout
from halocline.memory.layout import ArenaLayout, LayerKV, solve_layout
from halocline.memory.sizing import Caps, Limits, auto_kv_bytes, capacity_facts, static_caps
from halocline.schedule.rules import Rules
from halocline.schedule.scheduler import Scheduler
from halocline.units import format_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedConfig

    from halocline.model.chat import ChatTemplate
    from halocline.model.loading import LoadedModel
    from halocline.model.runner import TorchBackend
    from halocline.model.sources import ModelSource

FOLDER_SETTING = "own_folder"
"""How the engine's process is told its private folder: no setting of an operator's."""
IMPORTED_AHEAD = ("halocline.model.loading", "halocline.model.runner", "halocline.model.host_costs")
"""What `build_engine` imports, of every model: the modules with PyTorch and transformers in them."""
Progress = Callable[[str, float | None], None]
_MOST_DOUBLINGS = 24


@dataclass(frozen=True, slots=True)
class Memory:
    """The arena of one model under one policy, on paper."""

    layout: ArenaLayout
    caps: Caps | None
    facts: CapacityFacts


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is known before the engine starts."""

    config: Config
    """As given, with every `auto` decided that could be."""
    source: ModelSource
    memory: Memory | None
    """None where the arena's size depends on the device's memory after the weights are there."""

    @property
    def model_name(self) -> str:
        """The name that clients use."""
        return self.config.served_model_name or self.source.name

    @property
    def spec(self) -> Spec:
        """How the engine process builds the engine."""
        return Spec(
            builder="halocline.compose:build_engine",
            settings=asdict(self.config),
            folder_setting=FOLDER_SETTING,
            audit=self.config.audit_rule,
            log_level=self.config.log_level,
        )


def prepare(config: Config, *, quiet: bool = False) -> Prepared:
    """Find the model and check that it can be served in the memory there is; ConfigError or ModelError if not."""
    import psutil

    from halocline.model.chat import read_template
    from halocline.model.configs import check_tokenizer, load_config
    from halocline.model.dtypes import choose_device
    from halocline.model.sources import resolve

    if config.link_kind == "nixl" and missing():
        raise ConfigError([missing()])
    if config.chat_template is not None:
        read_template(config.chat_template)
    source = resolve(config.model, trust_remote_code=config.trust_remote_code, quiet=quiet)
    device = choose_device(config.device)
    config = replace(config, device=str(device))
    available_bytes = _beside_host_arena(config, psutil.virtual_memory().available)
    if device.type == "cpu":
        config = _fit_to_memory(config, available_bytes)
    memory = None
    if config.arena_budget_bytes is not None:
        memory = lay_out(config, load_config(source), config.arena_budget_bytes)
    check_tokenizer(source)
    return Prepared(config, source, memory)


def _beside_host_arena(config: Config, available_bytes: int) -> int:
    """Return the free memory that a host arena leaves; raise ConfigError for one that is larger than all of it."""
    left_bytes = available_bytes - config.host_budget_bytes
    if left_bytes < 0:
        raise ConfigError(
            [
                f"host_bytes is {format_bytes(config.host_budget_bytes)}, but this machine has "
                f"{format_bytes(available_bytes)} of free memory; lower host_bytes"
            ]
        )
    return left_bytes


def _fit_to_memory(config: Config, available_bytes: int) -> Config:
    """Decide an `auto` arena; raise ConfigError for one that is larger than the memory that is free."""
    budget = config.arena_budget_bytes
    if budget is None:
        return replace(config, kv_bytes=auto_kv_bytes(available_bytes))
    if budget > available_bytes:
        raise ConfigError(
            [
                f"kv_bytes is {format_bytes(budget)}, but this machine has {format_bytes(available_bytes)} of free "
                f"memory, and the weights need some of it; lower kv_bytes"
            ]
        )
    return config


def begin_engine() -> EngineProcess:
    """Begin an engine process, for `open_front`: what it imports takes as long as finding and checking a model.

    Until `open_front` has returned, whose client ends it, it is the caller's to close.
    """
    return begin(IMPORTED_AHEAD)


async def open_front(prepared: Prepared, engine: EngineProcess, on_progress: Progress | None = None) -> FrontEnd:
    """Tell the engine process what to build, load the tokenizer meanwhile, and return both as one."""
    reading = asyncio.create_task(asyncio.to_thread(_chat, prepared))
    starting = asyncio.create_task(EngineClient.start(prepared.spec, on_progress, engine=engine))
    try:
        # Whichever fails first ends both: a damaged tokenizer does not wait for the weights.
        client, chat = await asyncio.gather(starting, reading)
    except BaseException:
        starting.cancel()
        reading.cancel()
        started, _ = await asyncio.gather(starting, reading, return_exceptions=True)
        if isinstance(started, EngineClient):
            await started.close()
        raise
    return FrontEnd(
        client,
        chat,
        model_name=prepared.model_name,
        health_seconds=prepared.config.health_seconds,
        seed=prepared.config.seed,
    )


def _chat(prepared: Prepared) -> ChatTemplate:
    from halocline.model.chat import chat_template
    from halocline.model.configs import load_tokenizer

    return chat_template(load_tokenizer(prepared.source), prepared.config.chat_template)


def lay_out(config: Config, model_config: PreTrainedConfig, budget_bytes: int) -> Memory:
    """Cut `budget_bytes` for a model; raises ConfigError with every reason why no request could be served."""
    from halocline.model.layers import own_limit

    return lay_out_layers(config, _layers(config, model_config), own_limit(model_config), budget_bytes)


def lay_out_layers(config: Config, layers: Sequence[LayerKV], model_tokens: int | None, budget_bytes: int) -> Memory:
    """Cut `budget_bytes` for these layers, of a model that was made for `model_tokens` (None: it names no limit).

    The engine and `halocline plan` both lay out memory here. Raises ConfigError as `lay_out`; where more bytes would
    do, the last problem says how many.
    """
    try:
        return _lay_out(config, layers, model_tokens, budget_bytes)
    except ConfigError as error:
        enough = _enough_bytes(config, layers, model_tokens, budget_bytes)
        if enough is None:
            raise
        hint = f"this model starts with kv_bytes {enough} ({format_bytes(enough)}) under these settings"
        raise ConfigError([*error.problems, hint]) from None


def _enough_bytes(config: Config, layers: Sequence[LayerKV], model_tokens: int | None, budget_bytes: int) -> int | None:
    """Return bytes with which the model starts, at most an eighth more than the fewest; None if size is no remedy."""

    def starts(size: int) -> bool:
        try:
            _lay_out(config, layers, model_tokens, size)
        except ConfigError:
            return False
        return True

    size = max(1, budget_bytes)
    for _ in range(_MOST_DOUBLINGS):
        low, size = size, 2 * size
        if starts(size):
            break
    else:
        return None
    while size - low > low // 8:
        middle = (low + size) // 2
        low, size = (low, middle) if starts(middle) else (middle, size)
    return size


def _lay_out(config: Config, layers: Sequence[LayerKV], model_tokens: int | None, budget_bytes: int) -> Memory:
    layout = solve_layout(layers, budget_bytes, config.page_tokens_rule)
    if config.host_budget_bytes:
        host_layout(layout, config.host_budget_bytes)  # refused here, before the weights are read
    _check_low_mark(config, layout)
    _check_staging(config, layout)
    policy = config.policy_rule
    caps = static_caps(layout, *policy[1:]) if policy[0] == "static" else None
    limits = Limits(
        config.step_tokens,
        config.max_running_requests,
        model_tokens,
        config.max_model_len,
        checkpoints=config.keeps_prefixes,
    )
    return Memory(layout, caps, capacity_facts(layout, caps, limits))


def _check_staging(config: Config, layout: ArenaLayout) -> None:
    """Refuse a staging buffer into which not even a page of this worker fits: those of others are about as large."""
    largest = max((pool.page_bytes for pool in layout.pools if pool.is_positional), default=0)
    if config.link_token is not None and config.staging_quota_bytes < largest:
        raise ConfigError(
            [
                f"staging_bytes is {config.staging_quota_bytes}, and one page of this worker has {largest} bytes: "
                f"pages of workers with another page length could not be cut; give many times that"
            ]
        )


def _check_low_mark(config: Config, layout: ArenaLayout) -> None:
    """Refuse a watermark that requests can never reach: no prompt would ever be delayed, and nobody would know why."""
    low = config.prefill_delay_low
    if low > layout.arena_bytes:
        raise ConfigError(
            [
                f"prefill_delay_low_bytes is {format_bytes(low)} ({low} bytes), and the arena has "
                f"{format_bytes(layout.arena_bytes)} ({layout.slabs} slabs of {layout.slab_bytes} bytes, "
                f"{layout.arena_bytes} in all): running requests never hold so much, and no prompt would be delayed; "
                f"give at most that, or 0 for a delay however little they hold"
            ]
        )


def build_engine(settings: dict[str, Any], progress: Progress) -> EngineParts:
    """Load the model, allocate the arena and put a scheduler before them. Runs in the engine's process."""
    import torch

    from halocline.model.dtypes import choose_kv_dtype
    from halocline.model.host_costs import measure_costs
    from halocline.model.loading import load
    from halocline.model.runner import TorchBackend
    from halocline.model.sources import resolve

    folder = Path(settings.pop(FOLDER_SETTING, tempfile.gettempdir()))
    config = Config(**settings)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    progress("loading the weights", None)
    source = resolve(config.model, trust_remote_code=config.trust_remote_code, quiet=True)
    loaded = load(source, config.dtype, config.device)
    kv_dtype = choose_kv_dtype(config.kv_dtype, loaded.dtype)
    memory = lay_out(config, loaded.config, _budget_bytes(config, loaded))
    progress("allocating the arena", None)
    host_bytes = config.host_budget_bytes
    host = HostArena(memory.layout, host_bytes) if host_bytes else None
    rules = _rules(config, loaded, memory.facts)
    if host is not None:
        progress("measuring what copies and prefills take", None)
        rules = replace(rules, host_costs=measure_costs(loaded, config.step_tokens))
    memory_file = _memory_file(config, loaded)
    backend = TorchBackend(
        loaded,
        memory.layout,
        kv_dtype=kv_dtype,
        attention=config.attention,
        host_bytes=host_bytes,
        memory_file=memory_file,
    )
    scheduler = Scheduler(Arena(memory.layout, memory.caps), rules, host)
    facts = ModelFacts(
        name=config.served_model_name or source.name,
        max_model_len=memory.facts.max_model_len.tokens,
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        max_running_requests=config.max_running_requests,
        max_waiting_requests=config.max_waiting_requests,
        details={
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "kv_dtype": str(kv_dtype).removeprefix("torch."),
            "device": str(loaded.device),
            "prefix_cache": "on" if config.keeps_prefixes else "off",
            "folder": str(source.folder),
        },
    )
    if config.link_token is None:
        return EngineParts(scheduler, backend, facts, memory.facts)
    exchange, link = _join(config, loaded, backend, scheduler, memory_file, folder)
    return EngineParts(scheduler, backend, facts, memory.facts, exchange, link)


def _memory_file(config: Config, loaded: LoadedModel) -> int | None:
    """Return the file in which the arena is to lie so that a worker on this host can read it; None: nobody will."""
    if config.link_token is None:
        return None
    if loaded.device.type != "cpu":
        raise ConfigError([f"links to other workers need an arena in host memory; the device is {loaded.device}"])
    listens = config.role != "decode" and config.link_kind == "shm"
    return os.memfd_create("halocline-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) if listens else None


def _join(
    config: Config,
    loaded: LoadedModel,
    backend: TorchBackend,
    scheduler: Scheduler,
    memory_file: int | None,
    folder: Path,
) -> tuple[Exchange, LinkFacts]:
    """Open the way to other workers."""
    from halocline.model.dtypes import choose_kv_dtype
    from halocline.model.fingerprint import fingerprint_of

    assert config.link_token is not None, "who has no secret belongs to no group"
    epoch, model = secrets.token_hex(8), fingerprint_of(loaded)
    facts = facts_of(
        backend.layout,
        model=model,
        dtype=f"{loaded.dtype} with {choose_kv_dtype(config.kv_dtype, loaded.dtype)} in the arena",
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
    )
    hello = WorkerHello(role=config.role_rule, epoch=epoch, facts=facts)
    pages = ArenaPages(backend.arena.numpy(), facts.pools)
    landings = Landings(pages, backend.layout.pools)
    # Opened anew for reading: who is handed it can never write into this arena.
    readable = None if memory_file is None else os.open(f"/proc/self/fd/{memory_file}", os.O_RDONLY | os.O_CLOEXEC)
    listener = None
    if config.role != "decode":
        listener = listen_for_links(config.link_kind, config.link_host, config.link_port, folder)
    nixl = _nixl_links(config, pages.pools, backend.arena.numpy())
    post = LinkPost(
        hello, config.link_token.encode(), pages, landings, readable, listener, config.staging_quota_bytes, nixl
    )
    exchange = Exchange(post, landings, hello, lease_seconds=config.lease_seconds, work_before=scheduler.work_before)
    return exchange, LinkFacts(role=config.role_rule, address=post.address, epoch=epoch, fingerprint=model)


def _nixl_links(config: Config, pools: tuple[PoolFacts, ...], arena: NDArray[np.uint8]) -> NixlLinks | None:
    """Return the NIXL library's part in this worker; raises ConfigError where it cannot have one."""
    if config.link_kind != "nixl":
        return None
    try:
        return NixlLinks(config.link_host, pools, None if config.role == "decode" else arena)
    except LinkError as error:
        raise ConfigError([str(error)]) from error


def _budget_bytes(config: Config, loaded: LoadedModel) -> int:
    """Return the arena's bytes: as given, or what the device has left now that the weights are there."""
    from halocline.model.device_memory import device_kv_bytes

    budget = config.arena_budget_bytes
    return device_kv_bytes(loaded, config.step_tokens, config.max_running_requests) if budget is None else budget


def _rules(config: Config, loaded: LoadedModel, facts: CapacityFacts) -> Rules:
    return Rules(
        step_tokens=config.step_tokens,
        max_running_requests=config.max_running_requests,
        max_model_len=facts.max_model_len.tokens,
        vocab_size=loaded.vocab_size,
        admission=config.admission_rule,
        default_max_tokens=config.default_max_tokens,
        clip_max_tokens=config.clip_max_tokens,
        eos_token_ids=loaded.eos_token_ids,
        max_waiting_requests=config.max_waiting_requests,
        prefix_cache=config.keeps_prefixes,
        prefill_delay_seconds=config.prefill_delay_seconds,
        prefill_delay_tokens=config.prefill_delay_tokens,
        prefill_delay_low_bytes=config.prefill_delay_low,
        decode_reserve_tokens=config.decode_reserve_tokens,
    )


def _layers(config: Config, model_config: PreTrainedConfig) -> tuple[LayerKV, ...]:
    from halocline.model.dtypes import choose_device, choose_dtype, choose_kv_dtype
    from halocline.model.layers import kv_layers

    weights = choose_dtype(config.dtype, model_config, choose_device(config.device))
    return kv_layers(model_config, choose_kv_dtype(config.kv_dtype, weights).itemsize)
