"""Metrics against scikit-learn and numbers computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import confusion_matrix as sklearn_confusion_matrix

from vitfleet.errors import UserError
from vitfleet.fleet.base import EvalResult
from vitfleet.run.evaluate.metric_context import Predictions, plain_value
from vitfleet.run.evaluate.metrics import accuracy_distribution, confusion_matrix, most_confused
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


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1))
def test_confusion_matrix_matches_scikit_learn(pairs: list[tuple[int, int]]) -> None:
    labels, predicted = np.array(pairs, dtype=np.int64).T
    expected = sklearn_confusion_matrix(labels, predicted, labels=range(5))
    assert np.array_equal(confusion_matrix(Predictions(labels, predicted), 5), expected)


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
