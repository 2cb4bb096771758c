"""Flower's ClientApp: one device's answer to one order. Flower starts a new process for every message."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from vitfleet.config import read_config
from vitfleet.config.schema import Config, MachineConfig
from vitfleet.data.holdings import holdings
from vitfleet.data.images import DataSet
from vitfleet.data.manifest import Deal
from vitfleet.data.own import Form, load_once
from vitfleet.data.sources import load
from vitfleet.errors import UserError
from vitfleet.fleet.device import Device
from vitfleet.fleet.envelope import WORDS, Terms, pack_marks, pack_reply, unpack_exam, unpack_order

SIMULATED = "partition-id"  # what Flower's simulation tells a node of itself
app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Do a round's work."""
    return Message(pack_reply(device_of(context).answer(unpack_order(message.content))), reply_to=message)


@app.query("exam")
def exam(message: Message, context: Context) -> Message:
    """Say how the device's model does on its tasks."""
    return Message(pack_marks(device_of(context).sit(unpack_exam(message.content))), reply_to=message)


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Say the device's name; in a simulation, its number."""
    name = _word(context, SIMULATED if _is_simulated(context) else "name")
    return Message(RecordDict({WORDS: ConfigRecord({"name": name})}), reply_to=message)


def device_of(context: Context) -> Device:
    """Return the device that this process is a part of."""
    words = context.node_config
    given = {key: words[key] for key in ("device", "precision", "threads", "deterministic") if key in words}
    return (simulated if _is_simulated(context) else real)(context, MachineConfig.model_validate(given))


def real(context: Context, machine: MachineConfig) -> Device:
    """Return a device with its own folder of images."""
    state = Path(_word(context, "state"))

    def images(config: Config, terms: Terms) -> DataSet:
        form = Form(tuple(terms.classes), terms.channels, terms.side, config.data.test_share, config.data.max_corrupt)
        return load_once(Path(_word(context, "data")), form, state / "images")

    return Device(images, state, machine)


def simulated(context: Context, machine: MachineConfig) -> Device:
    """Return a device of Flower's simulation: its images are dealt from the run's own set, on the same machine."""
    folder = Path(str(context.run_config.get("folder", "")))
    if not (folder / "config.json").exists():
        raise UserError("a simulation needs --run-config 'folder=\"…\"', the absolute path of the run's folder")
    client = int(context.node_config[SIMULATED])

    def images(config: Config, terms: Terms) -> DataSet:
        data, held = dealt(folder)
        train, test = (torch.from_numpy(deal.of(client)) for deal in held)
        return DataSet(data.name, data.classes, data.train.take(train), data.test.take(test))

    return Device(images, folder / "devices" / str(client), machine)


@cache
def dealt(folder: Path) -> tuple[DataSet, tuple[Deal, Deal]]:
    """Return a run's images and how they are dealt; a simulation's processes stay, so once is enough."""
    config = read_config(folder / "config.json")
    data = load(config.data)
    return data, holdings(config, data)


def _is_simulated(context: Context) -> bool:
    return SIMULATED in context.node_config and "data" not in context.node_config


def _word(context: Context, key: str) -> str:
    if key not in context.node_config:
        raise UserError(f"this device does not say its {key}: start it with `vitfleet client`, or give --node-config")
    return str(context.node_config[key])
