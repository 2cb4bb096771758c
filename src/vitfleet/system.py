"""Requests of a process to its operating system. They do nothing on systems that do not support them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

if sys.platform != "win32":
    import resource

USUAL_MEMORY = 4 * 2**30  # bytes; assumed where a system does not say how many it has
PR_SET_PDEATHSIG = 1  # an option of Linux's prctl
M_MMAP_THRESHOLD = -3  # a parameter of glibc's mallopt
LARGE_BLOCK = 2**20  # bytes


def die_with_parent() -> None:
    """Have the system kill this process when its parent ends, even if the parent is killed.

    The port and the run's folder are then free for the next process. This works on Linux only.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def total_memory(control_group: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory of this machine, or of the container that this process runs in, in bytes."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return USUAL_MEMORY
    limit = control_group / "memory.max"
    text = limit.read_text().strip() if limit.exists() else "max"
    return total if text == "max" else min(total, int(text))


@contextmanager
def limited_memory(more: int) -> Iterator[None]:
    """Let this process have so many bytes more than when it asked first; in the block what does not fit is an error."""
    if sys.platform != "linux":
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_DATA)
    wanted, hard = _first_data_bytes() + more, before[1]
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@cache
def _first_data_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(fields["VmData"].split()[0]) * 1024


def return_freed_memory() -> None:
    """Have the C library return every large block of memory to the system as soon as it is freed.

    By default glibc keeps freed blocks of up to 32 MiB, in fragments that are too small for the next message: a server
    then holds the memory of one or two messages that no longer exist. Computation on the CPU gets a few per cent
    slower.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:  # C libraries other than glibc may not have it
        mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)
