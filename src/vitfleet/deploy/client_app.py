"""Flower's ClientApp: one device's answer to one order. Flower starts a new process for every message."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from vitfleet.config.schema import Config, MachineConfig
from vitfleet.data.images import DataSet
from vitfleet.data.own import load_own
from vitfleet.errors import UserError
from vitfleet.fleet.device import Device
from vitfleet.fleet.envelope import WORDS, Terms, pack_reply, unpack_order
from vitfleet.train.machine import set_up

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Do what the server asks."""
    words = context.node_config
    machine = set_up(
        MachineConfig.model_validate(
            {key: words[key] for key in ("device", "precision", "threads", "deterministic") if key in words}
        )
    )
    device = Device(partial(own_images, Path(_word(context, "data"))), Path(_word(context, "state")), machine)
    return Message(pack_reply(device.answer(unpack_order(message.content))), reply_to=message)


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Say the device's name."""
    return Message(RecordDict({WORDS: ConfigRecord({"name": _word(context, "name")})}), reply_to=message)


def own_images(path: Path, config: Config, terms: Terms) -> DataSet:
    """Return the images under a path, under a run's terms."""
    share, corrupt = config.data.test_share, config.data.max_corrupt
    return load_own(path, tuple(terms.classes), terms.channels, terms.side, share, corrupt)


def _word(context: Context, key: str) -> str:
    if key not in context.node_config:
        raise UserError(f"this device does not say its {key}: start it with `vitfleet client`, or give --node-config")
    return str(context.node_config[key])
