"""Requests of a process to its operating system. They do nothing on systems that do not support them."""

from __future__ import annotations

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1  # an option of Linux's prctl
M_MMAP_THRESHOLD = -3  # a parameter of glibc's mallopt
LARGE_BLOCK = 2**20  # bytes


def die_with_parent() -> None:
    """Have the system kill this process when its parent ends, even if the parent is killed.

    The port and the run's folder are then free for the next process. This works on Linux only.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def return_freed_memory() -> None:
    """Have the C library return every large block of memory to the system as soon as it is freed.

    By default glibc keeps freed blocks of up to 32 MiB, in fragments that are too small for the next message: a server
    then holds the memory of one or two messages that no longer exist. Computation on the CPU gets a few per cent
    slower.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:  # C libraries other than glibc may not have it
        mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)
