"""Flower's ClientApp: one device's answer to one order. Flower starts a new process for every message."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from vitfleet.config.schema import Config, MachineConfig
from vitfleet.data.images import DataSet
from vitfleet.data.own import Form, load_once
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
    state = Path(_word(context, "state"))
    device = Device(partial(own_images, Path(_word(context, "data")), state), state, machine)
    return Message(pack_reply(device.answer(unpack_order(message.content))), reply_to=message)


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Say the device's name."""
    return Message(RecordDict({WORDS: ConfigRecord({"name": _word(context, "name")})}), reply_to=message)


def own_images(path: Path, state: Path, config: Config, terms: Terms) -> DataSet:
    """Return the images under a path, as a run wants them."""
    form = Form(tuple(terms.classes), terms.channels, terms.side, config.data.test_share, config.data.max_corrupt)
    return load_once(path, form, state / "images")


def _word(context: Context, key: str) -> str:
    if key not in context.node_config:
        raise UserError(f"this device does not say its {key}: start it with `vitfleet client`, or give --node-config")
    return str(context.node_config[key])
