"""Schedules on a virtual clock: when a round ends, and which clients have replied by then.

Arrivals wait in an event queue, ordered by time and then by client index. The order depends only on costs and hardware
profiles, never on the clock of the machine that simulates them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

from vitfleet.config.fleet import DeadlineSchedule, Schedule


@dataclass(frozen=True)
class Arrival:
    """A client's part in a round."""

    client: int
    began: float  # virtual time at which the client was started
    ended: float  # virtual time at which it replied or was dropped
    counts: bool  # whether its reply is aggregated


def close_round(
    schedule: Schedule, wanted: int, now: float, seconds: Mapping[int, float]
) -> tuple[list[Arrival], float]:
    """Simulate one round; return one arrival per client, sorted by client, and the time at which the round ended.

    It starts ``now`` and is complete with the ``wanted`` number of replies; ``seconds`` is the duration of each
    client's work.
    """
    queue = [(now + duration, client) for client, duration in seconds.items()]
    heapify(queue)
    deadline = now + schedule.seconds if isinstance(schedule, DeadlineSchedule) else inf
    arrivals: list[Arrival] = []
    end = now
    while queue and len(arrivals) < wanted and queue[0][0] <= deadline:
        end, client = heappop(queue)
        arrivals.append(Arrival(client, now, end, counts=True))
    if queue and len(arrivals) < wanted:  # the server waited for the missing clients until the deadline
        end = deadline
    arrivals += [Arrival(client, now, end, counts=False) for _, client in queue]
    return sorted(arrivals, key=lambda arrival: arrival.client), end


@dataclass(frozen=True, order=True)
class ClientInFlight:
    """A client that trains while the server continues; ordered by the time of its reply."""

    ended: float
    client: int
    version: int  # number of rounds the server had completed when the client was started
    last_round: int  # the last round in which the server received a reply of this client; -1: never
    began: float


def collect_replies(
    in_flight: Sequence[ClientInFlight],
    wanted: int,
    now: float,
    start_client: Callable[[Sequence[ClientInFlight], float], ClientInFlight],
) -> tuple[list[ClientInFlight], list[ClientInFlight]]:
    """Collect the ``wanted`` number of replies; each client that replies is replaced by another at once.

    ``start_client`` starts that one, given all clients that train or have just replied, and the time. Return the
    clients that replied, in order of time, and those that are still training.
    """
    queue = list(in_flight)
    heapify(queue)
    replied: list[ClientInFlight] = []
    while len(replied) < wanted:
        if replied:
            heappush(queue, start_client([*queue, *replied], now))
        flight = heappop(queue)
        now = flight.ended
        replied.append(flight)
    return replied, sorted(queue)
