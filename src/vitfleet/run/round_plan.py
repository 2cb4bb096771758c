"""Who is asked in a round, what they are sent, and, where the fleet has devices, when they answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitfleet.config.fleet import BufferedSchedule, DeviceName
from vitfleet.config.schema import Config, FleetConfig
from vitfleet.costs.flops import CostModel, message_size
from vitfleet.costs.hardware_profiles import (
    HARDWARE_PROFILES,
    MEGABYTE,
    RoundWorkload,
    assign_hardware,
    workload_seconds,
)
from vitfleet.costs.virtual_clock import ClientInFlight, close_round, land
from vitfleet.errors import UserError
from vitfleet.files import write_atomically
from vitfleet.message import Message, Numbers, State
from vitfleet.methods.base import Method
from vitfleet.randomness import Address, Purpose

TOO_LATE = "too late"
_PAST, _FLIGHTS = "past-", "flights"
_COLUMNS = ("ended", "client", "version", "last_round", "began")  # in the order of a flight's own


@dataclass(frozen=True)
class ClientPlan:
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
    message: Message
    down_bytes: int
    last_round: int | None
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
    cost_model: CostModel
    labels: Callable[[int, int], NDArray[np.int64]]

    def seconds(
        self, round: int, task_index: int, client: int, down_bytes: int, client_metrics: Numbers | None
    ) -> float:
        """Return how long a client takes to receive, train and send, from costs alone.

        Parameters
        ----------
        said
            What it said of itself when the server last heard from it; ``None`` if it never did.
        """
        labels = self.labels(client, round)
        dry_run_result = self.cost_model.dry_run(round, client, labels, task_index, client_metrics)
        flops = self.cost_model.round_flops(dry_run_result, len(labels))
        workload = RoundWorkload(down_bytes, flops, self.cost_model.up_bytes(dry_run_result))
        line = None if self.config.bandwidth is None else self.config.bandwidth * MEGABYTE
        return workload_seconds(HARDWARE_PROFILES[self.devices[client]], workload, line)

    def failure_reason(self, client: int) -> str | None:
        """Say why a client cannot train at all; ``None`` if it can."""
        device = HARDWARE_PROFILES[self.devices[client]]
        if device.holds(self.memory_bytes):
            return None
        return f"out of memory: training needs {self.memory_bytes / 2**30:.2f} GiB, it is a {device.title}"

    @property
    def usable_clients(self) -> list[int]:
        """The clients that can train."""
        return [client for client in range(len(self.devices)) if self.failure_reason(client) is None]

    def write(self, folder: Path) -> None:
        """Write down who is what, for the report."""
        lost = sorted(set(range(len(self.devices))) - set(self.usable_clients))
        tree = {"clients": list(self.devices), "peak_memory_bytes": self.memory_bytes, "out_of_memory": lost}
        write_atomically(folder / "devices.json", json.dumps(tree).encode())


@dataclass(frozen=True)
class InFlight:
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
    clients: tuple[ClientInFlight, ...] = ()
    past_states: dict[int, State] = field(default_factory=dict)

    def pack(self, server: State) -> State:
        """Put what is under way beside the server's own parts, for a checkpoint."""
        if not self.clients:
            return server
        columns: dict[str, list[Any]] = {name: [getattr(flight, name) for flight in self.clients] for name in _COLUMNS}
        old = {f"{_PAST}{version:06d}": state for version, state in self.past_states.items()}
        return replace(server, parts={**server.parts, **old, _FLIGHTS: State(numbers=columns)})

    @classmethod
    def unpack(cls, stored: State, now: float) -> tuple[State, InFlight]:
        """Take apart what :meth:`pack` put together."""
        own = {name: part for name, part in stored.parts.items() if name != _FLIGHTS and not name.startswith(_PAST)}
        past = {int(name.removeprefix(_PAST)): part for name, part in stored.parts.items() if name.startswith(_PAST)}
        columns: Any = stored.parts[_FLIGHTS].numbers if _FLIGHTS in stored.parts else {}
        rows = zip(*(columns.get(name, []) for name in _COLUMNS), strict=True)
        return replace(stored, parts=own), cls(now, tuple(ClientInFlight(*row) for row in rows), past)


