"""A method is two halves and a message.

The server half says how it starts, what goes down to a client, and what it makes of the replies. The client
half says what a device does with its images. What travels between them is a :class:`~vitfleet.message.Message`.
A method never learns where its clients live, and keeps nothing in itself: state comes in and goes out as a
value.

The client half is a generator: it *yields* each training it wants as a :class:`~vitfleet.train.objective.Fit`
and is sent back what came of it. It reads like the algorithm in the paper, while whoever drives it decides how
the training is run: alone, or together with the other clients of the cohort that stand at the same yield.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, Generic, TypeAlias, TypeVar

import torch
from torch import nn

from vitfleet.config.base import Table
from vitfleet.config.schema import AggregateConfig, TrainConfig
from vitfleet.data.images import Shard
from vitfleet.message import Message, Numbers, State, Tensors
from vitfleet.models.anatomy import Anatomy, Selection
from vitfleet.models.net import Net
from vitfleet.train.objective import Fit, Fitted


@dataclass(frozen=True)
class Setting:
    """What a method may know of the run it is in.

    Attributes
    ----------
    tokens, width
        Tokens of a training image after masking, class token included, and the numbers in each.
    device
        Where training happens.
    stages
        Tasks that every client learns, one after the other.
    """

    anatomy: Anatomy
    train: TrainConfig
    rounds: int
    seed: int
    classes: int
    tokens: int
    width: int
    device: torch.device
    stages: int = 1
    aggregate: AggregateConfig = field(default_factory=AggregateConfig)

    @classmethod
    def of(
        cls,
        net: Net,
        train: TrainConfig,
        rounds: int,
        seed: int,
        classes: int,
        device: torch.device,
        stages: int = 1,
        aggregate: AggregateConfig | None = None,
    ) -> Setting:
        """Return the setting of a model in a run."""
        tokens = net.prefix + net.kept(train.mask_ratio)
        rules = aggregate or AggregateConfig()
        return cls(net.anatomy, train, rounds, seed, classes, tokens, net.width, device, stages, rules)


@dataclass(frozen=True)
class Job:
    """What a client is asked to do in one round.

    Attributes
    ----------
    down
        The server's message.
    base
        What every client was given once, at its first contact: see :meth:`Method.base`.
    own
        The client's own state, as it left it; ``None`` before its first round.
    shard
        The client's images, at this stage of its stream of tasks.
    stage
        How many tasks lie behind it; 0 where there is no stream.
    """

    round: int
    client: int
    down: Message
    base: Tensors
    own: State | None
    shard: Shard
    stage: int = 0


@dataclass(frozen=True)
class Answer:
    """What a client makes of a job.

    Attributes
    ----------
    up
        The message it sends.
    model
        Its own model as it now stands: what local accuracy is measured on. It does not travel.
    own
        The state it keeps; ``None``: it keeps nothing.
    """

    up: Message
    model: Tensors
    own: State | None = None


Work: TypeAlias = Generator[Fit, Fitted, Answer]
ServerWork: TypeAlias = Generator[Fit, Fitted, State]


class RefusalError(Exception):
    """A message cannot be used; says why."""


class Gathering(ABC):
    """The server half while replies come in: each is folded in and let go, so memory does not grow.

    Attributes
    ----------
    refused
        Once finished: replies that were taken but, seen beside the others, not used, and why.
    """

    refused: Mapping[int, str] = MappingProxyType({})

    @abstractmethod
    def add(self, client: int, up: Message) -> None:
        """Fold in one reply. Replies always come in the order of the requests, whoever was faster.

        Raises
        ------
        RefusalError
            If the message cannot be used; it is named and counted, and the round goes on without it.
        """

    @abstractmethod
    def finish(self) -> State:
        """Return the server's new state."""


Params = TypeVar("Params", bound=Table)


class Method(ABC, Generic[Params]):
    """An algorithm of federated learning."""

    name: ClassVar[str]
    #: Whether the server has a whole model of its own; if not, the clients' models stand for it.
    has_global_model: ClassVar[bool] = True

    def __init__(self, params: Params, setting: Setting) -> None:
        self.params = params
        self.setting = setting
        self.anatomy = setting.anatomy

    @property
    def file_backed(self) -> bool:
        """Whether the parts of the server's state shall lie on disk, memory-mapped from the checkpoint's files."""
        return False

    @classmethod
    def adapt(cls, params: Params, vit: nn.Module) -> None:
        """Add to the architecture what the method needs in it (prompts, low-rank factors): nothing by default."""

    @property
    @abstractmethod
    def trains(self) -> Selection:
        """What a client trains."""

    # The server half

    def base(self, initial: Tensors) -> Message:
        """Return what every client is given once, at its first contact, and keeps: nothing by default."""
        return Message()

    @abstractmethod
    def start(self, initial: Tensors) -> State:
        """Return the server's state before the first round."""

    @abstractmethod
    def instruct(self, server: State, round: int, client: int, since: int | None) -> Message:
        """Return what goes down to a client in a round.

        Parameters
        ----------
        since
            The last round in which the server heard from this client; ``None`` if it never did.
        """

    @abstractmethod
    def gather(self, server: State, round: int) -> Gathering:
        """Open a round's gathering of replies."""

    def refine(self, server: State, round: int) -> ServerWork:
        """Train on the server after the replies are in, yielding each training it wants: nothing by default."""
        return server
        yield  # a generator, like the client half

    # The client half

    @abstractmethod
    def work(self, job: Job) -> Work:
        """Do a client's round, yielding each training it wants."""

    def kept(self, said: Numbers, channels: int, side: int) -> Tensors:
        """Return the shapes of what a client keeps besides its model, by what its last message said of itself.

        Its costs follow from it: nothing by default.

        Parameters
        ----------
        channels, side
            Of the client's images.
        """
        return {}

    # What a model is used with

    @abstractmethod
    def model(self, server: State, base: Tensors, own: State | None) -> Tensors:
        """Return the weights a client would use now; with ``own = None``, a client never seen, or the server."""


def tally(fitted: Fitted) -> Numbers:
    """Return what every message up says of the training behind it."""
    return {"samples": fitted.samples, "loss": float(fitted.loss)}
