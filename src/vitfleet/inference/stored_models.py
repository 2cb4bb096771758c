"""The models of a run, read from its folder alone, and single models from their files.

A run stores each part of its models once: what all clients received at first (``base.safetensors``), the server's state
and every client's own state (``checkpoint/``). A model is put together from them when it is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from vitfleet.config.registry import METHODS
from vitfleet.config.schema import Config, ModelConfig
from vitfleet.data.tasks import assign_classes_to_tasks
from vitfleet.errors import UserError
from vitfleet.fleet.build import build_components, build_net
from vitfleet.inference.classifier import Classifier
from vitfleet.message import State, Tensors
from vitfleet.methods import Method, adapt_model
from vitfleet.models.net import Net
from vitfleet.models.variants.wide_head import HeadFeatures
from vitfleet.models.zoo import build_model, weights_without_values
from vitfleet.run.checkpoints.store import StoredStates
from vitfleet.run.output.model_file import DataInfo, model_info, read_base, read_data_info, read_model, server_model
from vitfleet.training.execution.settings import ExecutionSettings

CPU = ExecutionSettings(torch.device("cpu"), bf16=False)


@dataclass(frozen=True)
class StoredModels:
    """The models that a checkpoint of a run holds."""

    config: Config
    data: DataInfo
    net: Net
    method: Method[Any]
    base_weights: Tensors  # what every client received once, before its first round
    states: StoredStates
    class_to_task: Tensor | None = None  # the task of each class, if the model is told an image's task

    @classmethod
    def open(
        cls, folder: Path, config: Config, states: StoredStates | None = None, machine: ExecutionSettings = CPU
    ) -> StoredModels:
        """Open the models of a checkpoint of a run, by default the last one, for use on a machine."""
        data, states = read_data_info(folder), states or StoredStates.of_run(folder)
        if states.last_head() is not None:
            config = config.of_last_head() or config
        # The weights are in the folder: the file that training began with need not exist any more.
        without_file = config.model_copy(update={"model": config.model.model_copy(update={"weights": None})})
        net = build_net(without_file, len(data.classes), data.channels, data.image_size)
        class_to_task = None
        if config.data.tasks is not None and config.task_known:
            class_to_task = torch.from_numpy(assign_classes_to_tasks(config.data.tasks, config.seed, len(data.classes)))
        components = build_components(without_file, net, len(data.classes), machine, class_to_task)
        base = read_base(folder).tensors
        return cls(config, data, components.net, components.method, base, states, class_to_task)

    def classifier(self, client: int | None = None) -> Classifier:
        """Return the model of a client, or of the server."""
        if client is None:
            weights, averaged = self._server_weights()
        else:
            weights, averaged = self.client_weights(client), 0
        info = model_info(self.config, self.data, self.net, self.states.manifest.round, client, averaged)
        return Classifier(self.net, weights, info)

    def client_weights(self, client: int) -> Tensors:
        """Return a client's whole model: its own parts with the shared ones."""
        clients = self.config.fleet.clients
        if not 0 <= client < clients:
            raise UserError(f"client = {client}: must be between 0 and {clients - 1}, fleet.clients − 1")
        if self._is_remote:
            raise UserError(
                f"client = {client}: its own model is on its device, in model.safetensors in its state folder; "
                "here is only the server's model"
            )
        return self.method.model_weights(self._server(), self.base_weights, self.states.client(client))

    def _server_weights(self) -> tuple[Tensors, int]:
        if self._is_remote and not self.method.has_global_model:
            raise UserError(
                f"the server of this run has no whole model with {self.config.method.name}; each device keeps its own, "
                "in model.safetensors in its state folder"
            )
        return server_model(self.method, self._server(), self.base_weights, self.states.clients())

    def _server(self) -> State:
        """Return the server's state, with the head that was solved last."""
        server, last = self.states.server(), self.states.last_head()
        return server if last is None else self.method.with_head(server, last.tensors, self.states.manifest.round)

    @property
    def _is_remote(self) -> bool:
        return self.config.fleet.kind != "simulation"


def load_model_file(path: Path) -> Classifier:
    """Return the model in a file: a run's ``model.safetensors`` or ``best.safetensors``, or a device's own."""
    info, weights = read_model(path)
    keys = dict(info.method)
    name = keys.pop("name")
    if name not in METHODS.names():
        raise UserError(f"{path}: needs the method {name}, which is not installed here; name its file with --plugin")
    method: Any = METHODS.make_params(name, **keys)
    try:
        config = ModelConfig.model_validate(info.model)
    except ValidationError as error:
        raise UserError(f"{path}: its model cannot be built here ({error.errors()[0]['msg']})") from None
    data = info.data
    features = HeadFeatures(**(info.head or {}))
    adapt = partial(adapt_model, method, class_to_task=info.class_to_task or (), features=features)
    build = partial(build_model, config, len(data.classes), data.channels, data.image_size, 0, adapt)
    with weights_without_values():
        described = build().parts.shapes  # a description may claim any size: nothing of it is allocated yet
    if any(name not in weights or weights[name].shape != shape for name, shape in described.items()):
        raise UserError(f"{path}: does not hold the model that it describes; it is damaged, or not of vitfleet")
    return Classifier(build(), weights, info)
