"""Where the two processes meet: a private folder for the sockets, and pipes that end when a process does.

    /tmp/halocline-engine-????/  0700   lock, commands.sock, reports.sock

Both processes hold a shared flock on `lock`, so "nobody lives here any more" is a question to the kernel that a reused
process id or another pid namespace cannot answer wrongly. Whoever is left removes the folder; if both were killed at
the same moment, the next start on this machine does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from select import POLLIN, poll

PREFIX = "halocline-engine-"
LONGEST_SOCKET_PATH = 100
"""Bytes; the kernel allows 107."""
PARENT_POLL_SECONDS = 1.0


class Folder:
    """A private folder for one pair of processes; removed by `close` or by `sweep`."""

    def __init__(self, path: Path) -> None:
        assert path.is_dir(), f"{path} is no folder"
        self.path = path
        self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    @classmethod
    def create(cls) -> Folder:
        """Sweep what dead processes left, then make a new folder."""
        root = tempfile.gettempdir()
        if len(os.fsencode(root)) + 32 > LONGEST_SOCKET_PATH:
            root = "/tmp"
        sweep(Path(root))
        return cls(Path(tempfile.mkdtemp(prefix=PREFIX, dir=root)))

    @property
    def commands(self) -> str:
        """Address on which the engine listens."""
        return f"ipc://{self.path}/commands.sock"

    @property
    def reports(self) -> str:
        """Address on which the front end listens."""
        return f"ipc://{self.path}/reports.sock"

    def close(self) -> None:
        """Remove the folder; a second call does nothing."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def sweep(root: Path) -> list[Path]:
    """Remove the folders under `root` in which no process lives any more, and return them."""
    return [path for path in root.glob(PREFIX + "*") if _is_ours(path) and _remove_if_abandoned(path)]


def _is_ours(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.getuid()
    return False


def _remove_if_abandoned(path: Path) -> bool:
    # A folder without a lock file is one that another process is just making: leave it.
    try:
        lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(lock)


def read_line(descriptor: int, parent: int) -> bytes:
    """Read one line from a pipe, byte budget unlimited; nothing when the writer or the `parent` ends before its end."""
    parts: list[bytes] = []
    while not parts or not parts[-1].endswith(b"\n"):
        if not _is_readable(descriptor):
            if os.getppid() == parent:
                continue
            return b""
        part = os.read(descriptor, 65536)
        if not part:
            return b""
        parts.append(part)
    return b"".join(parts)


def _is_readable(descriptor: int) -> bool:
    """Wait a second for something to read, or for its end. Not by `select`: that takes no descriptor above 1,023."""
    waiting = poll()
    waiting.register(descriptor, POLLIN)
    return bool(waiting.poll(PARENT_POLL_SECONDS * 1000))


def watch_parent(lifeline: int, parent: int, on_death: Callable[[], None]) -> threading.Thread:
    """Call `on_death`, then end this process, as soon as the parent has ended, however it ended.

    The pipe tells at once; the parent's id is asked as well because a fork of the parent may keep the pipe open.
    PR_SET_PDEATHSIG is not used: it fires when the parent's *thread* ends.
    """

    def watch() -> None:
        while os.getppid() == parent:
            if _is_readable(lifeline) and not os.read(lifeline, 1):
                break
        with contextlib.suppress(Exception):
            on_death()
        os.kill(os.getpid(), signal.SIGKILL)

    thread = threading.Thread(target=watch, name="halocline-parent-watch", daemon=True)
    thread.start()
    return thread


@contextlib.contextmanager
def pipe_pair() -> Iterator[tuple[int, int, int, int]]:
    """Yield (child reads, parent writes, parent reads, child writes); the child's ends are closed on leaving."""
    child_reads, parent_writes = os.pipe()
    parent_reads, child_writes = os.pipe()
    try:
        yield child_reads, parent_writes, parent_reads, child_writes
    finally:
        os.close(child_reads)
        os.close(child_writes)
