"""Freed memory is kept where the C library can be told so."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys

import pytest

from halocline.engine import malloc

glibc_only = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")

TOUCH = """
import resource, sys
from halocline.engine.malloc import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
def step():
    [bytearray(100_000) for _ in range(100)]
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    """Return the page faults of a hundred steps that allocate and free ten megabytes, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", TOUCH, how], check=True, capture_output=True, text=True)
    return int(done.stdout)


@glibc_only
def test_what_a_step_frees_the_next_one_takes_without_a_page_fault() -> None:
    pages = 10_000_000 // resource.getpagesize()  # of one step
    assert faults("given back") > 50 * pages, "this library keeps what is freed by itself"
    assert faults("kept") < 2 * pages


def test_another_c_library_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(malloc.ctypes, "CDLL", lambda name: object())
    assert not malloc.keep_freed_memory()
