"""Sizes of a family: those of small images, those of images of 224 pixels, and what the configuration sets."""

from __future__ import annotations

from typing import Any

from vitfleet.config.base import Table
from vitfleet.errors import ConfigError

SMALL_IMAGE = 96  # pixels: smaller images get a family's small configuration


def choose_sizes(params: Table, image_size: int, small: dict[str, Any], standard: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes for an image size; a parameter that is set takes the place of its default."""
    chosen = {name: value for name, value in params.model_dump().items() if value is not None}
    return {**(small if image_size < SMALL_IMAGE else standard), **chosen}


def check_stages(sizes: dict[str, Any], *names: str) -> None:
    """Require one value per stage in each of the named sizes.

    Raises
    ------
    ConfigError
        Names the key, its value and the remedy.
    """
    stages = len(sizes[names[0]])
    for name in names[1:]:
        if len(sizes[name]) != stages:
            raise ConfigError(
                f"model.params.{name}",
                list(sizes[name]),
                f"must have one value per stage, as model.params.{names[0]} = {list(sizes[names[0]])} has",
            )


def check_divides(heads: int, dim: int, prefix: str = "model.params") -> None:
    """Require a width that can be divided among the attention heads.

    Raises
    ------
    ConfigError
        Names the key, its value and the remedy.
    """
    if dim % heads:
        raise ConfigError(f"{prefix}.heads", heads, f"must divide the width, {dim}")
