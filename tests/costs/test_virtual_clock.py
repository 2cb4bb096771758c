from __future__ import annotations

from collections.abc import Sequence

import pytest

from vitfleet.config.fleet import DeadlineSchedule, OverSelectionSchedule, SynchronousSchedule
from vitfleet.costs.virtual_clock import ClientInFlight, close_round, land

SECONDS = {0: 5.0, 1: 1.0, 2: 9.0, 3: 2.0}


def test_a_synchronous_round_lasts_as_long_as_its_slowest_client() -> None:
    arrivals, end = close_round(SynchronousSchedule(), 4, 100.0, SECONDS)
    assert end == 109.0
    assert [arrival.client for arrival in arrivals] == [0, 1, 2, 3]
    assert [arrival.ended for arrival in arrivals] == [105.0, 101.0, 109.0, 102.0]
    assert all(arrival.counts and arrival.began == 100.0 for arrival in arrivals)


@pytest.mark.parametrize(
    ("deadline", "in_time", "end"),
    [(6.0, {0, 1, 3}, 106.0), (5.0, {0, 1, 3}, 105.0), (0.5, set(), 100.5), (50.0, {0, 1, 2, 3}, 109.0)],
)
def test_a_deadline_leaves_out_who_is_later(deadline: float, in_time: set[int], end: float) -> None:
    arrivals, ended = close_round(DeadlineSchedule(seconds=deadline), 4, 100.0, SECONDS)
    assert ended == end
    assert {arrival.client for arrival in arrivals if arrival.counts} == in_time
    assert all(arrival.ended == end for arrival in arrivals if not arrival.counts)


def test_over_selection_takes_the_first_answers() -> None:
    arrivals, end = close_round(OverSelectionSchedule(), 2, 100.0, SECONDS)
    assert end == 102.0
    assert {arrival.client for arrival in arrivals if arrival.counts} == {1, 3}


def test_of_equals_the_smaller_client_comes_first() -> None:
    arrivals, _ = close_round(OverSelectionSchedule(), 2, 0.0, {4: 1.0, 2: 1.0, 3: 1.0})
    assert {arrival.client for arrival in arrivals if arrival.counts} == {2, 3}


def test_a_round_without_clients_takes_no_time() -> None:
    assert close_round(DeadlineSchedule(seconds=5), 3, 7.0, {}) == ([], 7.0)


def test_the_buffer_fills_while_others_take_off() -> None:
    """Three in the air; each that lands before the buffer is full makes room for another."""
    flights = [ClientInFlight(ended, client, 0, -1, 0.0) for client, ended in ((0, 4.0), (1, 1.0), (2, 9.0))]
    boarded: list[tuple[set[int], float]] = []

    def board(busy: Sequence[ClientInFlight], at: float) -> ClientInFlight:
        boarded.append(({flight.client for flight in busy}, at))
        return ClientInFlight(at + 1.0, 3 + len(boarded), 0, -1, at)

    landed, flying = land(flights, 3, 0.0, board)
    # 1 lands at 1, 4 takes off and lands at 2, 5 takes off and lands at 3: before 0 and 2.
    assert [(flight.client, flight.ended) for flight in landed] == [(1, 1.0), (4, 2.0), (5, 3.0)]
    assert [flight.client for flight in flying] == [0, 2]
    # Who has landed is not sent off again before the server has moved.
    assert boarded == [({0, 1, 2}, 1.0), ({0, 1, 2, 4}, 2.0)]
