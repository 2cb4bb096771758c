"""Flower's ClientApp: takes one message to whoever answers it.

Flower starts a new process for every message, so this imports Flower and little else; a real device's worker stays.
A simulation's processes stay themselves, and answer.
"""

from __future__ import annotations

import os
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from vitfleet.errors import UserError
from vitfleet.flower import worker

SIMULATED = "partition-id"  # what Flower's simulation tells a node of itself
app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Do a round's work."""
    return _answer("train", message, context)


@app.query("exam")
def exam(message: Message, context: Context) -> Message:
    """Say how the device's model does on its tasks."""
    return _answer("exam", message, context)


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Say the device's name; in a simulation, its number."""
    name = _word(context, SIMULATED if _is_simulated(context) else "name")
    return Message(RecordDict({"header": ConfigRecord({"name": name})}), reply_to=message)


def _answer(kind: str, message: Message, context: Context) -> Message:
    words = ConfigRecord({**context.node_config, "kind": kind})
    if _is_simulated(context):
        from vitfleet.flower.client_handler import answer

        words["folder"] = str(context.run_config.get("folder", ""))
        words["client"] = int(context.node_config[SIMULATED])
        return Message(answer(words, message.content), reply_to=message)
    data, state = (Path(_word(context, key)).resolve() for key in ("data", "state"))
    words["data"], words["state"] = str(data), str(state)
    return Message(worker.ask(state, os.getppid(), words, message.content), reply_to=message)


def _is_simulated(context: Context) -> bool:
    return SIMULATED in context.node_config and "data" not in context.node_config


def _word(context: Context, key: str) -> str:
    if key not in context.node_config:
        raise UserError(f"this device does not say its {key}: start it with `vitfleet client`, or give --node-config")
    return str(context.node_config[key])
