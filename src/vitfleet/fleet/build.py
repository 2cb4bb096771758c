"""Build the model, the method and the trainer of a run from its configuration, on a server or a client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vitfleet.config.schema import Config
from vitfleet.methods import Method, MethodContext, frozen_part, make_head_solver, make_method, model_adaptation
from vitfleet.models.net import Net
from vitfleet.models.zoo import build_model
from vitfleet.training.execution.memory_budget import views_bytes_limit
from vitfleet.training.execution.settings import ExecutionSettings
from vitfleet.training.trainer import Trainer, preprocess_for
from vitfleet.training.views.cache import ViewStore


@dataclass(frozen=True)
class Components:
    """A run's model architecture, its method and its trainer, and the method that solves its head, if one does."""

    net: Net
    method: Method[Any]
    trainer: Trainer
    head_solver: Method[Any] | None = None


def build_net(config: Config, num_classes: int, channels: int, image_size: int) -> Net:
    """Build a run's model for images of ``image_size`` x ``image_size`` pixels."""
    adapt = model_adaptation(config, num_classes)
    return build_model(config.model, num_classes, channels, image_size, config.seed, adapt)


def build_components(
    config: Config, net: Net, num_classes: int, machine: ExecutionSettings, class_to_task: Tensor | None = None
) -> Components:
    """Build everything that a machine needs to train a run's model.

    ``class_to_task``, ``[classes]``, is given if the model is told an image's task.
    """
    net = net.to(machine.device)
    if machine.bf16 and machine.device.type == "cpu":
        # On a CPU the fused kernel's backward pass takes three to five times as long in bfloat16.
        net = net.with_unfused_attention()
    context = MethodContext(config, net, num_classes, machine.device)
    preprocess = preprocess_for(net, machine.device)
    method = make_method(config.method, context)
    trainer = Trainer(
        net,
        preprocess,
        config.train,
        config.data.augment,
        config.schedule_rounds,
        machine,
        class_to_task,
        frozen_part=frozen_part(method),
        view_store=ViewStore(views_bytes_limit(machine.device)),
    )
    return Components(net, method, trainer, make_head_solver(context))


def build_last_components(
    config: Config, num_classes: int, channels: int, image_size: int, machine: ExecutionSettings
) -> Components | None:
    """Build the same for the model that a run ends with, where ``[head.last]`` gives that a head of its own.

    It has no weights: the body is that of the run's model, which trained, and its head is solved.
    """
    last = config.of_last_head()
    if last is None:
        return None
    last = last.model_copy(update={"model": last.model.model_copy(update={"weights": None})})
    net = build_net(last, num_classes, channels, image_size)
    components = build_components(last, net, num_classes, machine)
    components.net.drop_weights()
    return components
