"""The limits that a device's owner sets for the runs of a server, and their defaults.

This module does without torch: the process that keeps a client connected reads the limits. Whether a run is within them
is for :mod:`vitfleet.flower.device.checks`.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field, ValidationError

from vitfleet.config.base import Table
from vitfleet.errors import UserError
from vitfleet.system import total_memory

MEGABYTE = 10**6


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
    shown_share: float = Field(
        0.5, ge=0, description="share of an image's patches whose features are sent in a round, every view counted"
    )
    memory_mb: int = Field(
        default_factory=lambda: total_memory() // 2 // MEGABYTE,
        ge=1,
        description="megabytes of memory that a round takes; by default half of the machine's",
    )
    model_mb: int = Field(
        default_factory=lambda: total_memory() // 8 // MEGABYTE,
        ge=1,
        description="megabytes of a model's weights, as numbers of four bytes; by default an eighth of the machine's",
    )
    seconds_per_round: int = Field(
        3600, ge=1, description="seconds that a round takes, roughly; one that takes twice as long is ended"
    )
    cached_views: int = Field(100, ge=0, description="views of every image that are kept as frozen layers compute them")

    @classmethod
    def parse(cls, texts: Sequence[str]) -> ClientLimits:
        """Return the limits that ``NAME=VALUE`` texts set; the others have their defaults."""
        values: dict[str, int | float] = {}
        for text in texts:
            name, sign, value = text.partition("=")
            if not sign or name not in cls.model_fields:
                raise UserError(f"--limit {text}: must be NAME=VALUE, NAME one of {', '.join(cls.model_fields)}")
            try:
                values[name] = float(value) if name.endswith("_share") else int(value)
            except ValueError:
                raise UserError(f"--limit {text}: {value!r} is not a number") from None
        try:
            return cls(**values)  # type: ignore[arg-type]
        except ValidationError as error:
            first = error.errors()[0]
            problem = first["msg"].removeprefix("Input ").replace("should", "must")
            raise UserError(f"--limit {first['loc'][0]}={first['input']}: {problem}") from None
