"""Clients that are still training when a round ends (buffered schedule), and the virtual clock."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from vitfleet.costs.virtual_clock import ClientInFlight
from vitfleet.message import State

# Names of the parts of a stored server state that hold what is in flight.
_PAST_STATE, _CLIENTS = "past-", "flights"
_COLUMNS = ("ended", "client", "version", "last_round", "began")  # the fields of ClientInFlight, in order


@dataclass(frozen=True)
class InFlight:
    """Work that spans rounds.

    Attributes
    ----------
    now
        The virtual clock, in seconds since the run began.
    clients
        Clients that are training on an earlier version of the model.
    past_states
        The server states those clients started from, by version.
    """

    now: float = 0.0
    clients: tuple[ClientInFlight, ...] = ()
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
