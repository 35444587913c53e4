"""Every setting, once: flags, the --config file and `LLM(...)` are three spellings of this frozen record.

Each field's metadata carries the help text that the command line and the reference print. A `Config` that exists has
been checked: `__post_init__` raises one ConfigError that lists all problems. What is written as text
(`--admission expected:0.9`) becomes a typed value in the properties at the end, and nowhere else.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, cast, get_args, get_type_hints

from halocline.errors import ConfigError
from halocline.units import parse_bytes, parse_number, parse_whole

Admission = tuple[Literal["expected"], float] | tuple[Literal["guaranteed"]]
"""Size of a request's grant: the prompt plus a quantile of the observed output lengths, or everything it may need."""

Policy = tuple[Literal["shared"]] | tuple[Literal["static"], float] | tuple[Literal["static"], float, float]
"""One arena for all pools, or a cap per pool: each window pool gets this many times the full pool's tokens, and the
state pool, if the second number is there, that many bytes per byte of the others."""

Audit = Literal["idle", "every", "off"]
"""When the arena is recounted from scratch."""

MAX_PAGE_TOKENS = 256
AUTO_QUANTILE = 0.9
MAX_STATIC_RATIO = 100
MAX_LOCAL_WORKERS = 64

_DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")
_CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": _DTYPES,
    "kv_dtype": _DTYPES,
    "audit": ("idle", "every", "off"),
    "attention": ("auto", "cpu", "blocked", "reference"),
    "log_level": ("debug", "info", "warning", "error"),
    "prefix_cache": ("on", "off"),
    "role": ("both", "prefill", "decode"),
    "link_kind": ("shm", "tcp", "nixl"),
}
_RANGES: dict[str, tuple[float, float]] = {
    "port": (0, 65535),
    "threads": (1, 4096),
    "max_model_len": (2, 2**31 - 1),
    "max_running_requests": (1, 65536),
    "max_waiting_requests": (1, 2**31 - 1),
    "step_tokens": (2, 2**20),
    "default_max_tokens": (1, 2**31 - 1),
    "seed": (-(2**63), 2**63 - 1),
    "drain_seconds": (0, 86400),
    "prefill_delay_seconds": (0, 3600),
    "prefill_delay_tokens": (1, 2**31 - 1),
    "health_seconds": (0.1, 86400),
    "link_port": (0, 65535),
    "lease_seconds": (0.1, 3600),
    "decode_reserve_tokens": (0, 2**31 - 1),
}


def setting(default: Any, text: str, *, server: bool = False) -> Any:
    """Declare a setting with its default and the help text of its flag; `server`: only `halocline serve` has it."""
    return field(default=default, metadata={"help": text, "server": server})


