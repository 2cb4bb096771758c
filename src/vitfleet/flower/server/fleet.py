"""A fleet on real machines: Flower's grid carries requests to clients and their replies back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

from flwr.app import RecordDict
from flwr.common import MessageType
from flwr.serverapp import Grid

from vitfleet.config.plugins import used_components
from vitfleet.config.registry import AGGREGATIONS, SERVER_OPTIMIZERS
from vitfleet.config.schema import Config, DataConfig, FleetConfig, MachineConfig
from vitfleet.data.images import DataSet
from vitfleet.fleet.base import EvalReply, EvalRequest, Reply, Request
from vitfleet.flower.activity import FLEET_FILE, ActivityLog
from vitfleet.flower.server.exchange import Exchange, ReplyFactory
from vitfleet.flower.server.nodes import NodeDirectory
from vitfleet.flower.transport.codec import pack_eval_request, pack_train_request, unpack_eval_reply, unpack_reply
from vitfleet.flower.transport.messages import Clock
from vitfleet.flower.transport.payloads import EvalPayload, RunSpec, TrainPayload
from vitfleet.message import Message as Content
from vitfleet.message import State
from vitfleet.run.output.folder import run_id
from vitfleet.run.setup import MakeFleet

MEGABYTE = 10**6


def make_run_spec(config: Config, data: DataSet, run_id: str) -> RunSpec:
    """Return what clients must know of a run, without the paths of the server's files."""
    data_config = DataConfig(
        name=config.data.name,
        test_share=config.data.test_share,
        max_corrupt=config.data.max_corrupt,
        augment=config.data.augment,
        tasks=config.data.tasks,
    )
    model_config = config.model.model_copy(update={"weights": None})
    # What only the server uses needs not be installed on the clients.
    server_only: dict[str, object] = {"plugins": (), "metrics": {}, "callbacks": {}, "trackers": {}}
    server_only |= {"aggregate": AGGREGATIONS.make_params("mean"), "server": SERVER_OPTIMIZERS.make_params("sgd")}
    server_only["machine"] = MachineConfig()
    server_only["fleet"] = config.fleet.model_copy(update={"names": ()})  # of the other clients
    shared = config.model_copy(update={"data": data_config, "model": model_config, **server_only})
    needed = [f"{used.kind}:{used.name}:{used.sha256}" for used in used_components(shared)]
    images = data.train
    return RunSpec(run_id, shared.model_dump_json(), list(data.classes), images.channels, images.image_size, needed)


def fleet_factory(grid: Grid, clock: Clock | None = None) -> MakeFleet:
    """Return a function with which :func:`vitfleet.run.setup.open_run` makes a fleet behind a Flower grid."""

    def make_fleet(config: Config, data: DataSet, folder: Path, base: Content) -> FlowerFleet:
        report = ActivityLog(folder / FLEET_FILE).add
        return FlowerFleet(grid, config.fleet, make_run_spec(config, data, run_id(folder)), base, clock, report)

    return make_fleet


class FlowerFleet:
    """Clients behind Flower's grid, one per node.

    Every request has the specification of the run. A new client receives the initial broadcast with its first request.
    """

    def __init__(
        self,
        grid: Grid,
        config: FleetConfig,
        run_spec: RunSpec,
        base: Content,
        clock: Clock | None = None,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.grid = grid
        self.config = config
        self.run_spec = run_spec
        self.base = base
        self.clock = clock or Clock()
        self.nodes = NodeDirectory(grid, config, self.clock, report)

    def train(self, requests: Iterable[Request]) -> Iterator[Reply]:
        """Send the requests, then yield replies until all have arrived or the deadline has passed.

        A round ends with its number of usable replies; for the head, every client's reply is waited for.
        """
        asked = {request.client: request for request in requests}
        is_round = all(request.kind == "round" for request in asked.values())
        payloads = (
            (client, TrainPayload(request, self.run_spec, self._base_for(request.last_round)))
            for client, request in asked.items()
        )

        def unpack(client: int, content: RecordDict) -> Reply:
            most = int(self.config.max_message_mb * MEGABYTE)
            request = asked[client]
            return unpack_reply(content, client, request.round, min(most, request.max_bytes or most))

        replies = ReplyFactory(
            unpack,
            lambda client, reason: Reply(client, None, failure=reason),
            lambda client, reason: Reply(client, None, failure=reason, sent=False),
        )
        exchange = Exchange(
            self.grid, self.nodes, self.config, self.clock, MessageType.TRAIN, pack_train_request, replies
        )
        yield from exchange.run(payloads, self.config.per_round if is_round else None)

    def commit(self, accepted: Collection[int]) -> None:
        """Do nothing: every request names the round that its client continues from."""

    def evaluate(self, eval_request: EvalRequest) -> Iterator[EvalReply]:
        """Send an evaluation request to each client, then yield replies until all have arrived or the deadline."""
        num_tasks = eval_request.num_tasks
        server = Content(eval_request.server.tensors, eval_request.server.numbers)

        def payload(client: int, last_round: int | None) -> EvalPayload:
            base = self._base_for(last_round)
            return EvalPayload(client, num_tasks, last_round, self.run_spec, server, base, eval_request.last_head)

        payloads = ((client, payload(client, last_round)) for client, last_round in eval_request.last_round.items())
        replies = ReplyFactory(
            lambda client, content: unpack_eval_reply(content, client, num_tasks),
            lambda client, reason: EvalReply(client, failure=reason),
            lambda client, reason: EvalReply(client, failure=reason),
        )
        exchange = Exchange(
            self.grid, self.nodes, self.config, self.clock, MessageType.EVALUATE, pack_eval_request, replies
        )
        yield from exchange.run(payloads)

    def client_state(self, client: int) -> State | None:
        """Return ``None``: clients store their states themselves."""
        return None

    def changed_states(self) -> Mapping[int, State | None]:
        """Return nothing: clients store their states themselves."""
        return {}

    def _base_for(self, last_round: int | None) -> Content | None:
        return self.base if last_round is None else None
