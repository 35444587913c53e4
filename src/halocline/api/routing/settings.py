"""What `halocline route` can be asked: each field is one flag, checked as a whole, all problems at once."""

from __future__ import annotations

from dataclasses import dataclass, fields

from halocline.config import setting
from halocline.errors import ConfigError
from halocline.units import parse_server

_RANGES: dict[str, tuple[float, float]] = {
    "port": (0, 65535),
    "max_requests": (1, 65536),
    "attempts": (1, 16),
    "probe_seconds": (0.01, 60),
    "probe_timeout_seconds": (0.01, 60),
    "lost_seconds": (0.1, 3600),
    "drain_seconds": (0, 86400),
}
_SECRET = frozenset({"api_key", "worker_api_key", "link_token"})


@dataclass(frozen=True, kw_only=True)
class RouteSettings:
    """Settings of a router; one that exists has been checked."""

    prefill: tuple[str, ...] = setting(
        (), "URL of a worker that computes prompts; several by commas or by repeating the flag"
    )
    decode: tuple[str, ...] = setting((), "URL of a worker that decodes; several by commas or by repeating the flag")
    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0 picks a free one")
    api_key: str | None = setting(None, "key that clients must send as a bearer token")
    worker_api_key: str | None = setting(None, "key that the workers want (default: what the client sent is passed on)")
    link_token: str | None = setting(
        None, "the token that all workers share, or @FILE (default: the environment's HALOCLINE_LINK_TOKEN)"
    )
    max_requests: int = setting(4096, "most requests at the same time; one more is refused with 429")
    attempts: int = setting(3, "most workers that are tried for one request, while its client has got nothing yet")
    probe_seconds: float = setting(0.5, "each worker is asked so often how it is")
    probe_timeout_seconds: float = setting(2.0, "a worker that takes longer to say how it is gets no new requests")
    lost_seconds: float = setting(10.0, "a worker that is silent for so long has lost the requests that it had")
    drain_seconds: float = setting(5.0, "how long a stop waits for running requests")
    log_level: str = setting("info", "debug, info, warning or error")

    def __post_init__(self) -> None:
        """Split the lists at commas; raise one ConfigError with every problem."""
        for name in ("prefill", "decode"):
            object.__setattr__(self, name, _urls(getattr(self, name)))
        for name in ("api_key", "worker_api_key"):
            if getattr(self, name) is not None:  # blanks around a key are lost in every header
                object.__setattr__(self, name, getattr(self, name).strip())
        problems = [*self._problems_of_urls(), *self._problems_of_numbers()]
        if self.log_level not in ("debug", "info", "warning", "error"):
            problems.append(f"log_level is {self.log_level!r}; it must be one of debug, info, warning, error")
        problems += [f"{name} is empty" for name in ("api_key", "worker_api_key") if getattr(self, name) == ""]
        if problems:
            raise ConfigError(problems)

    def __repr__(self) -> str:
        """Show everything but keys and tokens."""
        shown = {each.name: getattr(self, each.name) for each in fields(self)}
        words = (f"{name}={'...' if name in _SECRET and value else value!r}" for name, value in shown.items())
        return f"RouteSettings({', '.join(words)})"

    def _problems_of_urls(self) -> list[str]:
        problems = [] if self.decode else ["no decode worker: name at least one with --decode URL"]
        for side in ("prefill", "decode"):
            urls: tuple[str, ...] = getattr(self, side)
            problems += [problem for url in urls for problem in _problems_of_url(side, url)]
            problems += [f"{side} names {url} twice" for url in sorted({url for url in urls if urls.count(url) > 1})]
        return problems

    def _problems_of_numbers(self) -> list[str]:
        return [
            f"{name} is {getattr(self, name)}; it must be from {low:.12g} to {high:.12g}"
            for name, (low, high) in _RANGES.items()
            if not low <= getattr(self, name) <= high
        ]


def _urls(values: tuple[str, ...]) -> tuple[str, ...]:
    """Split at commas, and drop the `/v1` that other programs want at the end."""
    parts = (part.strip() for value in values for part in value.split(","))
    return tuple(part.rstrip("/").removesuffix("/v1") for part in parts if part)


def _problems_of_url(side: str, url: str) -> list[str]:
    nowhere = [f"{side}: {url!r} is no worker's address; write http://HOST:PORT"]
    try:
        parts = parse_server(url)
    except ValueError:
        return nowhere
    if parts.path or parts.query or parts.fragment:
        return nowhere
    if parts.username is not None:
        return [f"{side}: a worker's address holds no name and password; use --worker-api-key"]
    return []
