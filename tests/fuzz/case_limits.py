"""Limits of one case of a fuzzer: it neither hangs nor takes memory out of proportion to its input."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

PROCESSOR_S = 5.0
WAITING_S = 60.0  # of the clock: on a busy machine a case may wait for its turn, but not for ever
MEMORY_FACTOR = 10
ALLOWANCE = 48 * 2**20  # bytes: what the interpreter, the allocators and an honest case of the same kind take


class CaseLimitError(BaseException):
    """A case passed a limit. No exception handler of the code under test may catch it."""


@contextmanager
def case_limits(input_bytes: int, allowance: int = ALLOWANCE) -> Iterator[None]:
    """Raise if the block takes 5 s of processor time, waits a minute, or needs more memory than ten times its input.

    Parameters
    ----------
    input_bytes
        Size of the input that a hostile hand made.
    allowance
        Bytes beyond that: a process needs some for every case.

    Notes
    -----
    Memory is the peak of the resident set, which also holds what is allocated outside of Python. It is measured on
    Linux only.
    """
    before = _reset_peak()
    old_handlers = {number: signal.signal(number, _stop) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, PROCESSOR_S)
    outer = signal.setitimer(signal.ITIMER_REAL, WAITING_S)  # pytest-timeout uses the same timer
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, *outer)
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
    if before is not None and (grown := _memory("VmHWM") - before) > MEMORY_FACTOR * input_bytes + allowance:
        raise CaseLimitError(f"{grown / 2**20:.0f} MiB for an input of {input_bytes} bytes")


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    kind = f"{PROCESSOR_S:g} s of processor time" if number == signal.SIGPROF else f"waited {WAITING_S:g} s"
    raise CaseLimitError(f"a case takes too long: {kind}")


def _reset_peak() -> int | None:
    """Reset the peak of this process's memory and return what it uses now; ``None`` where that is not possible."""
    if sys.platform != "linux":
        return None
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # a container may forbid it
        return None
    return _memory("VmRSS")


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
