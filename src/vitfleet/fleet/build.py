"""Build the model, the method and the trainer of a run from its configuration, on a server or a client."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from vitfleet.config.schema import Config
from vitfleet.data.tasks import task_classes
from vitfleet.methods import Method, MethodContext, adapt_model, make_method
from vitfleet.models.net import Net
from vitfleet.models.zoo import build_model
from vitfleet.training.machine import Machine
from vitfleet.training.trainer import Trainer, preprocess_for


@dataclass(frozen=True)
class Components:
    """A run's model architecture, its method and its trainer."""

    net: Net
    method: Method[Any]
    trainer: Trainer


def build_net(config: Config, num_classes: int, channels: int, side: int) -> Net:
    """Build a run's model for images of ``side`` x ``side`` pixels."""
    class_tasks = task_classes(config.data.tasks, config.seed, num_classes).class_tasks
    adapt = partial(adapt_model, config.method, class_tasks=class_tasks)
    return build_model(config.model, num_classes, channels, side, config.seed, adapt)


def build_components(
    config: Config, net: Net, num_classes: int, machine: Machine, num_tasks: int = 1, class_tasks: Tensor | None = None
) -> Components:
    """Build everything that a machine needs to train a run's model.

    Parameters
    ----------
    num_tasks
        Tasks per client; 1 without tasks.
    class_tasks
        The task of each class, ``[classes]``, if the model is given an image's task.
    """
    net = net.to(machine.device)
    if machine.bf16 and machine.device.type == "cpu":
        # On a CPU the fused kernel's backward pass takes three to five times as long in bfloat16.
        net = net.with_unfused_attention()
    context = MethodContext.from_net(
        net,
        config.train,
        config.rounds,
        config.seed,
        num_classes,
        machine.device,
        num_tasks,
        config.aggregate,
        config.eval.body,
        task_classes(config.data.tasks, config.seed, num_classes),
    )
    preprocess = preprocess_for(net, machine.device)
    trainer = Trainer(net, preprocess, config.train, config.data.augment, config.schedule_rounds, machine, class_tasks)
    return Components(net, make_method(config.method, context), trainer)
