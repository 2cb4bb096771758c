"""Which Flower node is which client."""

from __future__ import annotations

from collections.abc import Iterator

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common import MessageType
from flwr.serverapp import Grid

from vitfleet.config.schema import FleetConfig
from vitfleet.flower.polling import MAX_INTERVAL_S, MIN_INTERVAL_S, Clock
from vitfleet.flower.record_keys import CLIENT_NAME, HEADER

TTL_MARGIN_S = 3600.0  # added to a message's time to live: a reply that arrived in time may wait to be pulled


class NodeDirectory:
    """Maps clients to connected Flower nodes by client name.

    A SuperNode with a key is registered under its client's name. A node of a simulation, or of a fleet without keys,
    has no registered name and is queried for it once.
    """

    def __init__(self, grid: Grid, config: FleetConfig, clock: Clock) -> None:
        self.grid = grid
        self.config = config
        self.clock = clock
        self._clients = {config.name_of(client): client for client in range(config.clients)}
        self._reported_names: dict[int, str] = {}  # by node, where no name is registered
        self._started = False

    def wait_for_nodes(self) -> dict[int, int]:
        """Return the node of every connected client.

        The first call waits up to ``fleet.join_s`` for all clients. Later calls wait up to ``fleet.deadline_s`` for the
        ``fleet.min_replies`` clients that a round needs.
        """
        required = self.config.min_replies if self._started else self.config.clients
        timeout = self.config.deadline_s if self._started else self.config.join_s
        deadline = self.clock.now() + timeout
        self._started = True
        while True:
            nodes = self._connected_nodes()
            if len(nodes) >= required or self.clock.now() >= deadline:
                return nodes
            self.clock.sleep(MAX_INTERVAL_S)

    def _connected_nodes(self) -> dict[int, int]:
        names = {node.node_id: node.name for node in self.grid.get_nodes()}
        unnamed = [node for node, name in names.items() if not name and node not in self._reported_names]
        self._reported_names |= {node: name for node, name in self._query_names(unnamed) if name}
        reported = {name: node for node, name in self._reported_names.items() if node in names}
        registered = {name: node for node, name in names.items() if name}
        # Registered names override reported ones: a node cannot take over another client's name by reporting it.
        return {self._clients[name]: node for name, node in {**reported, **registered}.items() if name in self._clients}

    def _query_names(self, nodes: list[int]) -> Iterator[tuple[int, str]]:
        """Ask nodes for their client names and yield each node with its answer."""
        content, ttl = RecordDict({HEADER: ConfigRecord()}), self.config.join_s + TTL_MARGIN_S
        messages = [Message(content, node, f"{MessageType.QUERY}.{CLIENT_NAME}", ttl=ttl) for node in nodes]
        pending = dict(zip(self.grid.push_messages(messages), nodes, strict=True)) if messages else {}
        deadline = self.clock.now() + max(self.config.join_s, MAX_INTERVAL_S)
        while pending and self.clock.now() < deadline:
            for reply in self.grid.pull_messages(list(pending)):
                node = pending.pop(reply.metadata.reply_to_message_id)
                name = "" if reply.has_error() else reply.content.config_records[HEADER].get(CLIENT_NAME, "")
                yield node, str(name)
            if pending:
                self.clock.sleep(MIN_INTERVAL_S)
