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
    size = 32 * 2**20
    with pytest.raises(CaseLimitError, match="for an input of 1000 bytes"), case_limits.case_limits(1000, size // 2):
        _ = b"x" * size
    with case_limits.case_limits(size, size // 2):
        _ = b"x" * size


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
