"""What the C library does with memory that was freed: kept for the next step instead of given back to the kernel.

A step frees what it has allocated. By default glibc then returns the end of its heap to the kernel and maps blocks of
128 KiB and more one by one, so that the next step takes the same pages again, fault by fault; in a virtual machine a
fault costs microseconds. With this, what a process has once needed stays its own.
"""

from __future__ import annotations

import ctypes

from halocline.units import MIB

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
"""Names and numbers of glibc's malloc.h."""
KEPT_BYTES = 512 * MIB
"""Freed memory at the heap's end beyond this is given back."""
SPARE_BYTES = 16 * MIB
"""So much more than asked for is taken from the kernel at once."""
MAPPED_BYTES = 32 * MIB
"""Blocks from this size on are mapped one by one: the most that glibc allows here."""


def keep_freed_memory() -> bool:
    """Tell glibc to keep what is freed; return whether it took it. Another C library is left as it is."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    wanted = ((M_TRIM_THRESHOLD, KEPT_BYTES), (M_TOP_PAD, SPARE_BYTES), (M_MMAP_THRESHOLD, MAPPED_BYTES))
    return min(mallopt(ctypes.c_int(name), ctypes.c_int(size)) for name, size in wanted) == 1
