"""A fuzzer that could not notice a hang or a bomb would show nothing."""

from __future__ import annotations

import itertools
import signal
import sys
import time

import case_limits
import pytest
from case_limits import CaseLimitError

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="the peak of the memory is read from Linux's /proc")


def test_a_case_that_computes_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case_limits, "PROCESSOR_S", 0.05)
    with pytest.raises(CaseLimitError, match="processor time"), case_limits.case_limits(10):
        all(number >= 0 for number in itertools.count())


def test_a_case_that_waits_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case_limits, "WAITING_S", 0.05)
    with pytest.raises(CaseLimitError, match="waited"), case_limits.case_limits(10):
        time.sleep(30)


@needs_proc
def test_memory_is_limited_relative_to_the_input() -> None:
    size = 32 * case_limits.MIB
    with pytest.raises(CaseLimitError, match="for an input of 1000 bytes"), case_limits.case_limits(1000, size // 2):
        _ = b"x" * size
    with case_limits.case_limits(1000, 2 * size):
        _ = b"x" * size


@needs_proc
def test_ten_times_a_large_input_is_all_that_is_allowed() -> None:
    size, use = case_limits.LARGE_INPUT, case_limits.MemoryUse()
    with case_limits.case_limits(size, use=use):
        _ = b"x" * (9 * size)
    assert 8.9 < use.ratio < 10
    assert str(use).startswith("1 inputs of 2 MiB and more at most 9")
    with pytest.raises(CaseLimitError, match="and 0"), case_limits.case_limits(size, 100 * size):
        _ = b"x" * (11 * size)


@needs_proc
def test_what_was_freed_before_cannot_hide_what_a_case_takes() -> None:
    """A quarter of a gigabyte in small pieces: the allocator keeps them for later when they are freed."""
    use = case_limits.MemoryUse()
    pieces = [bytes(1000) for _ in range(2**18)]
    kept = pieces[::1000]
    del pieces
    with case_limits.case_limits(1000, 2**30, use):
        _ = [bytes(1000) for _ in range(2**17)]
    assert use.small > 100 * case_limits.MIB
    assert kept


@needs_proc
def test_a_case_that_ends_with_an_error_is_measured_too() -> None:
    use = case_limits.MemoryUse()
    with pytest.raises(UnicodeDecodeError), case_limits.case_limits(1000, 2**30, use):
        (b"x" * (32 * case_limits.MIB) + b"\xff").decode()
    assert use.last > 31 * case_limits.MIB


def test_timers_of_others_are_restored() -> None:
    signal.setitimer(signal.ITIMER_REAL, 200)
    try:
        handler = signal.getsignal(signal.SIGALRM)
        with case_limits.case_limits(10):
            pass
        assert signal.getsignal(signal.SIGALRM) is handler
        assert 100 < signal.getitimer(signal.ITIMER_REAL)[0] <= 200
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
