"""Whether what a server asks for is within the limits of a device's owner: before anything is built, or of its size.

A server is not trusted more than a stranger: its configuration may name no file, plug-in or hub model and no setting of
the device's hardware. What the method declares is checked first, then the model's sizes on a model without values, then
the memory and the time of a round, from a dry run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from vitfleet.config.registry import method_label
from vitfleet.config.schema import Config, MachineConfig
from vitfleet.costs.cost_model import CostModel
from vitfleet.errors import RefusedRequestError
from vitfleet.fleet.build import build_net
from vitfleet.flower.device.limits import MEGABYTE, ClientLimits
from vitfleet.flower.transport.payloads import RunSpec
from vitfleet.message import Message
from vitfleet.methods import MethodContext, declared_work, make_method
from vitfleet.models.net import Net
from vitfleet.models.zoo import weights_without_values
from vitfleet.training.execution.memory_budget import FLOAT_BYTES, SAVED_PER_TOKEN_NUMBER, estimate_client_bytes

TRAINING_PASSES = 3  # a step's operations, in forward passes
LAYER_SECONDS = 3e-4  # that a layer's step takes however small it is, roughly
COUNTED_PASSES = 16  # of an image in a step: the operations of more are not counted one by one, which would take long
FORWARD_NUMBERS = 24  # that an evaluated image's forward pass holds per number of its tokens, roughly
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_run(config: Config, run_spec: RunSpec, limits: ClientLimits) -> None:
    """Check what a server asks for against what the device's owner allows, before anything is built or stored."""
    _check_form(config, run_spec)
    tasks, work = config.data.tasks, declared_work(config)
    _check_limits(
        {
            "layers": config.model.depth,
            "width": config.model.dim if config.model.name == "vit" else None,
            "image_size": max(run_spec.image_size, config.model.image_size or 0),
            "classes": len(run_spec.classes),
            "epochs": work.epochs,
            "batch_size": work.images_per_step,
            "passes": work.passes,
            "tasks": tasks.count if tasks else None,
            "stored_share": work.stored_share,
            "shown_share": work.shown_share,
            "cached_views": work.cached_views,
        },
        limits,
    )


def check_model(config: Config, run_spec: RunSpec, limits: ClientLimits) -> Net:
    """Check the sizes of a model that the server names: they follow from the name, not from the configuration.

    It is built without values: nothing of its size is allocated. Return this model.
    """
    with weights_without_values():
        net = build_net(config, len(run_spec.classes), run_spec.channels, run_spec.image_size)
    megabytes = FLOAT_BYTES * net.parts.count_parameters(net.parts.whole) / MEGABYTE
    asked = {"layers": net.parts.depth, "width": net.embed_dim, "image_size": net.image_size, "model_mb": megabytes}
    _check_limits(asked, limits)
    return net


def check_round(
    config: Config, run_spec: RunSpec, net: Net, labels: NDArray[np.int64], speed: float, limits: ClientLimits
) -> None:
    """Check the memory and the time of a round on the device's images before anything of their size is allocated.

    ``net`` has no values; ``speed`` is the operations per second that the device manages.
    """
    work = declared_work(config)
    context = MethodContext(config, net, len(run_spec.classes), torch.device("cpu"))
    cost_model = CostModel(make_method(config.method, context), net, config.train, run_spec.image_size)
    round = cost_model.dry_run(1, 0, labels)
    groups = [tensors for training in round.trainings for tensors in training.tensor_groups().values()]
    held = {id(tensor): tensor for tensors in groups for tensor in tensors.values()}
    images = len(labels) * run_spec.channels * run_spec.image_size**2
    tensors = sum(tensor.numel() * tensor.element_size() for tensor in held.values())
    training = estimate_client_bytes(net, config.train, work.images_per_step)
    prompts = FLOAT_BYTES * SAVED_PER_TOKEN_NUMBER * work.images_per_step * num_prompts(net)
    training += prompts * net.embed_dim * net.parts.depth
    steps = work.epochs * math.ceil(len(labels) / config.train.batch_size)
    overhead = steps * work.passes * (1 + net.parts.depth) * LAYER_SECONDS
    seconds = TRAINING_PASSES * work.passes * _forward_flops(net) * steps * work.images_per_step / speed + overhead
    if seconds > limits.seconds_per_round and work.passes <= COUNTED_PASSES:  # of some methods that is far too much
        seconds = cost_model.round_flops(round, len(labels)) / speed + overhead
    _check_limits({"memory_mb": (images + tensors + training) / MEGABYTE, "seconds_per_round": seconds}, limits)


def num_prompts(net: Net) -> int:
    """Return how many prompt tokens a layer has."""
    return max((net.parts.shapes[name][-2] for name in net.parts.prompts), default=0)


