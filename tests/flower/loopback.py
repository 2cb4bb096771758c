"""Flower's grid without Flower's processes: every message is serialized and deserialized on its way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, TypeAlias

from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common import MessageType
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from vitfleet.config.schema import Config, MachineConfig
from vitfleet.data.export import export_clients
from vitfleet.data.images import DataSet
from vitfleet.data.partitions.assign import assign_images
from vitfleet.data.sources.load import load_dataset
from vitfleet.data.sources.local import DataSpec, load_local
from vitfleet.flower.device.client import FlowerClient
from vitfleet.flower.transport.codec import pack_eval_reply, pack_reply, unpack_eval_request, unpack_train_request
from vitfleet.flower.transport.payloads import CHUNK, HEADER, RunSpec

# Flower's processes set these; its messages cannot be created without them.
TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1

FIRST_NODE = 1000
CHUNK_BYTES = 100_000

#: Returns a client's reply to a message; ``None`` if it never replies.
HandleMessage: TypeAlias = Callable[[int, Message], RecordDict | Error | None]


def serialized_copy(content: RecordDict) -> RecordDict:
    """Return the content as it arrives: new objects made from its bytes."""
    return RecordDict({name: ConfigRecord.inflate(record.deflate()) for name, record in content.items()})


def with_encoded_message(reply: RecordDict, encoded: bytes) -> RecordDict:
    """Return a reply with another message, in chunks of 100 kB."""
    chunks = {
        f"message/{start // CHUNK_BYTES:06d}": ConfigRecord({CHUNK: encoded[start : start + CHUNK_BYTES]})
        for start in range(0, len(encoded), CHUNK_BYTES)
    }
    return RecordDict({HEADER: reply.config_records[HEADER], **chunks})


@dataclass
class LoopbackGrid(Grid):
    """A grid whose node ``1000 + i`` has the i-th name; ``handle`` makes each node's reply."""

    handle: HandleMessage
    names: list[str]
    replies: dict[str, Message] = field(default_factory=dict)
    pushed: list[Message] = field(default_factory=list)
    disconnected: set[str] = field(default_factory=set)
    restarts: Counter[str] = field(default_factory=Counter)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [
            NodeInfo(node_id=FIRST_NODE + client, name=name, last_activated_at=f"start {self.restarts[name]}")
            for client, name in enumerate(self.names)
            if name not in self.disconnected
        ]

    def get_node_ids(self) -> Iterable[int]:
        return [node.node_id for node in self.get_nodes()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            self.pushed.append(message)
            message_id = str(len(self.pushed))
            node = message.metadata.dst_node_id
            arrived = Message(serialized_copy(message.content), node, message.metadata.message_type)
            arrived.metadata.__dict__["_message_id"] = message_id
            reply = self.handle(node - FIRST_NODE, arrived)
            if isinstance(reply, Error):
                self.replies[message_id] = Message(reply, reply_to=arrived)
            elif reply is not None:
                self.replies[message_id] = Message(serialized_copy(reply), reply_to=arrived)
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.replies.pop(message_id) for message_id in list(message_ids) if message_id in self.replies]

    def set_run(self, run: object) -> NoReturn:
        raise NotImplementedError

    @property
    def run(self) -> NoReturn:
        raise NotImplementedError

    def create_message(self, *arguments: object, **named: object) -> NoReturn:
        raise NotImplementedError

    def send_and_receive(self, *arguments: object, **named: object) -> NoReturn:
        raise NotImplementedError


def defended(config: Config) -> Config:
    """Return a simulation's configuration with what a fleet of real devices has by default written out."""
    return config.model_copy(update={"aggregate": config.aggregate.model_copy(update={"defence": "clip"})})


def client_names(config: Config) -> list[str]:
    return [config.fleet.name_of(client) for client in range(config.fleet.clients)]


def export_images(config: Config, folder: Path) -> None:
    """Write each client's images to a folder of its own."""
    data = load_dataset(config.data)
    export_clients(data, assign_images(config, data), client_names(config), folder)


@dataclass
class LocalClients:
    """Flower clients in this process, each with its own folders of images and of states."""

    config: Config
    data: Path
    state: Path

    def client(self, number: int) -> FlowerClient:
        name = self.config.fleet.name_of(number)

        def load_images(config: Config, run_spec: RunSpec) -> DataSet:
            classes, test_share = tuple(run_spec.classes), config.data.test_share
            return load_local(
                self.data / name, DataSpec(classes, run_spec.channels, run_spec.image_size, test_share, 0.0)
            )

        return FlowerClient(load_images, self.state / name, MachineConfig(device="cpu", threads=1))

    def handle(self, number: int, message: Message) -> RecordDict | Error | None:
        client = self.client(number)
        if message.metadata.message_type == MessageType.EVALUATE:
            return pack_eval_reply(client.evaluate(unpack_eval_request(message.content)))
        payload = unpack_train_request(message.content)
        return pack_reply(client.train(payload), payload.request.round)

    def grid(self, handle: HandleMessage | None = None) -> LoopbackGrid:
        return LoopbackGrid(handle or self.handle, client_names(self.config))
