"""What a server sends to a client in Flower messages, and the names of their records.

It imports nothing when it runs: every message starts a new process on a client, which needs the names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitfleet.fleet.base import Request
    from vitfleet.message import Message

HEADER = "header"  # the record of everything except tensors
CHUNK = "chunk"  # the only field of a record that holds a part of a vitfleet message
CLIENT_NAME = "client_name"  # the action of the query for a client's name, and the field of its reply


@dataclass(frozen=True)
class RunSpec:
    """What a client must know of a run besides the current round."""

    run_id: str  # Identifies the run. A client stores its files under it.
    config: str  # the run's configuration, as JSON
    # The images' class names, number of colour channels, and pixels per side
    classes: list[str]
    channels: int
    image_size: int
    # What the run's method and model need from plug-ins: ``kind:name:sha256`` of each. A client compares it with what
    # its owner installed; it never loads a plug-in because a server names it.
    plugins: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class TrainPayload:
    """Request to one client to train. A new client (``request.last_round`` is ``None``) also receives ``base``."""

    request: Request
    run_spec: RunSpec
    base: Message | None


@dataclass(frozen=True)
class EvalPayload:
    """One client's part of an :class:`~vitfleet.fleet.base.EvalRequest`. A new client also receives ``base``."""

    client: int
    num_tasks: int
    last_round: int | None
    run_spec: RunSpec
    server: Message
    base: Message | None
    last_head: bool = False  # whether the server's state has the head of ``[head.last]``
