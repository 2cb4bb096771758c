"""A significance test between two methods over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from vitfleet.errors import UserError


@dataclass(frozen=True)
class PairedTest:
    """A two-sided paired t-test.

    It assumes that the differences between the two methods, seed by seed, are normally distributed. Runs of the same
    seed share the partition and the initial weights, so they are pairs.

    Attributes
    ----------
    pairs
        Number of seeds that both methods have.
    difference
        Mean difference.
    t, p
        Student's t with ``pairs − 1`` degrees of freedom, and its two-sided p-value.
    """

    pairs: int
    difference: float
    t: float
    p: float


def paired_t_test(first: Mapping[int, float], second: Mapping[int, float]) -> PairedTest | None:
    """Test two methods by their values per seed; ``None`` with fewer than two seeds in common."""
    seeds = sorted(first.keys() & second.keys())
    if len(seeds) < 2:
        return None
    differences = [first[seed] - second[seed] for seed in seeds]
    mean, deviation = statistics.fmean(differences), statistics.stdev(differences)
    if deviation == 0:
        return PairedTest(len(seeds), mean, math.copysign(math.inf, mean) if mean else 0.0, 0.0 if mean else 1.0)
    try:
        from scipy.stats import t as student
    except ImportError:
        raise UserError("a significance test needs SciPy; install it with `pip install vitfleet[sim]`") from None
    t = mean / (deviation / math.sqrt(len(seeds)))
    return PairedTest(len(seeds), mean, t, float(2 * student.sf(abs(t), len(seeds) - 1)))
