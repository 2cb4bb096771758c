"""ClientIndices: construction, lookup by client and task, counts."""

from __future__ import annotations

import numpy as np
import pytest

from vitfleet.data.partitions.client_indices import ClientIndices


def test_client_indices_are_addressed_by_client_and_task() -> None:
    indices = ClientIndices(np.arange(6), np.array([0, 1, 3, 3, 6]), num_tasks=2)
    assert indices.num_clients == 2
    assert [indices.for_client(client, task).tolist() for client in range(2) for task in range(2)] == [
        [0],
        [1, 2],
        [],
        [3, 4, 5],
    ]
    assert [indices.all_tasks().for_client(client).tolist() for client in range(2)] == [[0, 1, 2], [3, 4, 5]]
    assert [indices.up_to_task(client, task).tolist() for client in range(2) for task in range(2)] == [
        [0],
        [0, 1, 2],
        [],
        [3, 4, 5],
    ]
    assert indices.class_counts(np.array([0, 1, 1, 0, 0, 0]), 2).tolist() == [[1, 2], [3, 0]]


def test_client_indices_from_lists_keep_their_order() -> None:
    indices = ClientIndices.from_lists([np.array([4, 1]), np.array([], np.int64), np.array([3]), np.array([0, 2])], 2)
    assert indices.offsets.tolist() == [0, 2, 2, 3, 5]
    assert indices.for_client(0).tolist() == [4, 1]
    assert indices.for_client(1, 1).tolist() == [0, 2]
    assert indices.is_exact_cover()


def test_client_indices_from_owners_are_sorted_within_a_client() -> None:
    indices = ClientIndices.from_owners(np.array([2, 0, 2, 0]), 3)
    assert [indices.for_client(client).tolist() for client in range(3)] == [[1, 3], [], [0, 2]]


def test_empty_client_indices_have_every_client_and_task() -> None:
    indices = ClientIndices.empty(3, 2)
    assert (indices.num_clients, indices.num_tasks, indices.num_samples) == (3, 2, 0)
    assert indices.for_client(2, 1).tolist() == []


def test_for_client_rejects_clients_and_tasks_out_of_range() -> None:
    indices = ClientIndices.empty(3, 2)
    for client in (-1, 3):
        with pytest.raises(IndexError, match=f"client {client}: there are 3 clients"):
            indices.for_client(client)
    with pytest.raises(IndexError, match="task 2: there are 2 tasks"):
        indices.for_client(0, 2)
    with pytest.raises(IndexError, match="task 2: there are 2 tasks"):
        indices.up_to_task(0, 2)


@pytest.mark.parametrize("samples", [[0, 0, 2], [0, 1, 3], [1, 2, 3]], ids=str)
def test_is_exact_cover_rejects_missing_and_repeated_samples(samples: list[int]) -> None:
    assert not ClientIndices(np.array(samples), np.array([0, 3])).is_exact_cover()


@pytest.mark.parametrize("offsets", [[], [0, 2], [1, 3], [0, 2, 1, 3]], ids=str)
def test_is_exact_cover_rejects_offsets_that_do_not_fit(offsets: list[int]) -> None:
    assert not ClientIndices(np.arange(3), np.array(offsets)).is_exact_cover()