@dataclass(frozen=True)
class RoundPlanner:
    """Sends clients off: what a round's turns are made from."""

    config: Config
    method: Method[Any]
    base: Message
    virtual: VirtualFleet | None

    def turns(
        self,
        server: State,
        last_seen: Mapping[int, int],
        client_metrics: Mapping[int, Numbers],
        traffic: InFlight,
        round: int,
    ) -> tuple[list[ClientPlan], InFlight]:
        """Return a round's turns, in the order of the clients, and what is under way after it.

        Parameters
        ----------
        heard, said
            The round in which the server last heard from a client, and what that said of itself.
        """
        schedule = self.config.fleet.schedule
        if isinstance(schedule, BufferedSchedule):
            return self._buffered(schedule, server, last_seen, client_metrics, traffic, round)
        turns = [self._turn(server, round, one, last_seen.get(one)) for one in choose_clients(self.config, round)]
        if self.virtual is None:
            return turns, traffic
        virtual = self.virtual
        troubles = {turn.client: virtual.failure_reason(turn.client) for turn in turns}
        seconds = {
            turn.client: virtual.seconds(
                round, self.config.task_index(round), turn.client, turn.down_bytes, client_metrics.get(turn.client)
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
        return played, InFlight(end)

    def _turn(self, server: State, round: int, client: int, last_round: int | None) -> ClientPlan:
        down = self.method.client_message(server, round, client, last_round)
        first = message_size(self.base) if last_round is None else 0
        return ClientPlan(client, down, message_size(down) + first, last_round)

    def _buffered(
        self,
        schedule: BufferedSchedule,
        server: State,
        last_seen: Mapping[int, int],
        client_metrics: Mapping[int, Numbers],
        traffic: InFlight,
        round: int,
    ) -> tuple[list[ClientPlan], InFlight]:
        virtual = self.virtual
        assert virtual is not None  # the configuration says so
        version = round - 1
        able = virtual.usable_clients
        if len(able) < schedule.concurrency + self.config.fleet.per_round:
            raise UserError(
                f"fleet.schedule.concurrency = {schedule.concurrency}: only {len(able)} clients have memory enough to "
                "train; ask for fewer, or choose other fleet.devices"
            )
        boarded = 0

        def board(busy: Sequence[ClientInFlight], at: float) -> ClientInFlight:
            nonlocal boarded
            idle = sorted(set(able) - {flight.client for flight in busy})
            rng = Address(self.config.seed, Purpose.SAMPLE_CLIENTS, round, boarded).generator()
            boarded += 1
            client = idle[int(rng.integers(len(idle)))]
            last_round = last_seen.get(client)
            turn = self._turn(server, round, client, last_round)
            task_index = self.config.task_index(round)
            ended = at + virtual.seconds(round, task_index, client, turn.down_bytes, client_metrics.get(client))
            return ClientInFlight(ended, client, version, -1 if last_round is None else last_round, at)

        flights = list(traffic.clients)
        while len(flights) < schedule.concurrency:
            flights.append(board(flights, traffic.now))
        landed, flying = land(flights, self.config.fleet.per_round, traffic.now, board)
        past = {**traffic.past_states, version: State(server.tensors, server.numbers)}
        turns = []
        for flight in sorted(landed, key=lambda flight: flight.client):
            last_round = None if flight.last_round < 0 else flight.last_round
            turn = self._turn(past[flight.version], flight.version + 1, flight.client, last_round)
            behind = version - flight.version
            turns.append(replace(turn, staleness=behind, began=flight.began, ended=flight.ended))
        needed = {flight.version for flight in flying}
        kept = {version: state for version, state in past.items() if version in needed}
        return turns, InFlight(landed[-1].ended, tuple(flying), kept)


def choose_clients(config: Config, round: int) -> list[int]:
    """Draw a round's clients, without replacement, in ascending order."""
    rng = Address(config.seed, Purpose.SAMPLE_CLIENTS, round).generator()
    chosen = rng.choice(config.fleet.clients, config.fleet.asked, replace=False)
    return [int(client) for client in np.sort(chosen)]


def virtual_fleet(
    config: Config,
    memory_bytes: Callable[[], int],
    cost_model: CostModel,
    labels: Callable[[int, int], NDArray[np.int64]],
) -> VirtualFleet | None:
    """Return the devices that a configuration gives its clients; ``None`` if it gives them none."""
    fleet = config.fleet
    if not fleet.devices:
        return None
    devices = assign_hardware(fleet.devices, fleet.clients, config.seed)
    return VirtualFleet(fleet, devices, memory_bytes(), cost_model, labels)


def apply_staleness(up: Message, turn: ClientPlan, server: State, schedule: BufferedSchedule) -> Message:
    """Bring an answer that is ``s`` versions late up to date: its change, (1 + s)^−a as much, on the server's weights.

    FedBuff adds the changes of weights, whatever they started from. What is no weight that the server sent (features,
    numbers) is taken as it came.
    """
    if not turn.staleness:
        return up
    scale = (1 + turn.staleness) ** -schedule.staleness
    tensors = {
        name: (server.tensors[name] + scale * (tensor - turn.message.tensors[name])).to(tensor.dtype)
        if name in turn.message.tensors and name in server.tensors
        else tensor
        for name, tensor in up.tensors.items()
    }
    return Message(tensors, up.numbers)
