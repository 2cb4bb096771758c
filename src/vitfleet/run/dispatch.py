"""Who is asked in a round, what they are sent, and, where the fleet has devices, when they answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitfleet.config.schema import BufferedSchedule, Config, DeviceName, FleetConfig
from vitfleet.errors import UserError
from vitfleet.files import write_atomically
from vitfleet.fleet.clock import Flight, close_round, land
from vitfleet.fleet.devices import DEVICES, MEGABYTE, Trip, deal_devices, trip_seconds
from vitfleet.message import Message, Numbers, State
from vitfleet.methods.base import Method
from vitfleet.randomness import Address, Purpose
from vitfleet.run.costs import Costing, message_size

TOO_LATE = "too late"
_PAST, _FLIGHTS = "past-", "flights"
_COLUMNS = ("ended", "client", "version", "since", "began")  # in the order of a flight's own


@dataclass(frozen=True)
class Turn:
    """One client's part in a round, before it trains.

    Attributes
    ----------
    down_bytes
        Of the message, and of what it is given at its first contact.
    began, ended
        By the virtual clock, where there is one.
    failure
        Why it is not asked, or not waited for.
    staleness
        How many versions old the server's message is.
    since
        The last round in which the server heard from this client; ``None`` if it never did.
    """

    client: int
    down: Message
    down_bytes: int
    since: int | None
    began: float | None = None
    ended: float | None = None
    failure: str | None = None
    staleness: int = 0


@dataclass(frozen=True)
class VirtualFleet:
    """The devices that clients are thought to be.

    Attributes
    ----------
    devices
        Each client's.
    memory_bytes
        What a client's training needs.
    labels
        Returns the labels of what a client trains on in a round.
    """

    config: FleetConfig
    devices: Sequence[DeviceName]
    memory_bytes: int
    costing: Costing
    labels: Callable[[int, int], NDArray[np.int64]]

    def seconds(self, round: int, stage: int, client: int, down_bytes: int, said: Numbers | None) -> float:
        """Return how long a client takes to receive, train and send, from costs alone.

        Parameters
        ----------
        said
            What it said of itself when the server last heard from it; ``None`` if it never did.
        """
        labels = self.labels(client, round)
        rehearsal = self.costing.rehearse(round, client, labels, stage, said)
        flops = self.costing.round_flops(rehearsal, len(labels))
        trip = Trip(down_bytes, flops, self.costing.up_bytes(rehearsal))
        line = None if self.config.bandwidth is None else self.config.bandwidth * MEGABYTE
        return trip_seconds(DEVICES[self.devices[client]], trip, line)

    def trouble(self, client: int) -> str | None:
        """Say why a client cannot train at all; ``None`` if it can."""
        device = DEVICES[self.devices[client]]
        if device.holds(self.memory_bytes):
            return None
        return f"out of memory: training needs {self.memory_bytes / 2**30:.2f} GiB, it is a {device.title}"

    @property
    def able(self) -> list[int]:
        """The clients that can train."""
        return [client for client in range(len(self.devices)) if self.trouble(client) is None]

    def write(self, folder: Path) -> None:
        """Write down who is what, for the report."""
        lost = sorted(set(range(len(self.devices))) - set(self.able))
        tree = {"clients": list(self.devices), "peak_memory_bytes": self.memory_bytes, "out_of_memory": lost}
        write_atomically(folder / "devices.json", json.dumps(tree).encode())


@dataclass(frozen=True)
class Traffic:
    """What is under way between rounds.

    Attributes
    ----------
    now
        The virtual clock.
    flights
        Clients that train while the server moves on (buffered schedule).
    past
        The server's earlier states that they were sent from, by version.
    """

    now: float = 0.0
    flights: tuple[Flight, ...] = ()
    past: dict[int, State] = field(default_factory=dict)

    def pack(self, server: State) -> State:
        """Put what is under way beside the server's own parts, for a checkpoint."""
        if not self.flights:
            return server
        columns: dict[str, list[Any]] = {name: [getattr(flight, name) for flight in self.flights] for name in _COLUMNS}
        old = {f"{_PAST}{version:06d}": state for version, state in self.past.items()}
        return replace(server, parts={**server.parts, **old, _FLIGHTS: State(numbers=columns)})

    @classmethod
    def unpack(cls, stored: State, now: float) -> tuple[State, Traffic]:
        """Take apart what :meth:`pack` put together."""
        own = {name: part for name, part in stored.parts.items() if name != _FLIGHTS and not name.startswith(_PAST)}
        past = {int(name.removeprefix(_PAST)): part for name, part in stored.parts.items() if name.startswith(_PAST)}
        columns: Any = stored.parts[_FLIGHTS].numbers if _FLIGHTS in stored.parts else {}
        rows = zip(*(columns.get(name, []) for name in _COLUMNS), strict=True)
        return replace(stored, parts=own), cls(now, tuple(Flight(*row) for row in rows), past)