def _forward_flops(net: Net) -> float:
    """Return roughly the operations of an image's forward pass: products with the weights, and attention."""
    tokens = net.num_prefix_tokens + net.num_patches + num_prompts(net)
    weights = net.parts.count_parameters(net.parts.whole)
    return 2 * tokens * weights + 4 * net.parts.depth * tokens**2 * net.embed_dim


def check_size(base: Message, net: Net, limits: ClientLimits) -> None:
    """Refuse what every client receives once if it is much more than a model."""
    most = 2 * FLOAT_BYTES * net.parts.count_parameters(net.parts.whole) + MEGABYTE
    _check_limits({"model_mb": base.num_bytes / MEGABYTE}, limits)
    if base.num_bytes > most:
        raise RefusedRequestError(f"the server sends {base.num_bytes} bytes for a model that has at most {most}")


def check_range(name: str, value: int, least: int, most: int) -> None:
    """Refuse a number of a request that no server of ours sends."""
    if not least <= value <= most:
        raise RefusedRequestError(f"the server asks for {name} = {value}; expected: between {least} and {most}")


def within_limits(config: Config, net: Net, limits: ClientLimits) -> Config:
    """Return a run's configuration as a client follows it: it evaluates in batches that its owner allows, and that fit.

    The size of these batches changes a result by rounding at most, so a run is not refused for it.
    """
    tokens = net.num_prefix_tokens + net.num_patches + num_prompts(net)
    image = FLOAT_BYTES * FORWARD_NUMBERS * tokens * net.embed_dim
    fitting = max(1, limits.memory_mb * MEGABYTE // (2 * image))
    batch_size = min(config.eval.batch_size, limits.batch_size, fitting)
    return config.model_copy(update={"eval": config.eval.model_copy(update={"batch_size": batch_size})})


def _check_limits(asked: Mapping[str, float | None], limits: ClientLimits) -> None:
    for name, value in asked.items():
        allowed = getattr(limits, name)
        if value is not None and value > allowed:
            asks = f"{name} = {value if isinstance(value, int) else format(value, '.3g')}"
            raise RefusedRequestError(
                f"the server asks for {asks} ({ClientLimits.model_fields[name].description}); this client's "
                f"owner allows {allowed} (vitfleet client --limit {name}=…)"
            )


def _check_form(config: Config, run_spec: RunSpec) -> None:
    """Reject what a server has no business with, or what no server of ours sends."""
    if not RUN_ID.fullmatch(run_spec.run_id):
        raise RefusedRequestError(f"the server's run has the name {run_spec.run_id[:80]!r}, which cannot be a folder's")
    if not (run_spec.channels in (1, 3) and run_spec.image_size >= 1 and run_spec.classes):
        raise RefusedRequestError(
            f"the server's images have {run_spec.channels} channels and {run_spec.image_size} pixels per side"
        )
    if not MODEL_NAME.fullmatch(config.model.name):
        raise RefusedRequestError(
            f"the server asks for model.name = {config.model.name[:80]!r}; it may name no hub and no path"
        )
    files = {
        "data.path": config.data.path,
        "data.dir": config.data.dir,
        "data.partition.path": getattr(config.data.partition, "path", None),
        "model.weights": config.model.weights,
    }
    for key, value in files.items():
        if value is not None:
            raise RefusedRequestError(f"the server sets {key} = {value[:80]!r}; a server may name no file on a client")
    if config.machine != MachineConfig():
        raise RefusedRequestError("the server sets keys of the table machine; a client's owner chooses its hardware")


def describe_run(config: Config, run_spec: RunSpec) -> str:
    """Return what a server asks for, in one line, for the owner's eyes and log."""
    model, work = config.model, declared_work(config)
    size = (
        f"{model.depth or 4} layers, {model.dim} wide" if model.name == "vit" else f"{model.depth or 'its own'} layers"
    )
    tasks = f", {config.data.tasks.count} tasks" if config.data.tasks else ""
    shown = ""
    if work.shown_share:
        shown = (
            f"; features of {min(1.0, work.shown_share):.0%} of each image's patches leave this device in a round, and "
            "whoever has them can rebuild these patches (docs/fleet.md)"
        )
    method = method_label(config.method.name)
    return (
        f"run {run_spec.run_id}: the server asks to train {method} for up to {config.rounds} rounds of "
        f"{work.epochs} epochs (batch {work.images_per_step}){tasks}; model {model.name} ({size}); images of "
        f"{run_spec.image_size} × {run_spec.image_size} × {run_spec.channels}, {len(run_spec.classes)} classes{shown}"
    )
