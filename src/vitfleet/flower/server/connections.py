"""The connections of a proxy, and which of them have to go: a stranger must not keep registered clients out.

Anyone can open connections and then say nothing, or very little. Each state of a connection has a time limit, and the
number of connections is limited. When it is reached, a new connection takes the place of one that never had a request
accepted, from the address that has most of these.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

#: Address and port of the other side.
Peer: TypeAlias = tuple[str, int]


class Phase(Enum):
    """What a connection is doing."""

    HANDSHAKE = "TLS handshake"
    WAITING = "waiting for a request's headers"
    REQUEST = "request and reply"


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of a proxy's connections."""

    total: int = 1000  # number of connections
    # How long a connection may be in each phase. The largest request, 2 MiB, may arrive at 18 kB/s.
    handshake_s: float = 10.0
    waiting_s: float = 15.0
    request_s: float = 120.0

    def seconds(self, phase: Phase) -> float:
        """Return the time limit of a phase."""
        return {Phase.HANDSHAKE: self.handshake_s, Phase.WAITING: self.waiting_s, Phase.REQUEST: self.request_s}[phase]


@dataclass(eq=False)
class Connection:
    """One connection. It is not identified by its peer: a new one may have the port of one that is just ending."""

    peer: Peer
    close: Callable[[], object]  # ends it at once
    is_closed: Callable[[], bool]  # whether it has ended
    since: float
    phase: Phase = Phase.HANDSHAKE
    known: bool = False  # whether a request on it was accepted, so that its other side has a registered key


@dataclass
class ConnectionTable:
    """All connections of a proxy."""

    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    clock: Callable[[], float] = time.monotonic
    _connections: set[Connection] = field(default_factory=set, init=False, repr=False)

    def __len__(self) -> int:
        return len(self._connections)

    def add(self, peer: Peer, close: Callable[[], object], is_closed: Callable[[], bool]) -> Connection | None:
        """Add a new connection; ``None`` if there is no room for it, which only accepted clients can cause."""
        if len(self) >= self.limits.total:
            self.sweep()
        if len(self) >= self.limits.total and not self.evict():
            return None
        connection = Connection(peer, close, is_closed, self.clock())
        self._connections.add(connection)
        return connection

    def opened(self, connection: Connection, close: Callable[[], object]) -> None:
        """Note that a connection's handshake is over, and how it is closed from now on."""
        connection.close = close
        self._enter(connection, Phase.WAITING)

    def begin_request(self, connection: Connection) -> None:
        """Note that a request's headers have arrived."""
        self._enter(connection, Phase.REQUEST)

    def end_request(self, connection: Connection, accepted: bool) -> None:
        """Note that a reply was sent."""
        connection.known |= accepted
        self._enter(connection, Phase.WAITING)

    def remove(self, connection: Connection) -> None:
        """Forget a connection that has ended."""
        self._connections.discard(connection)

    def sweep(self) -> None:
        """Forget the connections that have ended, and close those that have been in one phase for too long."""
        now = self.clock()
        for connection in list(self._connections):
            if connection.is_closed():
                self.remove(connection)
            elif now - connection.since > self.limits.seconds(connection.phase):
                self._close(connection)

    def evict(self) -> bool:
        """Close one connection; ``False`` if all belong to clients in the middle of a request."""
        strangers = [connection for connection in self._connections if not connection.known]
        per_address = Counter(connection.peer[0] for connection in strangers)
        idle = [connection for connection in self._connections if connection.phase is not Phase.REQUEST]
        if strangers:
            self._close(max(strangers, key=lambda connection: (per_address[connection.peer[0]], -connection.since)))
        elif idle:  # its client connects again
            self._close(min(idle, key=lambda connection: connection.since))
        else:
            return False
        return True

    def _enter(self, connection: Connection, phase: Phase) -> None:
        connection.phase, connection.since = phase, self.clock()

    def _close(self, connection: Connection) -> None:
        self.remove(connection)
        connection.close()
