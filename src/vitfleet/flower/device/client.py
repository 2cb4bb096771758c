"""One client on its own machine: trains and evaluates as the server's payloads request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch

from vitfleet.config.limits import MAX_SAVED_TEXT, check_text
from vitfleet.config.load import validate
from vitfleet.config.plugins import load_installed
from vitfleet.config.registry import ALL
from vitfleet.config.schema import Config, MachineConfig
from vitfleet.data.images import DataSet
from vitfleet.errors import UserError
from vitfleet.files import MODEL_FILE, link_atomically, parse_json
from vitfleet.fleet.base import EvalReply, Reply
from vitfleet.flower.device.activity import ActivityLog
from vitfleet.flower.device.limits import ClientLimits, check_model, check_run, describe_run, within_limits
from vitfleet.flower.device.setup import ClientSetup, set_up_client
from vitfleet.flower.device.storage import ClientStorage
from vitfleet.flower.transport.payloads import EvalPayload, RunSpec, TrainPayload
from vitfleet.message import State, to_device
from vitfleet.methods.base import ClientUpdate
from vitfleet.run.output.model_file import DataInfo, model_info, model_size, write_model
from vitfleet.wire import encoded_size

LoadImages: TypeAlias = Callable[[Config, RunSpec], DataSet]


class _CachedSetup(NamedTuple):
    run_spec: RunSpec
    client: int
    data: DataSet
    setup: ClientSetup


@dataclass
class FlowerClient:
    """A client of a Flower fleet. Its setup is reused from one payload to the next of the same run."""

    load_images: LoadImages  # returns the client's images in the form that a run requires
    root: Path  # folder of the client's files
    machine: MachineConfig  # Hardware settings. The client's operator chooses them, not the run.
    limits: ClientLimits = field(default_factory=ClientLimits)  # what a server may ask for
    # Receives a line about each run, for the client's owner; ``None``: nobody reads it
    activity: ActivityLog | None = None
    _cached: _CachedSetup | None = field(default=None, init=False, repr=False)

    def train(self, payload: TrainPayload) -> Reply:
        """Train as a payload requests. An error that the client's operator must fix becomes a failure reply."""
        try:
            return self._train(payload)
        except UserError as error:
            return Reply(payload.request.client, None, failure=str(error))

    def evaluate(self, payload: EvalPayload) -> EvalReply:
        """Evaluate the client's model on the client's own test images of its first tasks."""
        try:
            return self._evaluate(payload)
        except UserError as error:
            return EvalReply(payload.client, failure=str(error))

    def _train(self, payload: TrainPayload) -> Reply:
        request, config = payload.request, self._checked_config(payload.run_spec)
        storage = ClientStorage.of_run(self.root, payload.run_spec.run_id)
        if payload.base is not None:
            storage.check_room(encoded_size(payload.base), self.limits.disk_mb)
            storage.save_base(payload.base)
        base, state = storage.load_base(), _load_state(storage, request.last_round)
        if base is None or state is None:
            return Reply(request.client, None, failure=_state_lost(request.last_round), state_lost=True)
        setup = self._setup(config, payload.run_spec, request.client)
        make_update = partial(
            setup.runtime.pending_update,
            base_weights=to_device(base.tensors, setup.device),
            client_state=_client_state(state, setup.device),
            shard=setup.tasks.train_shard(request.task_index),
        )
        on_device = replace(request, message=request.message.to(setup.device))
        ((reply, update),) = setup.runtime.train([on_device], make_update)
        if reply.message is not None:
            self._save(storage, setup, payload, update)
        return reply

    def _save(self, storage: ClientStorage, setup: ClientSetup, payload: TrainPayload, update: ClientUpdate) -> None:
        """Write the client's state and its own whole model, if it has one: its owner can use it without the server."""
        run_spec, request, net = payload.run_spec, payload.request, setup.runtime.trainer.net
        data = DataInfo(setup.config.data.name, tuple(run_spec.classes), run_spec.channels, run_spec.image_size)
        info = model_info(setup.config, data, net, request.round, request.client)
        state_bytes = encoded_size(update.client_state or State())
        model = update.model_weights
        model_bytes = model_size(net, model, info) - storage.model_bytes() if model else 0
        storage.check_room(state_bytes + max(0, model_bytes), self.limits.disk_mb)
        storage.save_state(request.round, update.client_state, request.last_round)
        if model:
            write_model(storage.model_path, net, model, info)
            link_atomically(self.root / MODEL_FILE, storage.model_path)

    def _evaluate(self, payload: EvalPayload) -> EvalReply:
        config = self._checked_config(payload.run_spec)
        storage = ClientStorage.of_run(self.root, payload.run_spec.run_id)
        base = payload.base if payload.base is not None else storage.load_base()
        state = _load_state(storage, payload.last_round)
        if base is None or state is None:
            return EvalReply(payload.client, failure=_state_lost(payload.last_round))
        setup = self._setup(config, payload.run_spec, payload.client)
        (reply,) = setup.runtime.evaluate(
            State(to_device(payload.server.tensors, setup.device), payload.server.numbers),
            to_device(base.tensors, setup.device),
            _client_state(state, setup.device),
            [payload.client],
            payload.num_tasks,
        )
        return reply

    def _checked_config(self, run_spec: RunSpec) -> Config:
        """Return a run's configuration if the client's owner allows what it asks for. Nothing is stored before."""
        config = _read_config(run_spec)
        check_run(config, run_spec, self.limits)
        is_new = self._cached is None or self._cached.run_spec != run_spec
        if is_new:
            check_model(config, run_spec, self.limits)
        if is_new and self.activity is not None:
            self.activity.add(describe_run(config, run_spec))
        return within_limits(config, self.limits)

    def _setup(self, config: Config, run_spec: RunSpec, client: int) -> ClientSetup:
        data = self.load_images(config, run_spec)
        cached = self._cached
        if cached is None or (cached.run_spec, cached.client) != (run_spec, client) or cached.data is not data:
            cached = self._cached = None  # free its memory before the next one is built
            setup = set_up_client(config, run_spec, client, data, self.machine)
            cached = self._cached = _CachedSetup(run_spec, client, data, setup)
        return cached.setup


