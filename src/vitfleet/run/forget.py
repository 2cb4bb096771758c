"""Exact unlearning: the state of a run as if some clients had never taken part, where a method can subtract them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from vitfleet.errors import UserError
from vitfleet.files import (
    BEST_MODEL_FILE,
    MODEL_FILE,
    RECORDS_FILE,
    SUMMARY_FILE,
    TIMINGS_FILE,
    read_json,
    write_atomically,
)
from vitfleet.message import Message
from vitfleet.methods.base import ClientRoundInput
from vitfleet.run.checkpoints.store import Checkpoints
from vitfleet.run.context import RunContext, load_state
from vitfleet.run.output.model_file import save_server_model
from vitfleet.run.output.summary import read_summary
from vitfleet.run.records import read_records
from vitfleet.run.state import RunState
from vitfleet.training.driver import run_update
from vitfleet.training.stacking.inputs import RngContext

FORGOTTEN_FILE = "forgotten.json"  # the clients that a run is without: its records still have them
#: What has the clients' sums or the model of them, and what is drawn of it.
_NOT_COPIED = (
    "checkpoint",
    "figures",
    "tensorboard",
    "report*.html",
    "identity",
    MODEL_FILE,
    BEST_MODEL_FILE,
    SUMMARY_FILE,
    ".lock",
)


def forget_clients(context: RunContext, state: RunState, clients: Sequence[int]) -> RunState:
    """Return a run's state without what clients sent.

    Each client computes what it sent once more, with the images and random addresses of that round.

    Raises
    ------
    UserError
        The method cannot subtract a client, a client has sent nothing, or its images are on its own device.
    """
    if context.has_remote_clients:
        raise UserError(f"--client {clients[0]}: its images are on its own device; only a simulation has them")
    server = state.server
    for client in clients:
        server = context.method.without_client(server, client, partial(_sent_again, context, client))
    return replace(state, server=server)


def _sent_again(context: RunContext, client: int) -> Message:
    """Return what a client sent when it first took part."""
    first = (
        record.round
        for record in read_records(context.folder)
        for entry in record.clients
        if entry.client == client and entry.failure is None
    )
    round = next(first, None)
    if round is None:
        raise UserError(f"--client {client}: has sent nothing in this run")
    method, shard = context.method, context.images.shard(client, 0)
    asked = method.message_to_client(context.initial_server_state(), round, client, None)
    job = ClientRoundInput(round, client, asked, context.base.tensors, None, shard)
    address = RngContext(context.config.seed, round, client)
    return run_update(method.client_update(job), context.trainer, shard, address).message


def write_forgotten(context: RunContext, clients: Sequence[int], target: Path) -> None:
    """Write a run without what some clients sent into a new folder: its files, a checkpoint, the model, the summary.

    Raises
    ------
    UserError
        As :func:`forget_clients`; or the folder exists, or the run is not finished.
    """
    summary = read_summary(context.folder)
    if target.exists():
        raise UserError(f"{target}: exists already; choose another --out")
    before = _forgotten(context.folder)
    for position, client in enumerate(clients):
        if client in before:
            raise UserError(f"--client {client}: is forgotten already in {context.folder}")
        if client in clients[:position]:
            raise UserError(f"--client {client}: is given twice")
    state = forget_clients(context, load_state(context), clients)
    shutil.copytree(context.folder, target, ignore=shutil.ignore_patterns(*_NOT_COPIED))
    there = replace(context, folder=target, checkpoints=Checkpoints(target))
    there.checkpoints.commit(state, {}, (_size(target / RECORDS_FILE), _size(target / TIMINGS_FILE)))
    there.checkpoints.wait()
    save_server_model(there, state)
    ((accuracy, loss),) = there.evaluator.evaluate(
        there.method.model_weights(state.server, there.base.tensors, None)
    ).means()
    everyone = [*before, *clients]
    write_atomically(target / FORGOTTEN_FILE, json.dumps(everyone).encode())
    forgotten = {"clients": everyone, "accuracy": accuracy, "loss": loss}
    write_atomically(target / SUMMARY_FILE, json.dumps({**summary, "forgotten": forgotten}, indent=2).encode())


def _forgotten(folder: Path) -> list[int]:
    path = folder / FORGOTTEN_FILE
    return list(read_json(path)) if path.exists() else []


def _size(path: Path) -> int:
    return path.stat().st_size
