from __future__ import annotations

from collections.abc import Sequence

import pytest

from vitfleet.config.fleet import DeadlineSchedule, OverSelectionSchedule, SynchronousSchedule
from vitfleet.costs.virtual_clock import ClientInFlight, close_round, collect_replies

SECONDS = {0: 5.0, 1: 1.0, 2: 9.0, 3: 2.0}


def test_synchronous_round_lasts_as_long_as_its_slowest_client() -> None:
    arrivals, end = close_round(SynchronousSchedule(), 4, 100.0, SECONDS)
    assert end == 109.0
    assert [arrival.client for arrival in arrivals] == [0, 1, 2, 3]
    assert [arrival.ended for arrival in arrivals] == [105.0, 101.0, 109.0, 102.0]
    assert all(arrival.counts and arrival.began == 100.0 for arrival in arrivals)


@pytest.mark.parametrize(
    ("deadline", "in_time", "end"),
    [(6.0, {0, 1, 3}, 106.0), (5.0, {0, 1, 3}, 105.0), (0.5, set(), 100.5), (50.0, {0, 1, 2, 3}, 109.0)],
)
def test_deadline_drops_late_clients(deadline: float, in_time: set[int], end: float) -> None:
    arrivals, ended = close_round(DeadlineSchedule(seconds=deadline), 4, 100.0, SECONDS)
    assert ended == end
    assert {arrival.client for arrival in arrivals if arrival.counts} == in_time
    assert all(arrival.ended == end for arrival in arrivals if not arrival.counts)


def test_over_selection_accepts_the_first_replies() -> None:
    arrivals, end = close_round(OverSelectionSchedule(), 2, 100.0, SECONDS)
    assert end == 102.0
    assert {arrival.client for arrival in arrivals if arrival.counts} == {1, 3}


def test_close_round_breaks_ties_by_client_index() -> None:
    arrivals, _ = close_round(OverSelectionSchedule(), 2, 0.0, {4: 1.0, 2: 1.0, 3: 1.0})
    assert {arrival.client for arrival in arrivals if arrival.counts} == {2, 3}


def test_round_without_clients_takes_no_time() -> None:
    assert close_round(DeadlineSchedule(seconds=5), 3, 7.0, {}) == ([], 7.0)


def test_collect_replies_starts_a_client_after_each_reply() -> None:
    """Three clients train at a time; each reply before the buffer is full starts another client."""
    in_flight = [ClientInFlight(ended, client, 0, -1, 0.0) for client, ended in ((0, 4.0), (1, 1.0), (2, 9.0))]
    started: list[tuple[set[int], float]] = []

    def start_client(busy: Sequence[ClientInFlight], now: float) -> ClientInFlight:
        started.append(({flight.client for flight in busy}, now))
        return ClientInFlight(now + 1.0, 3 + len(started), 0, -1, now)

    replied, training = collect_replies(in_flight, 3, 0.0, start_client)
    # Client 1 replies at 1; client 4 starts and replies at 2; client 5 starts and replies at 3: before 0 and 2.
    assert [(flight.client, flight.ended) for flight in replied] == [(1, 1.0), (4, 2.0), (5, 3.0)]
    assert [flight.client for flight in training] == [0, 2]
    # Clients that have replied count as busy until the server's next round.
    assert started == [({0, 1, 2}, 1.0), ({0, 1, 2, 4}, 2.0)]
