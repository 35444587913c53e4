"""How the NIXL library is used, seen by a library that writes down what it is asked: only reads, in one network."""

from __future__ import annotations

import logging
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from halocline.compose import prepare
from halocline.config import Config
from halocline.disagg import nixl_agent
from halocline.disagg.nixl_agent import Introduction, NixlAgent, Ranges, Read, missing, options_for
from halocline.errors import ConfigError, LinkError


@dataclass
class Library:
    """One agent of the library, and the module that makes it."""

    asked: list[tuple[Any, ...]] = field(default_factory=list)
    state: str = "PROC"
    wrong_name: bytes | None = None

    def nixl_agent_config(self, **settings: Any) -> SimpleNamespace:
        return SimpleNamespace(**settings)

    nixl_thread_sync_t = SimpleNamespace(NIXL_THREAD_SYNC_STRICT="strict")

    def nixl_agent(self, name: str, config: SimpleNamespace) -> Library:
        self.asked.append(("agent", name, config))
        return self

    def create_backend(self, name: str, options: dict[str, str]) -> None:
        self.asked.append(("backend", name, options))

    def register_memory(self, rows: list[tuple[int, int, int, str]], kind: str) -> None:
        self.asked.append(("register", rows, kind))

    def get_xfer_descs(self, rows: np.ndarray, kind: str) -> list[list[int]]:
        assert rows.dtype == np.uint64
        assert kind == "DRAM"
        return rows.tolist()

    def initialize_xfer(self, act: str, own: Any, theirs: Any, peer: str) -> str:
        self.asked.append(("posted", act, own, theirs, peer))
        return "handle"

    def transfer(self, handle: str) -> str:
        return self.state

    def check_xfer_state(self, handle: str) -> str:
        if self.state == "raise":
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        return self.state

    def add_remote_agent(self, words: bytes) -> bytes:
        if words == b"nonsense":
            raise RuntimeError("NIXL_ERR_MISMATCH")
        self.asked.append(("added", words))
        return self.wrong_name or words.split()[0]

    def remove_remote_agent(self, name: str) -> None:
        self.asked.append(("removed", name))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(nixl_agent, "load_library", lambda: made)
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    return made


def words(name: str, metadata: bytes) -> bytes:
    return msgspec.msgpack.encode(Introduction(name, 4096, 8192, metadata))


def added(library: Library) -> list[tuple[Any, ...]]:
    return [each for each in library.asked if each[0] in ("added", "removed")]


def test_the_agent_has_no_thread_of_its_own_and_one_network(library: Library) -> None:
    agent = NixlAgent("127.0.0.1")
    (_, name, config), backend = library.asked
    assert name == agent.name
    assert (config.enable_prog_thread, config.sync_mode) == (False, "strict")
    assert backend == ("backend", "UCX", {"engine_config": "NET_DEVICES=lo"})


def test_nothing_but_reads_is_posted(library: Library) -> None:
    agent = NixlAgent("127.0.0.1")
    peer = agent.meet(words("them", b"them here"))
    sizes = np.array([16, 32], np.uint64)
    agent.read(peer, Ranges(np.array([64, 512], np.uint64), sizes), Ranges(np.array([1, 17], np.uint64), sizes))
    posted = [each for each in library.asked if each[0] == "posted"]
    assert posted == [("posted", "READ", [[1, 16, 0], [17, 32, 0]], [[64, 16, 0], [512, 32, 0]], "them")]


def test_a_read_is_over_when_it_is_done_or_has_failed_and_only_then(library: Library) -> None:
    agent = NixlAgent("127.0.0.1")
    read = Read(agent, "handle", "PROC")
    assert (read.is_done(), read.is_over) == (False, False)
    library.state = "DONE"
    assert (read.is_done(), read.is_over) == (True, True)
    lost = Read(agent, "handle", "PROC")
    library.state = "raise"
    with pytest.raises(LinkError, match="REMOTE_DISCONNECT"):
        lost.is_done()
    library.state = "PROC"
    assert lost.is_over, "what has failed stays failed"


def test_a_worker_is_known_to_the_library_from_its_first_meeting_to_its_last_parting(library: Library) -> None:
    agent = NixlAgent("127.0.0.1")
    first, second = agent.meet(words("them", b"them here")), agent.meet(words("them", b"them here"))
    agent.part(first, [])
    assert added(library) == [("added", b"them here")]
    under_way = Read(agent, "handle", "PROC")
    agent.part(second, [under_way])
    assert added(library) == [("added", b"them here")], "something may still be read"
    library.state = "DONE"
    agent.meet(words("them", b"them here"))
    assert added(library) == [("added", b"them here"), ("removed", "them"), ("added", b"them here")]


