"""Median sampling on crafted histograms, and as a property."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitfleet.methods.split.median_sampling import SamplingPlan, class_threshold, draw_sampling_plan


def labels_of(*counts: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.repeat(np.arange(len(counts), dtype=np.int64), counts)


def plan_of(counts: tuple[int, ...], epochs: int = 5, threshold: float = 0.5, seed: int = 0) -> SamplingPlan:
    return draw_sampling_plan(labels_of(*counts), epochs, threshold, np.random.default_rng(seed))


def sent(plan: SamplingPlan) -> list[tuple[int, int]]:
    """Return the (epoch, sample) pairs that are sent."""
    epochs, samples = plan.rows.shape
    pairs = {int(plan.rows[e, s]): (e, s) for e in range(epochs) for s in range(samples)}
    return [pairs[int(slot)] for slot in plan.sent_rows]


@pytest.mark.parametrize(
    ("counts", "quantile", "wanted"),
    [
        ((), 0.5, 0),
        ((7,), 0.5, 7),
        ((4, 4, 4), 0.5, 4),
        ((1, 500), 0.5, 250),
        ((1, 3, 9), 0.5, 3),
        ((1, 3, 9), 1.0, 9),
        ((1, 3, 9), 0.0, 1),
        ((2, 4, 6, 8, 10), 0.75, 8),
    ],
)
def test_the_threshold(counts: tuple[int, ...], quantile: float, wanted: int) -> None:
    assert class_threshold(np.array(counts, dtype=np.int64), quantile) == wanted


def test_only_classes_that_are_present_count() -> None:
    labels = np.repeat(np.array([3, 90]), [4, 8])  # of a hundred classes
    plan = draw_sampling_plan(labels, 5, 0.5, np.random.default_rng(0))
    assert sorted(plan.sent_labels) == [3] * 6 + [90] * 6


def test_an_empty_client_sends_nothing() -> None:
    plan = plan_of(())
    assert plan.num_recorded == 0
    assert len(plan.sent_rows) == len(plan.sent_labels) == 0
    assert plan.rows.shape == (5, 0)


@pytest.mark.parametrize("counts", [(7,), (4, 4, 4)])
def test_classes_at_the_median_send_each_sample_of_the_last_epoch_once(counts: tuple[int, ...]) -> None:
    assert sorted(sent(plan_of(counts))) == [(4, sample) for sample in range(sum(counts))]


def test_a_minority_is_taken_from_every_epoch_a_majority_from_the_last() -> None:
    plan = plan_of((3, 10, 20))  # median 10: 3 x 5 candidates for the first class, 20 for the last
    pairs = sent(plan)
    labels = labels_of(3, 10, 20)
    by_class = [[(e, s) for e, s in pairs if labels[s] == c] for c in range(3)]
    assert [len(own) for own in by_class] == [10, 10, 10]
    assert all(len(set(own)) == 10 for own in by_class), "nothing is sent twice where there is enough"
    assert {e for e, _ in by_class[0]} > {4}
    assert {e for e, _ in by_class[1]} == {e for e, _ in by_class[2]} == {4}


def test_one_against_five_hundred() -> None:
    plan = plan_of((1, 500))
    pairs = sent(plan)
    assert np.bincount(plan.sent_labels).tolist() == [250, 250]
    assert {pair for pair in pairs if pair[1] == 0} == {(epoch, 0) for epoch in range(5)}, "all five, again and again"
    assert len({pair for pair in pairs if pair[1] != 0}) == 250
    assert plan.num_recorded == 255, "what is drawn again is recorded once"


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=8),
    st.integers(1, 6),
    st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0]),
    st.integers(0, 2**32),
)
def test_the_uploaded_histogram_is_flat_and_nothing_more_is_recorded(
    counts: list[int], epochs: int, threshold: float, seed: int
) -> None:
    labels = np.random.default_rng(seed).permutation(labels_of(*counts))
    plan = draw_sampling_plan(labels, epochs, threshold, np.random.default_rng(seed))
    target = class_threshold(np.array(counts), threshold)
    assert np.bincount(plan.sent_labels, minlength=len(counts)).tolist() == [target] * len(counts)
    pairs = sent(plan)
    assert [int(labels[sample]) for _, sample in pairs] == plan.sent_labels.tolist()
    recorded = plan.rows[plan.rows < plan.num_recorded]
    assert sorted(recorded.tolist()) == list(range(plan.num_recorded)), "a place for each, and each its own"
    assert set(plan.sent_rows.tolist()) == set(range(plan.num_recorded)), "what is recorded is sent"
    for epoch, sample in pairs:
        assert epoch == epochs - 1 or counts[labels[sample]] < target


def test_the_sample_is_uniform() -> None:
    hits = np.zeros(20)
    for seed in range(2000):
        for _, sample in sent(plan_of((5, 20), epochs=1, threshold=0.0, seed=seed)):
            if sample >= 5:
                hits[sample - 5] += 1
    # 5 of 20, 2000 times: mean 500, standard deviation about 19
    assert hits.min() > 420
    assert hits.max() < 580
