"""Metrics against scikit-learn and numbers computed by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.metrics import confusion_matrix as sklearn_confusion_matrix
from sklearn.metrics import roc_auc_score, top_k_accuracy_score

from vitfleet.errors import UserError
from vitfleet.fleet.base import EvalResult
from vitfleet.run.evaluate.metric_context import MetricUnavailableError, plain_value
from vitfleet.run.evaluate.metrics import (
    AurocParams,
    CalibrationParams,
    TopKParams,
    accuracy_distribution,
    auroc,
    calibration,
    most_confused,
    top_k,
)
from vitfleet.run.evaluate.predictions import Predictions, area_under_roc, confusion_matrix
from vitfleet.run.records import MetricValues, metric_scalars


def results_of(correct: list[int], tested: int = 10) -> list[EvalResult]:
    return [EvalResult(count, tested) for count in correct]


def test_accuracy_distribution_matches_numbers_by_hand() -> None:
    values = accuracy_distribution(results_of([4, 10, 6, 8]))
    assert values["mean"] == pytest.approx(0.7)
    assert values["std"] == pytest.approx(np.sqrt((0.09 + 0.09 + 0.01 + 0.01) / 4))
    assert values["worst_10_percent"] == pytest.approx(0.4)
    assert [values[f"p{level}"] for level in (0, 50, 100)] == pytest.approx([0.4, 0.7, 1.0])
    assert values["p25"] == pytest.approx(0.4 + 0.75 * 0.2)
    assert values["clients"] == 4


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(30, 60)), min_size=1, max_size=60))
def test_accuracy_distribution_matches_numpy(counts: list[tuple[int, int]]) -> None:
    values = accuracy_distribution([EvalResult(correct, tested) for correct, tested in counts])
    accuracies = np.array([correct / tested for correct, tested in counts])
    worst = sorted(accuracies)[: (len(accuracies) + 9) // 10]
    assert values["mean"] == pytest.approx(accuracies.mean())
    assert values["std"] == pytest.approx(accuracies.std())
    assert values["worst_10_percent"] == pytest.approx(np.mean(worst))
    for level in (0, 10, 25, 50, 75, 90, 100):
        assert values[f"p{level}"] == pytest.approx(np.quantile(accuracies, level / 100))


def test_accuracy_distribution_counts_clients_alike_whatever_their_number_of_images() -> None:
    assert accuracy_distribution([EvalResult(1, 1), EvalResult(0, 999)])["mean"] == 0.5


def test_accuracy_distribution_of_no_clients_has_the_same_keys() -> None:
    empty = accuracy_distribution([])
    assert empty.keys() == accuracy_distribution(results_of([1])).keys()
    assert empty["clients"] == 0
    assert {value for key, value in empty.items() if key != "clients"} == {None}


@st.composite
def predictions(draw: st.DrawFn) -> Predictions:
    """Draw predictions of five classes; coarse logits, so that many are equal."""
    count = draw(st.integers(1, 40))
    labels = draw(arrays(np.int64, count, elements=st.integers(0, 4)))
    return Predictions(labels, draw(arrays(np.float32, (count, 5), elements=st.integers(-3, 3))))


def context_of(predictions: Predictions) -> Any:
    return SimpleNamespace(predictions=predictions, class_names=list("abcde"))


@given(predictions())
def test_confusion_matrix_matches_scikit_learn(predictions: Predictions) -> None:
    expected = sklearn_confusion_matrix(predictions.labels, predictions.logits.argmax(axis=1), labels=range(5))
    assert np.array_equal(confusion_matrix(predictions), expected)


@given(predictions())
def test_auroc_matches_scikit_learn(predictions: Predictions) -> None:
    values = auroc(AurocParams(), context_of(predictions))
    assert predictions.probabilities.sum(axis=1) == pytest.approx(1)
    by_class: Any = values["by_class"]
    for label, area in enumerate(by_class):
        positive = predictions.labels == label
        if area is None:
            assert positive.all() or not positive.any()
        else:
            assert area == pytest.approx(roc_auc_score(positive, predictions.probabilities[:, label]))
    measured = [area for area in by_class if area is not None]
    assert values["mean"] == (pytest.approx(np.mean(measured)) if measured else None)
    assert values["worst"] == min(measured, default=None)


def test_area_under_roc_is_the_share_of_pairs_in_the_right_order() -> None:
    scores, positive = np.array([0.1, 0.4, 0.4, 0.8]), np.array([False, False, True, True])
    assert area_under_roc(scores, positive) == 3.5 / 4  # one pair is equal: a half


@given(predictions(), st.integers(1, 4))
def test_top_k_is_at_least_scikit_learns_where_logits_are_equal(predictions: Predictions, k: int) -> None:
    value = top_k(TopKParams(k=k), context_of(predictions))["accuracy"]
    distinct = predictions.logits + np.linspace(0, 1e-3, 5, dtype=np.float32)
    exact = top_k(TopKParams(k=k), context_of(Predictions(predictions.labels, distinct)))["accuracy"]
    assert exact == pytest.approx(top_k_accuracy_score(predictions.labels, distinct, k=k, labels=range(5)))
    assert isinstance(value, float)
    assert isinstance(exact, float)
    assert value >= exact


def test_top_k_of_all_classes_says_nothing() -> None:
    with pytest.raises(MetricUnavailableError, match="k = 5: must be below the 5 classes"):
        top_k(TopKParams(), context_of(Predictions(np.zeros(1, np.int64), np.zeros((1, 5), np.float32))))


def test_calibration_by_hand() -> None:
    """Two images at 90 %, one of them wrong, and one at 60 %, right."""
    logits = np.log(np.array([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6]], np.float32))
    values = calibration(CalibrationParams(), context_of(Predictions(np.array([0, 1, 1]), logits)))
    assert values["error"] == pytest.approx((2 * 0.4 + 0.4) / 3, abs=1e-6)
    assert values["confidence"] == pytest.approx(0.8, abs=1e-6)
    assert values["accuracy"] == pytest.approx(2 / 3)
    by_confidence: Any = values["accuracy_by_confidence"]
    assert [value for value in by_confidence if value is not None] == [1.0, 0.5]


def test_most_confused_names_classes_and_orders_mistakes() -> None:
    matrix = np.array([[90, 3, 7], [0, 50, 0], [9, 1, 0]])
    assert most_confused(matrix, ["cat", "dog", "eel"]) == [
        "eel → cat: 9 of 10",
        "cat → eel: 7 of 100",
        "cat → dog: 3 of 100",
    ]
    assert most_confused(np.diag([1, 2, 3]), ["cat", "dog", "eel"]) == []


def test_plain_value_converts_arrays_and_tensors() -> None:
    assert plain_value(np.float64(0.5), "m.v") == 0.5
    assert plain_value(np.arange(4).reshape(2, 2), "m.v") == [[0, 1], [2, 3]]
    assert plain_value(torch.tensor([1.0, float("nan")]), "m.v") == [1.0, None]
    assert plain_value((1, "a", None, float("inf")), "m.v") == [1, "a", None, None]
    with pytest.raises(UserError, match=r"metric m\.v: a value must be a number.*not dict"):
        plain_value({}, "m.v")


def test_metric_scalars_are_the_numbers_among_the_values() -> None:
    metrics: dict[str, MetricValues] = {"m": {"mean": 0.5, "count": 3, "text": "x", "list": [1.0], "missing": None}}
    assert metric_scalars(metrics) == {"m/mean": 0.5, "m/count": 3}
