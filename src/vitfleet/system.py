"""What a process asks of the system it runs on; where that cannot be had, nothing happens."""

from __future__ import annotations

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1  # of Linux's prctl
M_MMAP_THRESHOLD, LARGE_BLOCK = -3, 2**20  # of glibc's mallopt; bytes


def die_with_parent() -> None:
    """Ask the system to kill this process when the one that started it is gone, even if that was killed outright.

    Whoever comes next must find the port and the run's folder free. Elsewhere than on Linux, see to it yourself.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def return_freed_memory() -> None:
    """Have the C library give every large block of memory back to the system as soon as it is freed.

    By itself glibc keeps freed blocks of up to 32 MiB, in parts that the next message does not fit into: a server then
    holds a message or two that are no longer there. What computes on the CPU pays some per cent for it.
    """
    tell = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if tell is not None:  # another C library than glibc may have no such thing
        tell(M_MMAP_THRESHOLD, LARGE_BLOCK)