@dataclass(frozen=True, kw_only=True)
class Config:
    """What `halocline serve`, `generate`, `chat` and `LLM(...)` share; checked as a whole, all problems at once."""

    model: str = setting("gemma3-270m", "a built-in name, a folder, a .gguf file or a Hugging Face id")
    served_model_name: str | None = setting(None, "the name that clients use (default: the model's)", server=True)
    host: str = setting("127.0.0.1", "address to listen on", server=True)
    port: int = setting(8000, "port to listen on; 0 picks a free one", server=True)
    dtype: str = setting("auto", "type of the weights: auto, bfloat16, float16, float32, float64")
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    threads: int | None = setting(None, "CPU threads (default: one per core)")
    attention: str = setting("auto", "attention backend: auto, cpu, blocked or reference")
    kv_bytes: str | int = setting(
        "auto",
        "bytes of the arena: 256MiB, 2GiB, a number of bytes, or auto: a quarter of free memory, at most 4 GiB, or "
        "on a device what is left there",
    )
    kv_dtype: str = setting(
        "auto", "type of K and V in the arena: auto (the weights'), bfloat16, float16, float32, float64"
    )
    max_model_len: int | None = setting(
        None, "longest prompt plus output in tokens (default: the most that model and arena allow)"
    )
    max_running_requests: int = setting(256, "most requests that run at the same time")
    max_waiting_requests: int = setting(4096, "most requests that may wait; one more is refused with 429", server=True)
    step_tokens: int = setting(512, "most tokens computed in one step, decodes and prefill chunks together")
    page_tokens: str | int | None = setting(
        None, "positions per page: a power of two for all pools, or full=16,sliding-512=8 (default: solved)"
    )
    admission: str = setting("expected:0.9", "size of a request's grant: expected[:QUANTILE] or guaranteed")
    default_max_tokens: int = setting(1024, "limit of a request that names none, under guaranteed admission")
    policy: str = setting(
        "shared",
        "shared arena, or static:R for a split that gives each window pool R times the full pool's tokens; static:R:S "
        "also gives the state pool S bytes per byte of the others",
    )
    prefix_cache: str | bool = setting(
        "on", "on or off: keep the KV of prompts and answers for requests that begin alike, in memory nobody needs"
    )
    prefill_delay_seconds: float = setting(
        0.0, "longest wait of a new prompt for others to prefill with while requests decode; 0: none waits"
    )
    prefill_delay_tokens: int = setting(2048, "so many prompt tokens that wait end a prefill delay at once")
    prefill_delay_low_bytes: str | int = setting(
        0, "no prefill delay while running requests hold fewer bytes of the arena"
    )
    host_bytes: str | int = setting(
        0, "bytes of host memory for what leaves the arena: retracted answers and cached prefixes; 0: none"
    )
    clip_max_tokens: bool = setting(False, "lower a max_tokens that cannot fit instead of refusing the request")
    seed: int = setting(0, "seed of the sampling noise of requests that bring none")
    chat_template: str | None = setting(None, "file with a Jinja chat template to use instead of the model's")
    trust_remote_code: bool = setting(False, "run Python code that comes with a model folder")
    api_key: str | None = setting(None, "key that clients must send as a bearer token", server=True)
    drain_seconds: float = setting(5.0, "how long a stop waits for running requests", server=True)
    health_seconds: float = setting(30.0, "work waiting but no progress for this long is unhealthy", server=True)
    role: str = setting(
        "both",
        "both; prefill: compute prompts for decode workers; decode: have prompts computed where a router says",
        server=True,
    )
    disagg: str | None = setting(
        None, "start so many local workers and a router: 1p1d is one for prompts, one for answers", server=True
    )
    link_kind: str = setting(
        "shm", "how pages come from a prefill worker: shm (same host), tcp, or nixl (the NIXL library)", server=True
    )
    link_host: str = setting(
        "127.0.0.1", "address on which a prefill worker takes links; with nixl, any worker's own for pages", server=True
    )
    link_port: int = setting(0, "port for links other than shm; 0 picks a free one", server=True)
    link_token: str | None = setting(
        None, "secret that workers and router share; @FILE reads it (default: $HALOCLINE_LINK_TOKEN)", server=True
    )
    staging_bytes: str | int = setting(
        "64MiB", "bytes in which pages of workers with another page length wait to be cut, of all links", server=True
    )
    lease_seconds: float = setting(10.0, "a transfer without progress for this long is given up", server=True)
    decode_reserve_tokens: int = setting(
        512, "tokens by which an answer may grow without a new grant when its prompt is computed elsewhere", server=True
    )
    audit: str = setting("idle", "when the arena is recounted: idle, every (step) or off")
    log_level: str = setting("info", "debug, info, warning or error")

    def __post_init__(self) -> None:
        """Raise one ConfigError with every problem of every field."""
        problems = [problem for name in setting_names() for problem in _problems_of(name, self.__dict__[name])]
        if problems:
            raise ConfigError(problems)
        if self.api_key is not None:  # blanks around it, as at the end of a file, are lost in every client's header
            object.__setattr__(self, "api_key", self.api_key.strip())

    @property
    def admission_rule(self) -> Admission:
        """`admission` as a typed value."""
        return parse_admission(self.admission)

    @property
    def policy_rule(self) -> Policy:
        """`policy` as a typed value."""
        return parse_policy(self.policy)

    @property
    def page_tokens_rule(self) -> int | dict[str, int] | None:
        """`page_tokens` as one number for all pools, a number per pool name, or None: the solver chooses."""
        return parse_page_tokens(self.page_tokens)

    @property
    def keeps_prefixes(self) -> bool:
        """`prefix_cache` as a truth value; a YAML file's `on` is one already."""
        return self.prefix_cache in ("on", True)

    @property
    def prefill_delay_low(self) -> int:
        """`prefill_delay_low_bytes` as a number of bytes."""
        return parse_bytes(self.prefill_delay_low_bytes)

    @property
    def host_budget_bytes(self) -> int:
        """`host_bytes` as a number of bytes."""
        return parse_bytes(self.host_bytes)

    @property
    def staging_quota_bytes(self) -> int:
        """`staging_bytes` as a number of bytes."""
        return parse_bytes(self.staging_bytes)

    @property
    def disagg_rule(self) -> tuple[int, int] | None:
        """`disagg` as (prefill workers, decode workers); None: this process serves alone."""
        return None if self.disagg is None else parse_disagg(self.disagg)

    @property
    def role_rule(self) -> Literal["both", "prefill", "decode"]:
        """`role` as a typed value."""
        return cast("Literal['both', 'prefill', 'decode']", self.role)

    @property
    def audit_rule(self) -> Audit:
        """`audit` as a typed value."""
        return cast("Audit", self.audit)

    @property
    def arena_budget_bytes(self) -> int | None:
        """`kv_bytes` as a number of bytes; None: sized at start from the memory there is."""
        return None if self.kv_bytes == "auto" else parse_bytes(self.kv_bytes)


