"""Which Flower node is which client."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common import MessageType
from flwr.serverapp import Grid

from vitfleet.config.schema import FleetConfig
from vitfleet.flower.transport.messages import MAX_INTERVAL_S, MIN_INTERVAL_S, Clock, pull_reply, push_message
from vitfleet.flower.transport.payloads import CLIENT_NAME, HEADER

TTL_MARGIN_S = 3600.0  # added to a message's time to live: a reply that arrived in time may wait to be pulled


class Node(NamedTuple):
    """A connected node: its id in Flower, and the time at which it connected last. A restarted client has another."""

    id: int
    activated_at: str


class NodeDirectory:
    """Maps clients to connected Flower nodes by client name.

    A SuperNode with a key is registered under its client's name. A node of a simulation, or of a fleet without keys,
    has no registered name and is queried for it once.
    """

    def __init__(
        self, grid: Grid, config: FleetConfig, clock: Clock, report: Callable[[str], None] = lambda line: None
    ) -> None:
        self.grid = grid
        self.config = config
        self.clock = clock
        self.report = report  # tells the server's owner which clients are lost, and which are back
        self._clients = {config.name_of(client): client for client in range(config.clients)}
        self._reported_names: dict[int, str] = {}  # by node, where no name is registered
        self._started = False
        self._connected: dict[int, Node] = {}
        self._lost_at: dict[int, float] = {}  # by client, when it was first missed

    def wait_for_nodes(self, asked: Collection[int]) -> dict[int, Node]:
        """Return the node of every connected client.

        The first call waits up to ``fleet.join_s`` for all clients. Later calls wait up to ``fleet.deadline_s`` for the
        ``fleet.min_replies`` clients that a round needs, and for those of the ``asked`` clients that may return.
        """
        required = self.config.min_replies if self._started else self.config.clients
        timeout = self.config.deadline_s if self._started else self.config.join_s
        deadline = self.clock.now() + timeout
        self._started = True
        while True:
            nodes = self.connected()
            lost = () if self.config.over_provision else self._lost_at.keys() & set(asked)
            returning = any(self.may_return(client) for client in lost)
            if (len(nodes) >= required and not returning) or self.clock.now() >= deadline:
                return nodes
            self.clock.sleep(MAX_INTERVAL_S)

    def may_return(self, client: int) -> bool:
        """Whether a client that had been connected is so again, or was lost less than ``fleet.rejoin_s`` ago."""
        lost_at = self._lost_at.get(client, self.clock.now())
        return self.clock.now() < lost_at + self.config.rejoin_s

    def connected(self) -> dict[int, Node]:
        """Return the node of every client that is connected now."""
        nodes = self._find_nodes()
        for client in sorted(self._connected.keys() - nodes.keys()):
            self._lost_at[client] = self.clock.now()
            wait = 0.0 if self.config.over_provision else self.config.rejoin_s
            self.report(f"{self.config.name_of(client)} lost" + (f", waiting up to {wait:g} s" if wait else ""))
        for client in sorted(self._lost_at.keys() & nodes.keys()):
            del self._lost_at[client]
            self.report(f"{self.config.name_of(client)} is back")
        self._connected = nodes
        return nodes

    def _find_nodes(self) -> dict[int, Node]:
        infos = {node.node_id: node for node in self.grid.get_nodes()}
        names = {node: info.name for node, info in infos.items()}
        unnamed = [node for node, name in names.items() if not name and node not in self._reported_names]
        self._reported_names |= {node: name for node, name in self._query_names(unnamed) if name}
        reported = {name: node for node, name in self._reported_names.items() if node in names}
        registered = {name: node for node, name in names.items() if name}
        # Registered names override reported ones: a node cannot take over another client's name by reporting it.
        return {
            self._clients[name]: Node(node, infos[node].last_activated_at)
            for name, node in {**reported, **registered}.items()
            if name in self._clients
        }

    def _query_names(self, nodes: list[int]) -> Iterator[tuple[int, str]]:
        """Ask nodes for their client names and yield each node with its answer."""
        content, ttl = RecordDict({HEADER: ConfigRecord()}), self.config.join_s + TTL_MARGIN_S
        query = f"{MessageType.QUERY}.{CLIENT_NAME}"
        sent = {node: push_message(self.grid, Message(content, node, query, ttl=ttl)) for node in nodes}
        pending = {node: message_id for node, message_id in sent.items() if message_id is not None}
        deadline = self.clock.now() + max(self.config.join_s, MAX_INTERVAL_S)
        while pending and self.clock.now() < deadline:
            for node, message_id in list(pending.items()):
                answer = pull_reply(self.grid, message_id)
                if answer is not None:
                    del pending[node]
                    yield node, _reported_name(answer)
            if pending:
                self.clock.sleep(MIN_INTERVAL_S)


def _reported_name(answer: RecordDict | Error) -> str:
    """Return the name that a node reports; "" if it reports none."""
    header = answer.get(HEADER) if isinstance(answer, RecordDict) else None
    return str(header.get(CLIENT_NAME, "")) if isinstance(header, ConfigRecord) else ""
