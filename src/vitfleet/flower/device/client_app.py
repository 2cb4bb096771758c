"""Flower's ClientApp: passes one message to the code that handles it.

Flower starts a new process for every message, so this module imports little besides Flower: on a real client it passes
the message to the client's worker process. The processes of a Flower simulation persist, so there it is handled
directly.
"""

from __future__ import annotations

import os
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import MessageType

from vitfleet.errors import UserError
from vitfleet.flower.device.worker import call_worker
from vitfleet.flower.transport.payloads import CLIENT_NAME, HEADER

SIMULATED_CLIENT = "partition-id"  # the node setting in which Flower's simulation puts the client's number
app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Handle a training request."""
    return _handle(MessageType.TRAIN, message, context)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Handle an evaluation request."""
    return _handle(MessageType.EVALUATE, message, context)


@app.query(CLIENT_NAME)
def client_name(message: Message, context: Context) -> Message:
    """Return the client's name; in a simulation, its number."""
    name = _node_setting(context, SIMULATED_CLIENT if _is_simulated(context) else "name")
    return Message(RecordDict({HEADER: ConfigRecord({CLIENT_NAME: name})}), reply_to=message)


def _handle(message_type: str, message: Message, context: Context) -> Message:
    settings = ConfigRecord({**context.node_config, "message_type": message_type})
    if _is_simulated(context):
        from vitfleet.flower.device.handler import handle_message

        settings["folder"] = str(context.run_config.get("folder", ""))
        settings["client"] = int(context.node_config[SIMULATED_CLIENT])
        return Message(handle_message(settings, message.content), reply_to=message)
    data, state = (Path(_node_setting(context, key)).resolve() for key in ("data", "state"))
    settings["data"], settings["state"] = str(data), str(state)
    return Message(call_worker(state, os.getppid(), settings, message.content), reply_to=message)


def _is_simulated(context: Context) -> bool:
    return SIMULATED_CLIENT in context.node_config and "data" not in context.node_config


def _node_setting(context: Context, key: str) -> str:
    if key not in context.node_config:
        raise UserError(f"the node setting {key!r} is missing: start with `vitfleet client`, or give --node-config")
    return str(context.node_config[key])