def _read_config(run_spec: RunSpec) -> Config:
    """Read a run's configuration with what is installed here: a server cannot make a client load code."""
    try:
        check_text("the server's configuration", len(run_spec.config), MAX_SAVED_TEXT)
        tree = parse_json(run_spec.config)
    except ValueError:
        raise UserError("the server's configuration is not JSON") from None
    if not isinstance(tree, dict):
        raise UserError("the server's configuration is not a table")
    load_installed()
    installed: dict[str, str] = {}
    for registry in ALL:
        installed |= {f"{registry.kind}:{entry.name}": entry.origin.sha256 for entry in registry}
    for needed in run_spec.plugins:
        component, _, digest = needed.rpartition(":")
        name = component.replace(":", " ")
        if component not in installed:
            raise UserError(
                f"{name} is not installed on this client; its owner can add it: vitfleet client --plugin FILE"
            )
        if installed[component] != digest:
            raise UserError(
                f"{name} is another version on this client than on the server; install the same file on both"
            )
    return validate(tree, load_plugins=False)


def _load_state(storage: ClientStorage, last_round: int | None) -> State | None:
    """Return the state after a round, empty for a new client; ``None`` if it is lost."""
    return State() if last_round is None else storage.load_state(last_round)


def _client_state(stored: State, device: torch.device) -> State | None:
    """Return a stored state on the training device; ``None`` if it is empty, which means that there is none."""
    return stored.to(device) if stored.tensors or stored.numbers else None


def _state_lost(last_round: int | None) -> str:
    return "it has no base message" if last_round is None else f"it has lost its state after round {last_round}"
