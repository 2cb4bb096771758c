"""One client on its own machine: trains and evaluates as the server's payloads request.

Its images by task, the model, the method and the trainer are set up once for all rounds of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from vitfleet.config.limits import MAX_SAVED_TEXT, check_text
from vitfleet.config.load import validate
from vitfleet.config.plugins import load_installed
from vitfleet.config.registry import ALL
from vitfleet.config.schema import Config, MachineConfig
from vitfleet.costs.speed import product_speed
from vitfleet.data.images import DataSet, ImageSet, Shard
from vitfleet.data.tasks import assign_classes_to_tasks, draw_task_order
from vitfleet.errors import ConfigError, DataError, RefusedRequestError, UserError
from vitfleet.files import MODEL_FILE, link_atomically, parse_json
from vitfleet.fleet.base import NO_ROUND, ClientTask, EvalReply, EvalResult, Reply
from vitfleet.fleet.build import Components, build_components, build_last_components, build_net
from vitfleet.fleet.client_runtime import ClientRuntime, make_runtime
from vitfleet.flower.activity import ActivityLog
from vitfleet.flower.device.checks import (
    check_model,
    check_range,
    check_round,
    check_run,
    check_size,
    describe_run,
    within_limits,
)
from vitfleet.flower.device.features import check_published, check_transforms
from vitfleet.flower.device.limits import ClientLimits
from vitfleet.flower.device.storage import ClientStorage, StoredViews
from vitfleet.flower.transport.payloads import EvalPayload, RunSpec, TrainPayload
from vitfleet.message import Message, Payload, State, Tensors, to_device
from vitfleet.methods.base import ClientUpdate
from vitfleet.models.net import Net
from vitfleet.run.output.model_file import DataInfo, model_info, model_size, write_model
from vitfleet.training.evaluator import Evaluator
from vitfleet.training.execution.memory_budget import views_bytes_limit
from vitfleet.training.execution.settings import set_up_execution
from vitfleet.wire import encoded_size

LoadImages: TypeAlias = Callable[[Config, RunSpec], DataSet]


@dataclass(frozen=True)
class LocalTasks:
    """A client's images on its training device, selected by task."""

    data: DataSet
    class_to_task: Tensor | None  # the task of each class, ``[classes]``; ``None`` without tasks
    task_order: Sequence[int]  # the tasks in the order in which the client learns them
    # Whether the client trains on its images of all tasks up to the current one: see ``Method.accumulates_tasks``
    accumulate: bool

    def train_shard(self, task_index: int) -> Shard:
        """Return the images to train on in a task."""
        first = 0 if self.accumulate else task_index
        indices = [self._indices(self.data.train, index) for index in range(first, task_index + 1)]
        return Shard(self.data.train, torch.cat(indices))

    def evaluate(self, evaluator: Evaluator, weights: Tensors, task_index: int) -> EvalResult:
        """Evaluate a model on the test images of a task, of which there may be none."""
        indices = self._indices(self.data.test, task_index)
        if not len(indices):
            return EvalResult(0, 0)
        scores = evaluator.evaluate(weights, self.data.test, indices)
        return EvalResult(int(scores.correct.sum()), len(indices))

    def _indices(self, images: ImageSet, task_index: int) -> Tensor:
        if self.class_to_task is None:
            return torch.arange(len(images), device=images.labels.device)
        return torch.nonzero(self.class_to_task[images.labels] == self.task_order[task_index]).flatten()


