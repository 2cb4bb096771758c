"""Flower's grid without Flower's processes: every message is put into bytes and taken out of them again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from vitfleet.config.schema import Config, MachineConfig
from vitfleet.data.assignment import assign_images
from vitfleet.data.export import export_clients
from vitfleet.data.images import DataSet
from vitfleet.data.local_dataset import DataSpec, load_local
from vitfleet.data.sources import load
from vitfleet.flower.client import FlowerClient
from vitfleet.flower.codec import pack_eval_reply, pack_reply, unpack_eval_request, unpack_train_request
from vitfleet.flower.fleet import EXAM
from vitfleet.flower.payloads import RunSpec

# Flower's processes say this of themselves; its messages cannot be made without.
TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1

ClientUpdate = Callable[[int, Message], RecordDict | Error | None]


def copied(content: RecordDict) -> RecordDict:
    """Return what arrives of a content: new objects, made from its bytes."""
    return RecordDict({name: ConfigRecord.inflate(record.deflate()) for name, record in content.items()})


@dataclass
class LoopbackGrid(Grid):
    """Nodes are numbered as their clients are, from 1000 on; ``answer`` is what a node does with a message."""

    answer: ClientUpdate
    names: list[str]
    replies: dict[str, Message] = field(default_factory=dict)
    pushed: list[Message] = field(default_factory=list)
    away: set[str] = field(default_factory=set)

    def get_nodes(self) -> Iterable[NodeInfo]:
        there = [(1000 + place, name) for place, name in enumerate(self.names) if name not in self.away]
        return [NodeInfo(node_id=node, name=name) for node, name in there]

    def get_node_ids(self) -> Iterable[int]:
        return [node.node_id for node in self.get_nodes()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            self.pushed.append(message)
            message_id = str(len(self.pushed))
            arrived = Message(copied(message.content), message.metadata.dst_node_id, message.metadata.message_type)
            arrived.metadata.__dict__["_message_id"] = message_id
            outcome = self.answer(message.metadata.dst_node_id - 1000, arrived)
            if isinstance(outcome, Error):
                self.replies[message_id] = Message(outcome, reply_to=arrived)
            elif outcome is not None:
                self.replies[message_id] = Message(copied(outcome), reply_to=arrived)
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.replies.pop(one) for one in list(message_ids) if one in self.replies]

    def set_run(self, run: object) -> NoReturn:
        raise NotImplementedError

    @property
    def run(self) -> NoReturn:
        raise NotImplementedError

    def create_message(self, *arguments: object, **named: object) -> NoReturn:
        raise NotImplementedError

    def send_and_receive(self, *arguments: object, **named: object) -> NoReturn:
        raise NotImplementedError


def deal(config: Config, folder: Path) -> None:
    """Write every client's images into a folder of its own."""
    data = load(config.data)
    export_clients(
        data,
        assign_images(config, data),
        [config.fleet.name_of(client) for client in range(config.fleet.clients)],
        folder,
    )


@dataclass
class Devices:
    """One device a client, each with its own folder of images and its own folder of what it keeps."""

    config: Config
    data: Path
    state: Path

    def device(self, client: int) -> FlowerClient:
        name = self.config.fleet.name_of(client)

        def images(config: Config, run_spec: RunSpec) -> DataSet:
            form = DataSpec(tuple(run_spec.classes), run_spec.channels, run_spec.side, config.data.test_share, 0.0)
            return load_local(self.data / name, form)

        return FlowerClient(images, self.state / name, MachineConfig(device="cpu", threads=1))

    def answer(self, client: int, message: Message) -> RecordDict | Error | None:
        device = self.device(client)
        if message.metadata.message_type == EXAM:
            return pack_eval_reply(device.evaluate(unpack_eval_request(message.content)))
        return pack_reply(device.train(unpack_train_request(message.content)))

    def grid(self, answer: ClientUpdate | None = None) -> LoopbackGrid:
        names = [self.config.fleet.name_of(client) for client in range(self.config.fleet.clients)]
        return LoopbackGrid(answer or self.answer, names)
