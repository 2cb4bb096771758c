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
    """A client's part in a round.

    Attributes
    ----------
    began
        Virtual time at which the client was started.
    ended
        Virtual time at which it replied or was dropped.
    counts
        Whether its reply is aggregated.
    """

    client: int
    began: float
    ended: float
    counts: bool


def close_round(
    schedule: Schedule, wanted: int, now: float, seconds: Mapping[int, float]
) -> tuple[list[Arrival], float]:
    """Simulate one round; return one arrival per client, sorted by client, and the time at which the round ended.

    Parameters
    ----------
    wanted
        Number of replies that complete a round.
    now
        Time at which the round starts.
    seconds
        Duration of each selected client's work.
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
    """A client that trains while the server continues; ordered by the time of its reply.

    Attributes
    ----------
    version
        Number of rounds the server had completed when the client was started.
    last_round
        The last round in which the server received a reply of this client; -1: never.
    """

    ended: float
    client: int
    version: int
    last_round: int
    began: float


def collect_replies(
    in_flight: Sequence[ClientInFlight],
    wanted: int,
    now: float,
    start_client: Callable[[Sequence[ClientInFlight], float], ClientInFlight],
) -> tuple[list[ClientInFlight], list[ClientInFlight]]:
    """Collect replies until the buffer is full; each client that replies is replaced by another at once.

    Parameters
    ----------
    wanted
        Number of replies that fill the buffer.
    start_client
        Starts another client, given all clients that train or have just replied, and the time.

    Returns
    -------
    tuple
        The clients that replied, in order of time, and those that are still training.
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
