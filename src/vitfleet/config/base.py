"""The base of every configuration table."""

from pydantic import BaseModel, ConfigDict


class Table(BaseModel):
    """A table of the configuration: frozen, and a key nobody knows is an error, not a silence."""

    # Strict: `rounds = true` is a mistake, not one round.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)