@dataclass(frozen=True)
class Dispatch:
    """Sends clients off: what a round's turns are made from."""

    config: Config
    method: Method[Any]
    base: Message
    virtual: VirtualFleet | None

    def turns(
        self, server: State, heard: Mapping[int, int], said: Mapping[int, Numbers], traffic: Traffic, round: int
    ) -> tuple[list[Turn], Traffic]:
        """Return a round's turns, in the order of the clients, and what is under way after it.

        Parameters
        ----------
        heard, said
            The round in which the server last heard from a client, and what that said of itself.
        """
        schedule = self.config.fleet.schedule
        if isinstance(schedule, BufferedSchedule):
            return self._buffered(schedule, server, heard, said, traffic, round)
        turns = [self._turn(server, round, one, heard.get(one)) for one in choose_clients(self.config, round)]
        if self.virtual is None:
            return turns, traffic
        virtual = self.virtual
        troubles = {turn.client: virtual.trouble(turn.client) for turn in turns}
        seconds = {
            turn.client: virtual.seconds(
                round, self.config.stage(round), turn.client, turn.down_bytes, said.get(turn.client)
            )
            for turn in turns
            if troubles[turn.client] is None
        }
        arrivals, end = close_round(schedule, self.config.fleet.per_round, traffic.now, seconds)
        by_client = {arrival.client: arrival for arrival in arrivals}
        played = []
        for turn in turns:
            arrival, trouble = by_client.get(turn.client), troubles[turn.client]
            if arrival is None:
                played.append(replace(turn, failure=trouble, down_bytes=0))
                continue
            late = f"{TOO_LATE}: it takes {seconds[turn.client]:.3g} virtual seconds, the round was over after "
            failure = None if arrival.counts else f"{late}{end - traffic.now:.3g}"
            played.append(replace(turn, began=arrival.began, ended=arrival.ended, failure=failure))
        return played, Traffic(end)

    def _turn(self, server: State, round: int, client: int, since: int | None) -> Turn:
        down = self.method.instruct(server, round, client, since)
        first = message_size(self.base) if since is None else 0
        return Turn(client, down, message_size(down) + first, since)

    def _buffered(
        self,
        schedule: BufferedSchedule,
        server: State,
        heard: Mapping[int, int],
        said: Mapping[int, Numbers],
        traffic: Traffic,
        round: int,
    ) -> tuple[list[Turn], Traffic]:
        virtual = self.virtual
        assert virtual is not None  # the configuration says so
        version = round - 1
        able = virtual.able
        if len(able) < schedule.concurrency + self.config.fleet.per_round:
            raise UserError(
                f"fleet.schedule.concurrency = {schedule.concurrency}: only {len(able)} clients have memory enough to "
                "train; ask for fewer, or choose other fleet.devices"
            )
        boarded = 0

        def board(busy: Sequence[Flight], at: float) -> Flight:
            nonlocal boarded
            idle = sorted(set(able) - {flight.client for flight in busy})
            rng = Address(self.config.seed, Purpose.SAMPLE_CLIENTS, round, boarded).generator()
            boarded += 1
            client = idle[int(rng.integers(len(idle)))]
            since = heard.get(client)
            turn = self._turn(server, round, client, since)
            stage = self.config.stage(round)
            ended = at + virtual.seconds(round, stage, client, turn.down_bytes, said.get(client))
            return Flight(ended, client, version, -1 if since is None else since, at)

        flights = list(traffic.flights)
        while len(flights) < schedule.concurrency:
            flights.append(board(flights, traffic.now))
        landed, flying = land(flights, self.config.fleet.per_round, traffic.now, board)
        past = {**traffic.past, version: State(server.tensors, server.numbers)}
        turns = []
        for flight in sorted(landed, key=lambda flight: flight.client):
            since = None if flight.since < 0 else flight.since
            turn = self._turn(past[flight.version], flight.version + 1, flight.client, since)
            behind = version - flight.version
            turns.append(replace(turn, staleness=behind, began=flight.began, ended=flight.ended))
        needed = {flight.version for flight in flying}
        kept = {version: state for version, state in past.items() if version in needed}
        return turns, Traffic(landed[-1].ended, tuple(flying), kept)


def choose_clients(config: Config, round: int) -> list[int]:
    """Draw a round's clients, without replacement, in ascending order."""
    rng = Address(config.seed, Purpose.SAMPLE_CLIENTS, round).generator()
    chosen = rng.choice(config.fleet.clients, config.fleet.asked, replace=False)
    return [int(client) for client in np.sort(chosen)]


def virtual_fleet(
    config: Config, memory_bytes: Callable[[], int], costing: Costing, labels: Callable[[int, int], NDArray[np.int64]]
) -> VirtualFleet | None:
    """Return the devices that a configuration gives its clients; ``None`` if it gives them none."""
    fleet = config.fleet
    if not fleet.devices:
        return None
    devices = deal_devices(fleet.devices, fleet.clients, config.seed)
    return VirtualFleet(fleet, devices, memory_bytes(), costing, labels)


def freshen(up: Message, turn: Turn, server: State, schedule: BufferedSchedule) -> Message:
    """Bring an answer that is ``s`` versions late up to date: its change, (1 + s)^−a as much, on the server's weights.

    FedBuff adds the changes of weights, whatever they started from. What is no weight that the server sent (features,
    numbers) is taken as it came.
    """
    if not turn.staleness:
        return up
    scale = (1 + turn.staleness) ** -schedule.staleness
    tensors = {
        name: (server.tensors[name] + scale * (tensor - turn.down.tensors[name])).to(tensor.dtype)
        if name in turn.down.tensors and name in server.tensors
        else tensor
        for name, tensor in up.tensors.items()
    }
    return Message(tensors, up.numbers)
