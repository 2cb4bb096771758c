"""What a round changes: the value that the loop takes and returns, and that a checkpoint stores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from vitfleet.costs.virtual_clock import ClientInFlight
from vitfleet.message import Numbers, State
from vitfleet.run.records import RoundRecord, TaskRecord

# Names of the parts of a stored server state that hold what is in flight.
_PAST_STATE, _CLIENTS = "past-", "flights"
_COLUMNS = tuple(column.name for column in fields(ClientInFlight))


@dataclass(frozen=True)
class InFlight:
    """Work that spans rounds."""

    now: float = 0.0  # the virtual clock, in seconds since the run began
    clients: tuple[ClientInFlight, ...] = ()  # clients that are training on an earlier version of the model
    # The server states those clients started from, by version
    past_states: dict[int, State] = field(default_factory=dict)

    def pack(self, server: State) -> State:
        """Return the server state with the work in flight as additional parts, for a checkpoint."""
        if not self.clients:
            return server
        columns: dict[str, list[Any]] = {name: [getattr(client, name) for client in self.clients] for name in _COLUMNS}
        past_parts = {f"{_PAST_STATE}{version:06d}": state for version, state in self.past_states.items()}
        return replace(server, parts={**server.parts, **past_parts, _CLIENTS: State(numbers=columns)})

    @classmethod
    def unpack(cls, stored: State, now: float) -> tuple[State, InFlight]:
        """Split what :meth:`pack` returned into the server state and the work in flight."""
        server_parts = {
            name: part for name, part in stored.parts.items() if name != _CLIENTS and not is_past_state(name)
        }
        past_states = {
            int(name.removeprefix(_PAST_STATE)): part for name, part in stored.parts.items() if is_past_state(name)
        }
        columns: Any = stored.parts[_CLIENTS].numbers if _CLIENTS in stored.parts else {}
        rows = zip(*(columns.get(name, []) for name in _COLUMNS), strict=True)
        clients = tuple(ClientInFlight(*row) for row in rows)
        return replace(stored, parts=server_parts), cls(now, clients, past_states)


def is_past_state(part: str) -> bool:
    """Whether a part of a stored server state is an earlier version of it."""
    return part.startswith(_PAST_STATE)


@dataclass(frozen=True)
class RunState:
    """A run after one of its rounds.

    Attributes
    ----------
    server
        The method's state on the server.
    round
        The last finished round, 0 before the first.
    total_up_bytes, total_down_bytes
        Bytes of all messages so far, from and to clients.
    last_seen
        For each client, the last round whose update the server used.
    client_metrics
        The numbers in each of those updates.
    task_records
        One record per task learned so far.
    in_flight
        Clients that are training while the server moves on, and the virtual clock.
    update_sizes
        Sizes of the updates that were used in the last round: those of the next round are compared with them.
    moments
        What the server optimiser keeps. Methods do not see it, so no message has it.
    head_sums
        The sums from which heads of earlier tasks were solved (``head.start`` in a run on tasks).
    last_head
        The tensors of the head of ``[head.last]``, once it is solved; the server's state has the one that trained.
    stop_reason
        Why the run was stopped early; ``None`` if it was not.
    awaits_start
        Whether the run begins with a head that is still to be solved (``head.start``).
    """

    server: State
    round: int = 0
    total_up_bytes: int = 0
    total_down_bytes: int = 0
    last_seen: Mapping[int, int] = field(default_factory=dict)
    client_metrics: Mapping[int, Numbers] = field(default_factory=dict)
    task_records: tuple[TaskRecord, ...] = ()
    in_flight: InFlight = field(default_factory=InFlight)
    update_sizes: tuple[float, ...] = ()
    moments: State = field(default_factory=State)
    head_sums: State = field(default_factory=State)
    last_head: State = field(default_factory=State)
    stop_reason: str | None = None
    awaits_start: bool = False

    def is_finished(self, rounds: int) -> bool:
        """Whether a run of so many rounds has none left, or was stopped early."""
        return self.round >= rounds or self.stop_reason is not None

    def with_history(self, records: Iterable[RoundRecord]) -> RunState:
        """Return the state with what a checkpoint leaves to the records: client metrics and task records."""
        client_metrics: dict[int, Numbers] = {}
        task_records: list[TaskRecord] = []
        for record in records:
            if record.round > self.round:
                break
            if record.task is not None:
                task_records.append(record.task)
            client_metrics |= {client.client: client.numbers for client in record.clients if client.failure is None}
        # A client that lost its state counts as new: it is no longer in `last_seen`.
        seen = {client: numbers for client, numbers in client_metrics.items() if client in self.last_seen}
        return replace(self, client_metrics=seen, task_records=tuple(task_records))
