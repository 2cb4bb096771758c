"""Checks of method parameters against the model's depth and the training configuration."""

from __future__ import annotations

from vitfleet.errors import ConfigError


def check_layers(key: str, value: int, depth: int | None, least: int = 1, reserved: int = 0) -> None:
    """Check that a number of layers is possible for the model.

    Parameters
    ----------
    key
        The parameter, without ``method.``.
    depth
        Number of the model's layers; ``None``: only known once the model is built.
    least
        The smallest valid number.
    reserved
        Layers that must remain.
    """
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


def check_views(views: int, epochs: int) -> None:
    """Check that every view of an image can come from an epoch of its own."""
    if views > epochs:
        raise ConfigError("method.views", views, f"must be at most train.epochs = {epochs}: every epoch gives one view")