def setting_names() -> tuple[str, ...]:
    """Return the names of all settings, in the order of the reference."""
    return tuple(each.name for each in fields(Config))


def build(*sources: Mapping[str, object]) -> Config:
    """Make a Config of several sources, later ones winning; unknown names are refused together, each with a guess."""
    merged: dict[str, object] = {}
    for source in sources:
        merged.update(source)
    unknown = [unknown_setting(name) for name in merged if name not in setting_names()]
    if unknown:
        raise ConfigError(unknown)
    return Config(**cast("dict[str, Any]", merged))


def read_file(path: str | Path) -> dict[str, object]:
    """Read a YAML file of settings; keys may be written `kv_bytes` or `kv-bytes`. Raises ConfigError."""
    import yaml

    try:
        loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"cannot read the configuration file {path}: {error.strerror}"]) from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError([f"{path} is not a YAML file: {' '.join(str(error).split())}"]) from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError([f"{path} must hold `setting: value` lines, not a {type(loaded).__name__}"])
    return {str(key).replace("-", "_"): value for key, value in loaded.items()}


def unknown_setting(name: str) -> str:
    """Say that `name` is no setting, and which one was probably meant."""
    return f"unknown setting {name!r}{did_you_mean(name, setting_names())}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the known name nearest to `name`, or an empty string when none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def parse_admission(text: str) -> Admission:
    """Read `expected`, `expected:QUANTILE` or `guaranteed`; raises ValueError with the accepted forms."""
    if text == "guaranteed":
        return ("guaranteed",)
    word, colon, number = text.partition(":")
    quantile = _number(number) if colon else AUTO_QUANTILE
    if word != "expected" or quantile is None or not 0 < quantile <= 1:
        raise ValueError(
            f"admission is {text!r}; it must be guaranteed, expected or expected:QUANTILE with a quantile above 0, to 1"
        )
    return ("expected", quantile)


def parse_disagg(text: str) -> tuple[int, int]:
    """Read `1p1d`: (prefill workers, decode workers); raises ValueError with the accepted form."""
    found = re.fullmatch(r"(\d{1,3})p(\d{1,3})d", text, re.ASCII)
    counts = (int(found[1]), int(found[2])) if found else (0, 0)
    if not all(1 <= count <= MAX_LOCAL_WORKERS for count in counts):
        raise ValueError(
            f"disagg is {text!r}; write 1p1d for one prefill and one decode worker, each up to {MAX_LOCAL_WORKERS}"
        )
    return counts


def parse_policy(text: str) -> Policy:
    """Read `shared`, `static:R` or `static:R:S`; raises ValueError with the accepted forms."""
    if text == "shared":
        return ("shared",)
    word, *numbers = text.split(":")
    ratios = [ratio for ratio in map(_number, numbers) if ratio is not None and 0 < ratio <= MAX_STATIC_RATIO]
    if word != "static" or len(ratios) != len(numbers) or len(ratios) not in (1, 2):
        raise ValueError(
            f"policy is {text!r}; it must be shared, static:R or static:R:S with ratios above 0, such as static:0.8 "
            "or, for a model with recurrent state, static:0.8:0.9"
        )
    return ("static", ratios[0]) if len(ratios) == 1 else ("static", ratios[0], ratios[1])


