"""Build the model, the method and the trainer of a run from its configuration, on a server or a client."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from vitfleet.config.schema import Config
from vitfleet.data.tasks import class_to_task
from vitfleet.methods import Method, MethodContext, adapt_model, make_method
from vitfleet.models.net import Net
from vitfleet.models.zoo import build_model
from vitfleet.training.execution.settings import ExecutionSettings
from vitfleet.training.trainer import Trainer, preprocess_for


@dataclass(frozen=True)
class Components:
    """A run's model architecture, its method and its trainer."""

    net: Net
    method: Method[Any]
    trainer: Trainer


def build_net(config: Config, num_classes: int, channels: int, image_size: int) -> Net:
    """Build a run's model for images of ``image_size`` x ``image_size`` pixels."""
    tasks = class_to_task(config.data.tasks, config.seed, num_classes)
    adapt = partial(adapt_model, config.method, class_to_task=tasks)
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
    trainer = Trainer(
        net, preprocess, config.train, config.data.augment, config.schedule_rounds, machine, class_to_task
    )
    return Components(net, make_method(config.method, context), trainer)
