"""Limits of one case of a fuzzer: it neither hangs nor takes memory out of proportion to its input."""

from __future__ import annotations

import ctypes
import gc
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

PROCESSOR_S = 5.0
WAITING_S = 60.0  # of the clock: on a busy machine a case may wait for its turn, but not for ever
MEMORY_FACTOR = 10
MIB = 2**20
LARGE_INPUT = 2 * MIB  # bytes from which on ten times the input is all that a case may take
# Bytes that a case with a smaller input may take beyond that. An honest round of a tiny model takes 0.2 MiB: arenas of
# Python's objects (256 KiB each) and torch's temporary tensors, whatever the message. JSON of 256 KiB, the most that is
# parsed of a small message, becomes 7 MiB of Python's lists. What a run itself needs, as training does, is measured and
# added by its fuzzer.
ALLOWANCE = 8 * MIB


_settled = False  # gc.get_freeze_count() would count every object


class CaseLimitError(BaseException):
    """A case passed a limit. No exception handler of the code under test may catch it."""


@dataclass
class MemoryUse:
    """The most memory that the cases of a fuzzer took.

    Attributes
    ----------
    ratio
        Of cases with a large input: bytes per byte of input.
    small
        Of the other cases: bytes.
    last
        Bytes of the last case.
    """

    measured: int = 0
    large_cases: int = 0
    ratio: float = 0.0
    small: int = 0
    last: int = 0

    def add(self, grown: int, input_bytes: int, is_large: bool) -> None:
        """Note what a case took."""
        self.measured += 1
        self.last = grown
        if is_large:
            self.large_cases += 1
            self.ratio = max(self.ratio, grown / input_bytes)
        else:
            self.small = max(self.small, grown)

    @classmethod
    def most(cls, uses: Iterable[MemoryUse]) -> MemoryUse:
        """Return the most of several fuzzers."""
        together = cls()
        for use in uses:
            together.measured += use.measured
            together.large_cases += use.large_cases
            together.ratio = max(together.ratio, use.ratio)
            together.small = max(together.small, use.small)
        return together

    def __str__(self) -> str:
        if not self.measured:
            return "not measured here"
        small = f"{self.measured - self.large_cases} smaller ones at most {self.small / MIB:.1f} MiB"
        if not self.large_cases:
            return small
        large = f"{self.large_cases} inputs of {LARGE_INPUT // MIB} MiB and more"
        return f"{large} at most {self.ratio:.1f} × the input, {small}"


@contextmanager
def case_limits(
    input_bytes: int, allowance: int = ALLOWANCE, use: MemoryUse | None = None, large: int = LARGE_INPUT
) -> Iterator[None]:
    """Raise if the block takes 5 s of processor time, waits a minute, or needs more memory than ten times its input.

    Parameters
    ----------
    input_bytes
        Size of the input that a hostile hand made.
    allowance
        Bytes beyond that, where the input is small: a process needs some for every case.
    use
        Notes the memory that the case took.
    large
        Bytes of input from which on there is no allowance.

    Notes
    -----
    Memory is what the peak of the resident set is above its size before: it also holds what is allocated outside of
    Python. Before, everything that is free is given back to the system, so that it cannot hide what a case takes. It
    is measured on Linux only.
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
        if before is not None:
            grown = _memory("VmHWM") - before
            is_large = input_bytes >= large
            (use or MemoryUse()).add(grown, input_bytes, is_large)
            beyond = 0 if is_large else allowance
            if grown > MEMORY_FACTOR * input_bytes + beyond:
                raise CaseLimitError(
                    f"{grown / MIB:.1f} MiB for an input of {input_bytes} bytes; {MEMORY_FACTOR} × the input and "
                    f"{beyond / MIB:g} MiB are allowed"
                )


@contextmanager
def settled_memory() -> Iterator[None]:
    """Leave what outlives a case out of the collections before each: they take a tenth of a second and more else."""
    global _settled
    gc.collect()
    gc.freeze()
    _settled = True
    try:
        yield
    finally:
        _settled = False
        gc.unfreeze()


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    kind = f"{PROCESSOR_S:g} s of processor time" if number == signal.SIGPROF else f"waited {WAITING_S:g} s"
    raise CaseLimitError(f"a case takes too long: {kind}")


def _reset_peak() -> int | None:
    """Reset the peak of this process's memory and return what it uses now; ``None`` where that is not possible."""
    if sys.platform != "linux":
        return None
    gc.collect()
    if _settled:  # hypothesis keeps something of every case, and each collection would visit all of it
        gc.freeze()
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:  # a function of glibc
        give_back(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # a container may forbid it
        return None
    return _memory("VmRSS")


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