@dataclass(frozen=True)
class ClientSetup:
    """What a client needs to train and evaluate in a run."""

    config: Config
    runtime: ClientRuntime
    tasks: LocalTasks

    @property
    def device(self) -> torch.device:
        """The training device."""
        return self.runtime.trainer.machine.device


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
    pretrained: Path | None = None  # published weights that a local module whose features are sent must be near
    _cached: _CachedSetup | None = field(default=None, init=False, repr=False)

    def train(self, payload: TrainPayload) -> Reply:
        """Train as a payload requests. An error that the client's operator must fix becomes a failure reply."""
        try:
            return self._train(payload)
        except UserError as error:
            return Reply(payload.request.client, None, failure=self._refusal(error))

    def evaluate(self, payload: EvalPayload) -> EvalReply:
        """Evaluate the client's model on the client's own test images of its first tasks."""
        try:
            return self._evaluate(payload)
        except UserError as error:
            return EvalReply(payload.client, failure=self._refusal(error))

    def _refusal(self, error: UserError) -> str:
        """Return what the server is told of an error: nothing of this device. Its owner finds the rest in the log."""
        if isinstance(error, RefusedRequestError):
            return str(error)
        if self.activity is not None:
            self.activity.add(str(error))
        if isinstance(error, ConfigError):
            return f"{error.key}: the device cannot follow the run's configuration; its owner's log says why"
        what = "its images do not suit the run" if isinstance(error, DataError) else "it cannot do what the run asks"
        return f"{what}; its owner's log says why"

    def _train(self, payload: TrainPayload) -> Reply:
        request, (config, net) = payload.request, self._checked_config(payload.run_spec)
        check_range("task_index", request.task_index, 0, config.num_tasks - 1)
        first = 0 if request.kind == "head" else 1  # a head may be solved before the first round
        check_range("round", request.round, first, config.rounds)
        storage = ClientStorage.of_run(self.root, payload.run_spec.run_id)
        if payload.base is not None:
            check_size(payload.base, net, self.limits)
            storage.check_room(encoded_size(payload.base), self.limits.disk_mb)
            storage.save_base(payload.base)
        base, state = storage.load_base(), _load_state(storage, request.last_round)
        if base is None or state is None:
            return Reply(request.client, None, failure=_state_lost(request.last_round), state_lost=True)
        setup = self._setup(config, net, payload.run_spec, request.client)
        make_update = partial(
            setup.runtime.pending_update,
            base_weights=to_device(base.tensors, setup.device),
            client_state=_client_state(state, setup.device),
            shard=setup.tasks.train_shard(request.task_index),
        )
        on_device = replace(request, message=request.message.to(setup.device))
        ((reply, update),) = setup.runtime.train([on_device], make_update)
        if reply.message is not None and setup.runtime.method.feature_split is not None:
            self._check_features(setup, payload.run_spec, [base, on_device.message, state, update.client_state])
        if reply.message is not None and request.kind == "round":
            self._save(storage, setup, payload, update)
        if reply.message is not None and request.kind != "round" and request.last_round is None:
            storage.save_state(NO_ROUND, None, None)  # from now on it has the initial broadcast
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
        config, net = self._checked_config(payload.run_spec)
        check_range("num_tasks", payload.num_tasks, 0, config.num_tasks)
        storage = ClientStorage.of_run(self.root, payload.run_spec.run_id)
        base = payload.base if payload.base is not None else storage.load_base()
        state = _load_state(storage, payload.last_round)
        if base is None or state is None:
            return EvalReply(payload.client, failure=_state_lost(payload.last_round))
        setup = self._setup(config, net, payload.run_spec, payload.client)
        (reply,) = setup.runtime.for_kind("last-head" if payload.last_head else "round").evaluate(
            State(to_device(payload.server.tensors, setup.device), payload.server.numbers),
            to_device(base.tensors, setup.device),
            _client_state(state, setup.device),
            [payload.client],
            payload.num_tasks,
        )
        return reply

    def _checked_config(self, run_spec: RunSpec) -> tuple[Config, Net]:
        """Return a run's configuration and its model without values, if the client's owner allows what it asks for.

        Nothing is stored before.
        """
        config = _read_config(run_spec)
        check_run(config, run_spec, self.limits)
        if self._cached is not None and self._cached.run_spec == run_spec:
            net = self._cached.setup.runtime.trainer.net
        else:
            net = check_model(config, run_spec, self.limits)
            if self.activity is not None:
                self.activity.add(describe_run(config, run_spec))
        return within_limits(config, net, self.limits), net

    def _check_features(self, setup: ClientSetup, run_spec: RunSpec, parts: Sequence[Payload | None]) -> None:
        """Check the local module that made features before these leave the device; later parts hold newer weights."""
        runtime, split = setup.runtime, setup.runtime.method.feature_split
        assert split is not None
        weights = {name: tensor for part in parts if part is not None for name, tensor in part.tensors.items()}
        net, received = runtime.trainer.net, runtime.method.from_wire(Message(weights)).tensors
        on_device = to_device(received, setup.device)
        local_module = net.parts.union(net.parts.embed, *net.parts.blocks[:split])
        check_transforms(net, on_device, split, runtime.trainer.preprocess)
        if self.pretrained is not None:
            check_published(setup.config, run_spec, on_device, local_module.names, self.pretrained)

    def _setup(self, config: Config, net: Net, run_spec: RunSpec, client: int) -> ClientSetup:
        data = self.load_images(config, run_spec)
        cached = self._cached
        if cached is None or (cached.run_spec, cached.client) != (run_spec, client) or cached.data is not data:
            cached = self._cached = None  # free its memory before the next one is built
            device = set_up_execution(self.machine, net.embed_dim).device
            check_round(config, run_spec, net, data.train.labels.cpu().numpy(), product_speed(device), self.limits)
            setup = _set_up_client(config, run_spec, client, data, self.machine)
            trainer, device = setup.runtime.trainer, setup.device
            storage = ClientStorage.of_run(self.root, run_spec.run_id)
            views = StoredViews(storage, self.limits.disk_mb, device, views_bytes_limit(device))
            setup = replace(setup, runtime=replace(setup.runtime, trainer=replace(trainer, view_store=views)))
            cached = self._cached = _CachedSetup(run_spec, client, data, setup)
        return cached.setup


