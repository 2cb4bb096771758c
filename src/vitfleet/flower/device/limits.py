"""What a device's owner allows a server to ask for. A server is not trusted more than a stranger.

A run's configuration comes from the server. It may name no file, plug-in or hub model and no setting of the device's
hardware, and what decides the work and the memory is limited by ``vitfleet client --limit NAME=VALUE``.

What needs torch is imported where a run is checked: the process that keeps a client connected reads the limits without.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from pydantic import Field, ValidationError

from vitfleet.config.base import Table
from vitfleet.config.registry import method_label
from vitfleet.config.schema import Config, MachineConfig
from vitfleet.errors import UserError
from vitfleet.flower.transport.payloads import RunSpec

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class ClientLimits(Table):
    """Limits of one device, set by its owner."""

    layers: int = Field(64, ge=1, description="layers of the model")
    width: int = Field(4096, ge=1, description="embedding width of the model")
    image_size: int = Field(1024, ge=1, description="pixels per side of the images")
    classes: int = Field(100_000, ge=1, description="classes")
    epochs: int = Field(1000, ge=1, description="epochs that run in a round, of tuning and measuring too")
    batch_size: int = Field(4096, ge=1, description="images per step, replayed ones too")
    passes: int = Field(10_000, ge=1, description="forward passes of an image in a step")
    tasks: int = Field(1000, ge=1, description="tasks")
    disk_mb: int = Field(20_000, ge=1, description="megabytes of all runs' files on the client")
    stored_share: float = Field(1.0, gt=0, le=1, description="share of the images that is stored as samples")

    @classmethod
    def parse(cls, texts: Sequence[str]) -> ClientLimits:
        """Return the limits that ``NAME=VALUE`` texts set; the others have their defaults."""
        values: dict[str, int | float] = {}
        for text in texts:
            name, sign, value = text.partition("=")
            if not sign or name not in cls.model_fields:
                raise UserError(f"--limit {text}: must be NAME=VALUE, NAME one of {', '.join(cls.model_fields)}")
            try:
                values[name] = float(value) if name == "stored_share" else int(value)
            except ValueError:
                raise UserError(f"--limit {text}: {value!r} is not a number") from None
        try:
            return cls(**values)  # type: ignore[arg-type]
        except ValidationError as error:
            first = error.errors()[0]
            problem = first["msg"].removeprefix("Input ").replace("should", "must")
            raise UserError(f"--limit {first['loc'][0]}={first['input']}: {problem}") from None


def check_run(config: Config, run_spec: RunSpec, limits: ClientLimits) -> None:
    """Check what a server asks for against what the device's owner allows, before anything is built or stored."""
    from vitfleet.methods import declared_work

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
        },
        limits,
    )


def check_model(config: Config, run_spec: RunSpec, limits: ClientLimits) -> None:
    """Check the sizes of a model that the server names: they follow from the name, not from the configuration.

    It is built without values: nothing of its size is allocated.
    """
    from vitfleet.fleet.build import build_net
    from vitfleet.models.zoo import weights_without_values

    with weights_without_values():
        net = build_net(config, len(run_spec.classes), run_spec.channels, run_spec.image_size)
    _check_limits({"layers": net.parts.depth, "width": net.embed_dim, "image_size": net.image_size}, limits)


def within_limits(config: Config, limits: ClientLimits) -> Config:
    """Return a run's configuration as a client follows it: it evaluates in batches that its owner allows.

    The size of these batches changes a result by rounding at most, so a run is not refused for it.
    """
    batch_size = min(config.eval.batch_size, limits.batch_size)
    return config.model_copy(update={"eval": config.eval.model_copy(update={"batch_size": batch_size})})


def _check_limits(asked: Mapping[str, float | None], limits: ClientLimits) -> None:
    for name, value in asked.items():
        allowed = getattr(limits, name)
        if value is not None and value > allowed:
            raise UserError(
                f"the server asks for {name} = {value} ({ClientLimits.model_fields[name].description}); this client's "
                f"owner allows {allowed} (vitfleet client --limit {name}=…)"
            )


def _check_form(config: Config, run_spec: RunSpec) -> None:
    """Reject what a server has no business with, or what no server of ours sends."""
    if not RUN_ID.fullmatch(run_spec.run_id):
        raise UserError(f"the server's run has the name {run_spec.run_id[:80]!r}, which cannot be a folder's")
    if not (run_spec.channels in (1, 3) and run_spec.image_size >= 1 and run_spec.classes):
        raise UserError(
            f"the server's images have {run_spec.channels} channels and {run_spec.image_size} pixels per side"
        )
    if not MODEL_NAME.fullmatch(config.model.name):
        raise UserError(f"the server asks for model.name = {config.model.name[:80]!r}; it may name no hub and no path")
    files = {
        "data.path": config.data.path,
        "data.dir": config.data.dir,
        "data.partition.path": getattr(config.data.partition, "path", None),
        "model.weights": config.model.weights,
    }
    for key, value in files.items():
        if value is not None:
            raise UserError(f"the server sets {key} = {value[:80]!r}; a server may name no file on a client")
    if config.machine != MachineConfig():
        raise UserError("the server sets keys of the table machine; a client's owner chooses its hardware")


def describe_run(config: Config, run_spec: RunSpec) -> str:
    """Return what a server asks for, in one line, for the owner's eyes and log."""
    from vitfleet.methods import declared_work

    model, work = config.model, declared_work(config)
    size = (
        f"{model.depth or 4} layers, {model.dim} wide" if model.name == "vit" else f"{model.depth or 'its own'} layers"
    )
    tasks = f", {config.data.tasks.count} tasks" if config.data.tasks else ""
    method = method_label(config.method.name)
    return (
        f"run {run_spec.run_id}: the server asks to train {method} for up to {config.rounds} rounds of "
        f"{work.epochs} epochs (batch {work.images_per_step}){tasks}; model {model.name} ({size}); images of "
        f"{run_spec.image_size} × {run_spec.image_size} × {run_spec.channels}, {len(run_spec.classes)} classes"
    )
