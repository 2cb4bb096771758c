"""What both ends of a run make of its configuration: the model, the method, the trainer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from vitfleet.config.schema import Config
from vitfleet.methods import Method, MethodContext, adapt, make_method
from vitfleet.models.net import Net
from vitfleet.models.zoo import build
from vitfleet.train.machine import Machine
from vitfleet.train.trainer import Trainer, preprocess_for


@dataclass(frozen=True)
class Components:
    """A model without weights, a method, and what trains the one for the other."""

    net: Net
    method: Method[Any]
    trainer: Trainer


def build_net(config: Config, classes: int, channels: int, side: int) -> Net:
    """Make a run's model for data of so many classes, colour channels and pixels a side."""
    return build(config.model, classes, channels, side, config.seed, partial(adapt, config.method))


def build_components(
    config: Config, net: Net, classes: int, machine: Machine, num_tasks: int = 1, tasks: Tensor | None = None
) -> Components:
    """Make what a machine needs to train a run's model.

    Parameters
    ----------
    stages, tasks
        Of a run of tasks: how many there are, and the task of each class where an image's task is known.
    """
    net = net.to(machine.device)
    if machine.bf16 and machine.device.type == "cpu":
        # There the fused kernel's backward pass takes three to five times as long in bfloat16.
        net = net.with_unfused_attention()
    context = MethodContext.of(
        net, config.train, config.rounds, config.seed, classes, machine.device, num_tasks, config.aggregate
    )
    preprocess = preprocess_for(net, machine.device)
    trainer = Trainer(net, preprocess, config.train, config.data.augment, config.schedule_rounds, machine, tasks)
    return Components(net, make_method(config.method, context), trainer)
