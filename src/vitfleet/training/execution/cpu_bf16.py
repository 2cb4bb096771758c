"""Whether this CPU computes in bfloat16.

Some virtual machines announce matrix instructions (AMX) that they do not execute. Torch uses what is announced, and the
process is killed by an illegal instruction. So a product is tried in a child process first.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
import warnings
from functools import cache

import torch

CHECK_SECONDS = 10.0  # a child that takes longer is not counted as killed
POLL_SECONDS = 0.002


def cpu_has_bf16() -> bool:
    """Whether this CPU has instructions for bfloat16. Other CPUs emulate it, slowly."""
    return (_announces("_is_avx512_bf16_supported") or has_matrix_unit()) and bf16_runs()


def has_matrix_unit() -> bool:
    """Whether this CPU announces matrix instructions (AMX)."""
    return _announces("_is_amx_tile_supported")


def bf16_runs() -> bool:
    """Whether a matrix product in bfloat16 ends without killing its process."""
    return not has_matrix_unit() or not hasattr(os, "fork") or product_runs()


def _announces(name: str) -> bool:
    check = getattr(torch.cpu, name, None)
    return check is not None and bool(check())


@cache
def product_runs() -> bool:
    """Whether a product in a child process ends; it takes some hundredths of a second.

    Where no process can be started or waited for, nothing is known, and the announcement counts.
    """
    try:
        return _child_status() in (None, 0)
    except OSError:
        return True


def _child_status() -> int | None:
    """Return how a child process that computes a product ended; ``None`` if it took too long."""
    with warnings.catch_warnings():
        # Other threads of this process do not exist in the child, which computes with one thread and ends.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 1
        try:
            code = multiply()
        finally:
            os._exit(code)  # whatever happened: the parent's code must not go on here
    deadline = time.monotonic() + CHECK_SECONDS
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(POLL_SECONDS)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def multiply() -> int:
    """Compute a product in bfloat16 and return 0 if it is right."""
    import resource  # not on Windows

    faulthandler.disable()  # a report of this process would look like one of its parent
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    ones = torch.ones(64, 64, dtype=torch.bfloat16)
    return int((ones @ ones)[0, 0].item() != 64)
