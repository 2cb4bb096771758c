"""Checks of method parameters against the model's depth and the training configuration."""

from __future__ import annotations

from vitfleet.errors import ConfigError


def check_layers(key: str, value: int, depth: int | None, least: int = 1, reserved: int = 0) -> None:
    """Check that a parameter, a number of layers, is possible for a model; ``depth`` is ``None`` before it is built."""
    if depth is None or least <= value <= depth - reserved:
        return
    remedy = f"must be between {least} and {depth - reserved}: the model has {depth} layers"
    if reserved:
        remedy += f", {reserved} of which must remain"
    raise ConfigError(f"method.{key}", value, remedy)


def check_head_epochs(head_epochs: int, epochs: int) -> None:
    """Check that at least one epoch per round remains for the body."""
    if head_epochs >= epochs:
        raise ConfigError(
            "method.head_epochs",
            head_epochs,
            f"must be below train.epochs = {epochs}: the remaining epochs train the body",
        )