def test_a_worker_that_has_the_name_of_another_is_refused(library: Library) -> None:
    agent = NixlAgent("127.0.0.1")
    agent.meet(words("them", b"them here"))
    for taken, metadata in (("them", b"them elsewhere"), (agent.name, b"me")):
        with pytest.raises(LinkError, match="name of another worker"):
            agent.meet(words(taken, metadata))
    library.wrong_name = b"somebody"
    with pytest.raises(LinkError, match="words of another worker"):
        agent.meet(words("others", b"others here"))
    assert added(library)[-1] == ("removed", "somebody")
    library.wrong_name = None
    agent.meet(words("others", b"others here"))


@pytest.mark.parametrize("body", [b"", b"\x93", words("x" * 65, b""), words("", b"")])
def test_words_that_are_no_introduction_never_reach_the_library(library: Library, body: bytes) -> None:
    with pytest.raises(LinkError, match="cannot be read"):
        NixlAgent("127.0.0.1").meet(body)
    assert added(library) == []


def test_words_that_the_library_does_not_understand_are_refused(library: Library) -> None:
    agent = NixlAgent("127.0.0.1")
    with pytest.raises(LinkError, match="finds no way to the peer: NIXL_ERR_MISMATCH"):
        agent.meet(words("them", b"nonsense"))
    agent.meet(words("them", b"them here"))


def test_guests_are_looked_after_though_the_library_complains(
    library: Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A thread that ended by one complaint would leave all who read from this worker waiting until their leases end."""
    asked, has_gone_on = [0], threading.Event()

    def complains() -> None:
        asked[0] += 1
        if asked[0] > 5:
            has_gone_on.set()
        raise RuntimeError("NIXL_ERR_BACKEND")

    monkeypatch.setattr(Library, "get_new_notifs", lambda self: complains(), raising=False)
    agent = NixlAgent("127.0.0.1")
    agent.offer(np.zeros(64, np.uint8))
    agent.welcome()
    agent.stir()
    assert has_gone_on.wait(10)
    agent.close()
    assert [record.getMessage() for record in caplog.records] == [
        "NIXL does not look after its guests: NIXL_ERR_BACKEND"
    ]


def test_the_operator_may_name_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    assert options_for("127.0.0.1") == {}
    monkeypatch.delenv("UCX_NET_DEVICES")
    assert options_for("0.0.0.0") == {}
    with pytest.raises(LinkError, match="no address of this machine"):
        options_for("192.0.2.77")


def test_without_the_library_the_extra_is_named_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "PACKAGES", ("nixl_that_is_not_there",))
    assert missing() == "NIXL is not installed; install it with: pip install 'halocline[nixl]'"
    with pytest.raises(LinkError, match="halocline\\[nixl\\]"):
        nixl_agent.load_library()
    with pytest.raises(ConfigError, match="halocline\\[nixl\\]"):
        prepare(Config(model="there is no such model", link_kind="nixl"), quiet=True)


def test_a_library_that_does_not_load_says_so_and_leaves_logging_as_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "nixl_broken.py").write_text("import logging\nlogging.raiseExceptions = False\nimport libcuda_so_1\n")
    (tmp_path / "nixl_other.py").write_text("")
    (tmp_path / "nixl_whole.py").write_text("import logging\nlogging.raiseExceptions = False\nnixl_agent = object\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(nixl_agent, "PACKAGES", ("nixl_broken",))
    with pytest.raises(LinkError, match="cannot be loaded: No module named 'libcuda_so_1'"):
        nixl_agent.load_library()
    monkeypatch.setattr(nixl_agent, "PACKAGES", ("nixl_other",))
    with pytest.raises(LinkError, match=r"nixl_other.* is not NIXL"):
        nixl_agent.load_library()
    monkeypatch.setattr(nixl_agent, "PACKAGES", ("not_there", "nixl_whole"))
    assert isinstance(nixl_agent.load_library(), ModuleType)
    assert logging.raiseExceptions
    for name in ("nixl_other", "nixl_whole"):
        sys.modules.pop(name)
