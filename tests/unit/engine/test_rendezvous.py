"""The private folder: nobody else may look in, and none stays behind."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from halocline.engine.rendezvous import Folder, read_line, sweep


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of its own, with a path short enough for sockets: pytest's may be too long for them."""
    with tempfile.TemporaryDirectory(prefix="hl-", dir="/tmp") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        yield Path(short)


def test_the_folder_is_private_and_goes_with_close(root: Path) -> None:
    folder = Folder.create()
    assert folder.path.parent == root
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.close()
    folder.close()
    assert list(root.iterdir()) == []


def test_a_sweep_leaves_folders_in_which_somebody_lives(root: Path) -> None:
    mine, other = Folder.create(), Folder.create()
    assert sweep(root) == []
    assert mine.path.exists()
    mine.close()
    other.close()


def test_a_folder_left_by_a_killed_process_goes_with_the_next_start(root: Path) -> None:
    program = (
        "import os, signal, tempfile\n"
        f"tempfile.tempdir = {str(root)!r}\n"
        "from halocline.engine.rendezvous import Folder\n"
        "folder = Folder.create()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    (left,) = root.iterdir()
    folder = Folder.create()
    assert not left.exists()
    folder.close()


def test_a_sweep_touches_nothing_that_is_not_ours(root: Path) -> None:
    (root / "halocline-engine-without-lock").mkdir()
    (root / "halocline-engine-a-file").write_text("x")
    (root / "other").mkdir()
    (root / "halocline-engine-link").symlink_to(root / "other")
    assert sweep(root) == []
    assert len(list(root.iterdir())) == 4


def test_a_temporary_folder_with_a_long_name_is_not_used(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = root / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = Folder.create()
    assert len(folder.commands.removeprefix("ipc://")) <= 107
    folder.close()


def test_a_line_longer_than_a_pipe_is_read_whole() -> None:
    reads, writes = os.pipe()
    program = f"import os; os.write({writes}, b'x' * 300_000 + b'\\n')"
    with subprocess.Popen([sys.executable, "-c", program], pass_fds=(writes,)) as writer:
        assert read_line(reads, os.getppid()) == b"x" * 300_000 + b"\n"
        assert writer.wait() == 0
    os.close(writes)
    assert read_line(reads, os.getppid()) == b"", "nobody is left who could write"
    os.close(reads)


def test_a_line_is_read_from_a_descriptor_above_those_that_select_takes() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] < 2048:
        pytest.skip(f"this system allows {limits[1]} file descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(2048, limits[0]), limits[1]))
    reads, writes = os.pipe()
    try:
        high = fcntl.fcntl(reads, fcntl.F_DUPFD, 1500)
        os.write(writes, b"told\n")
        assert read_line(high, os.getppid()) == b"told\n"
        os.close(high)
    finally:
        os.close(reads)
        os.close(writes)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_half_a_line_is_none() -> None:
    reads, writes = os.pipe()
    os.write(writes, b"half")
    os.close(writes)
    assert read_line(reads, os.getppid()) == b""
    os.close(reads)


def test_a_line_is_not_waited_for_when_the_parent_has_gone() -> None:
    reads, writes = os.pipe()  # as where a fork of the parent still holds the pipe
    assert read_line(reads, parent=os.getpid()) == b""
    os.close(reads)
    os.close(writes)