def parse_page_tokens(value: str | int | None) -> int | dict[str, int] | None:
    """Read `16`, `full=16,sliding-512=8` or None; raises ValueError with the accepted forms."""
    if value is None or value == "auto":
        return None
    text = str(value)
    if "=" not in text:
        return _page_tokens_of_one_pool(text, text)
    pairs = [pair.split("=", 1) for pair in text.split(",")]
    if any(len(pair) != 2 or not pair[0].strip() for pair in pairs):
        raise ValueError(f"page_tokens is {text!r}; write 16 or full=16,sliding-512=8")
    names = [name.strip() for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"page_tokens is {text!r}, which names {twice} twice; give each pool one number")
    return {name: _page_tokens_of_one_pool(number, text) for name, (_, number) in zip(names, pairs, strict=True)}


def _page_tokens_of_one_pool(number: str, text: str) -> int:
    try:
        tokens = parse_whole(number.strip())
    except ValueError:
        tokens = 0
    if not 1 <= tokens <= MAX_PAGE_TOKENS or tokens & (tokens - 1):
        raise ValueError(
            f"page_tokens is {text!r}; each must be a power of two from 1 to {MAX_PAGE_TOKENS}: "
            "write 16 for all pools or full=16,sliding-512=8"
        )
    return tokens


def _number(text: str) -> float | None:
    try:
        return parse_number(text)
    except ValueError:
        return None


def _problems_of(name: str, value: object) -> list[str]:
    """Return what is wrong with one field: its type, its range or its form."""
    expected = _types_of(name)
    wrong_bool = isinstance(value, bool) and bool not in expected
    if wrong_bool or not isinstance(value, expected + ((int,) if float in expected else ())):
        return [f"{name} is {value!r}; it must be {_type_words(expected)}"]
    if value is None:
        return []
    if name in _CHOICES and value not in _CHOICES[name] and not isinstance(value, bool):
        guess = did_you_mean(str(value), _CHOICES[name])
        return [f"{name} is {value!r}; it must be one of {', '.join(_CHOICES[name])}{guess}"]
    if name in _RANGES and not _RANGES[name][0] <= cast("float", value) <= _RANGES[name][1]:
        low, high = _RANGES[name]
        return [f"{name} is {value}; it must be from {low:.12g} to {high:.12g}"]
    return _problems_of_form(name, value)


def _problems_of_form(name: str, value: Any) -> list[str]:
    """Return what is wrong with a field that is written in a small language of its own."""
    try:
        if name == "admission":
            parse_admission(value)
        elif name == "policy":
            parse_policy(value)
        elif name == "page_tokens":
            parse_page_tokens(value)
        elif name in ("prefill_delay_low_bytes", "host_bytes", "staging_bytes"):
            parse_bytes(value)
        elif name == "disagg":
            parse_disagg(value)
        elif name == "kv_bytes" and value != "auto" and parse_bytes(value) == 0:
            raise ValueError("kv_bytes is 0; write auto, 256MiB, 2GiB or a number of bytes")
        elif name == "device" and not _is_device(value):
            raise ValueError(f"device is {value!r}; it must be auto, cpu, cuda or cuda:N")
        elif name in ("model", "host", "link_host", "link_token", "api_key") and not value.strip():
            raise ValueError(f"{name} is empty")
    except ValueError as error:
        text = str(error)
        return [text if text.startswith(name) else f"{name}: {text}"]
    return []


def _is_device(text: str) -> bool:
    return text in ("auto", "cpu", "cuda") or re.fullmatch(r"cuda:\d+", text, re.ASCII) is not None


def _types_of(name: str) -> tuple[type, ...]:
    hint = get_type_hints(Config)[name]
    return tuple(get_args(hint)) if isinstance(hint, UnionType) else (cast("type", hint),)


def _type_words(types: tuple[type, ...]) -> str:
    words = {str: "text", int: "a whole number", float: "a number", bool: "true or false", type(None): "absent"}
    return " or ".join(words[each] for each in types)