def _set_up_client(
    config: Config, run_spec: RunSpec, client: int, data: DataSet, machine_config: MachineConfig
) -> ClientSetup:
    """Build a client's model, method and trainer, and move its images to the training device."""
    classes = len(run_spec.classes)
    net = build_net(config, classes, run_spec.channels, run_spec.image_size)
    machine = set_up_execution(machine_config, net.embed_dim)
    class_to_task, task_order = None, list[int]()
    if config.data.tasks is not None:  # server and clients derive the same tasks from the seed
        class_to_task = torch.from_numpy(assign_classes_to_tasks(config.data.tasks, config.seed, classes))
        class_to_task = class_to_task.to(machine.device)
        task_order = draw_task_order(config.data.tasks, config.seed, client).tolist()
    known = class_to_task if config.task_known else None
    components = build_components(config, net, classes, machine, known)
    net.drop_weights()  # the server sends all weights that a client uses
    tasks = LocalTasks(data.to(machine.device), class_to_task, task_order, components.method.accumulates_tasks)

    def runtime_of(components: Components) -> ClientRuntime:
        evaluator = Evaluator(components.net, components.trainer.preprocess, machine, config.eval.batch_size, known)

        def evaluate_tasks(weights: Tensors, client_tasks: Sequence[ClientTask]) -> list[EvalResult]:
            return [tasks.evaluate(evaluator, weights, task_index) for _, task_index in client_tasks]

        return make_runtime(components, evaluate_tasks)

    def make_last() -> ClientRuntime:
        last = build_last_components(config, classes, run_spec.channels, run_spec.image_size, machine)
        assert last is not None
        return runtime_of(last)

    runtime = replace(runtime_of(components), make_last=None if config.head.last is None else make_last)
    return ClientSetup(config, runtime, tasks)


def _read_config(run_spec: RunSpec) -> Config:
    """Read a run's configuration with what is installed here: a server cannot make a client load code."""
    try:
        check_text("the server's configuration", len(run_spec.config), MAX_SAVED_TEXT)
        tree = parse_json(run_spec.config)
    except ValueError:
        raise RefusedRequestError("the server's configuration is not JSON") from None
    if not isinstance(tree, dict):
        raise RefusedRequestError("the server's configuration is not a table")
    load_installed()
    installed: dict[str, str] = {}
    for registry in ALL:
        installed |= {f"{registry.kind}:{entry.name}": entry.origin.sha256 for entry in registry}
    for needed in run_spec.plugins:
        component, _, digest = needed.rpartition(":")
        name = component.replace(":", " ")
        if component not in installed:
            raise RefusedRequestError(
                f"{name} is not installed on this client; its owner can add it: vitfleet client --plugin FILE"
            )
        if installed[component] != digest:
            raise RefusedRequestError(
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
    return "it has no initial broadcast" if last_round is None else f"it has lost its state after round {last_round}"
