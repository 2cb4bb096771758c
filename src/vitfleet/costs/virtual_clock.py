"""Schedules by a virtual clock: when a round ends, and whose answers are in by then.

Arrivals wait in an event queue, ordered by their time and, of equals, by client: what happens depends on costs and
devices, never on the clock of the machine that simulates them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

from vitfleet.config.fleet import ScheduleConfig


@dataclass(frozen=True)
class Arrival:
    """A client's part in a round: when it was asked, when it was done or given up, and whether it counts."""

    client: int
    began: float
    ended: float
    counts: bool


def close_round(
    schedule: ScheduleConfig, wanted: int, now: float, seconds: Mapping[int, float]
) -> tuple[list[Arrival], float]:
    """Let a round's clients race, and return how each fared and when the round ended.

    Parameters
    ----------
    wanted
        How many answers make a round.
    seconds
        How long each asked client takes.
    """
    queue = [(now + duration, client) for client, duration in seconds.items()]
    heapify(queue)
    closing = now + schedule.seconds if schedule.kind == "deadline" else inf
    arrivals: list[Arrival] = []
    end = now
    while queue and len(arrivals) < wanted and queue[0][0] <= closing:
        end, client = heappop(queue)
        arrivals.append(Arrival(client, now, end, counts=True))
    if queue and len(arrivals) < wanted:  # somebody was waited for until the deadline
        end = closing
    arrivals += [Arrival(client, now, end, counts=False) for _, client in queue]
    return sorted(arrivals, key=lambda arrival: arrival.client), end


@dataclass(frozen=True, order=True)
class ClientInFlight:
    """A client that trains while the server moves on; ordered by when it answers.

    Attributes
    ----------
    version
        How many rounds the server had behind it when the client was asked.
    since
        The round in which the server had last heard from it; -1: never.
    """

    ended: float
    client: int
    version: int
    last_round: int
    began: float


def land(
    flights: Sequence[ClientInFlight],
    wanted: int,
    now: float,
    board: Callable[[Sequence[ClientInFlight], float], ClientInFlight],
) -> tuple[list[ClientInFlight], list[ClientInFlight]]:
    """Let clients answer until the buffer is full, each replaced by another at once.

    Parameters
    ----------
    board
        Sends a client off, given all that are under way or have just landed, and the time.

    Returns
    -------
    tuple
        Those that landed, in order, and those still under way.
    """
    queue = list(flights)
    heapify(queue)
    landed: list[ClientInFlight] = []
    while len(landed) < wanted:
        if landed:
            heappush(queue, board([*queue, *landed], now))
        flight = heappop(queue)
        now = flight.ended
        landed.append(flight)
    return landed, sorted(queue)
