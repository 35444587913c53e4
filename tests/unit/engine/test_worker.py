"""What a worker tells a router of itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from halocline.engine.front import FrontEnd
from halocline.engine.health import Sight
from halocline.engine.messages import Hello, Snapshot
from testing.engine import build_on_arena


@dataclass
class JustStarted:
    """A client whose engine has said Hello and nothing else."""

    parts: Any = field(default_factory=lambda: build_on_arena({}, lambda text, fraction: None))
    snapshot: Snapshot = field(default_factory=Snapshot)
    dead_reason: str | None = None

    @property
    def hello(self) -> Hello:
        return Hello(1, self.parts.model, self.parts.capacity)

    @property
    def model(self) -> Any:
        return self.parts.model

    def sight(self) -> Sight:
        return Sight(None, False, 0, 0.0, self.snapshot)


def worker_of(client: JustStarted) -> dict[str, Any]:
    chat = SimpleNamespace(tokenizer=SimpleNamespace(encode=lambda text: [], eos_token_id=0))
    return FrontEnd(client, chat).worker()  # type: ignore[arg-type]


def test_a_worker_without_figures_yet_tells_the_bytes_of_its_empty_arena() -> None:
    """It told 0 bytes of 0, so a router that asked in this moment took it for a full one."""
    client = JustStarted()
    told = worker_of(client)
    assert told["total_bytes"] == told["free_bytes"] == client.parts.capacity.arena_bytes > 0
    assert told["token_bytes"] > 0


def test_a_worker_with_figures_tells_what_is_free_beside_its_promises() -> None:
    client = JustStarted()
    client.snapshot = Snapshot(figures=client.parts.scheduler.figures())
    told = worker_of(client)
    assert 0 < told["free_bytes"] < told["total_bytes"] == client.parts.capacity.arena_bytes  # the floor is promised
