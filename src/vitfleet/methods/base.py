"""A method is two halves and a message.

The server half says how it starts, what goes down to a client, and what it makes of the replies. The client
half says what a device does with its images. What travels between them is a :class:`~vitfleet.message.Message`.
A method never learns where its clients live, and keeps nothing in itself: state comes in and goes out as a
value.

The client half is a generator: it *yields* each training it wants as a :class:`~vitfleet.training.objective.Fit`
and is sent back what came of it. It reads like the algorithm in the paper, while whoever drives it decides how
the training is run: alone, or together with the other clients of the cohort that stand at the same yield.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import torch
from torch import nn

from vitfleet.config.base import AggregationParams, MethodParams
from vitfleet.config.registry import METHODS
from vitfleet.config.schema import Config, TrainConfig
from vitfleet.data.images import Shard
from vitfleet.errors import ConfigError
from vitfleet.message import Message, Numbers, State, Tensors
from vitfleet.methods.aggregation_rules import MeanParams
from vitfleet.methods.client_metrics import ClientMetric
from vitfleet.models.anatomy import Anatomy, Selection
from vitfleet.models.net import Net
from vitfleet.training.objective import Fit, FitResult


@dataclass(frozen=True)
class MethodContext:
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
    num_tasks: int = 1
    aggregate: AggregationParams = field(default_factory=MeanParams)

    @classmethod
    def of(
        cls,
        net: Net,
        train: TrainConfig,
        rounds: int,
        seed: int,
        classes: int,
        device: torch.device,
        num_tasks: int = 1,
        aggregate: AggregationParams | None = None,
    ) -> MethodContext:
        """Return the setting of a model in a run."""
        tokens = net.num_prefix_tokens + net.num_kept_patches(train.mask_ratio)
        rules = aggregate or MeanParams()
        return cls(net.anatomy, train, rounds, seed, classes, tokens, net.embed_dim, device, num_tasks, rules)


@dataclass(frozen=True)
class ClientJob:
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
    message: Message
    base_weights: Tensors
    client_state: State | None
    shard: Shard
    task_index: int = 0


@dataclass(frozen=True)
class ClientUpdate:
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

    message: Message
    model_weights: Tensors
    client_state: State | None = None


ClientGenerator: TypeAlias = Generator[Fit, FitResult, ClientUpdate]
ServerGenerator: TypeAlias = Generator[Fit, FitResult, State]


class RejectedUpdateError(Exception):
    """A message cannot be used; says why."""


class Aggregator(ABC):
    """The server half while replies come in: each is folded in and let go, so memory does not grow.

    Attributes
    ----------
    refused
        Once finished: replies that were taken but, seen beside the others, not used, and why.
    """

    rejected: Mapping[int, str] = MappingProxyType({})

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


Params = TypeVar("Params", bound=MethodParams)


class Method(ABC, Generic[Params]):
    """An algorithm of federated learning."""

    #: Whether clients must learn a stream of tasks (``data.tasks``).
    needs_tasks: ClassVar[bool] = False
    #: The mask ratio the method is meant for: what `vitfleet cost` assumes where a configuration sets none.
    usual_mask_ratio: ClassVar[float] = 0.0
    #: Whether the server has a whole model of its own; if not, the clients' models stand for it.
    has_global_model: ClassVar[bool] = True
    #: The numbers that its clients report, besides ``samples`` and ``loss``.
    client_metrics: ClassVar[tuple[ClientMetric, ...]] = ()
    #: Names of the figures that a report shows for this method: see ``vitfleet.report.method_figures``.
    figures: ClassVar[tuple[str, ...]] = ()

    def __init__(self, params: Params, context: MethodContext) -> None:
        self.params = params
        self.context = context
        self.anatomy = context.anatomy

    @property
    def name(self) -> str:
        """Name the method is registered under."""
        return METHODS.entry_of(self.params).name

    @classmethod
    def check_config(cls, params: Params, config: Config) -> None:
        """Check the method's parameters against the rest of the configuration.

        Raises
        ------
        ConfigError
            Names the key, its value and the remedy.
        """
        if cls.needs_tasks and config.data.tasks is None:
            raise ConfigError(
                "method.name",
                params.name,
                "learns task after task; add a table data.tasks, for example "
                "-o data.tasks.count=5 -o data.tasks.classes=2",
            )

    @property
    def state_on_disk(self) -> bool:
        """Whether the parts of the server's state shall lie on disk, memory-mapped from the checkpoint's files."""
        return False

    @classmethod
    def adapt_model(cls, params: Params, vit: nn.Module) -> None:
        """Add to the architecture what the method needs in it (prompts, low-rank factors): nothing by default."""

    @property
    @abstractmethod
    def trainable(self) -> Selection:
        """What a client trains."""

    # The server half

    def base_message(self, initial: Tensors) -> Message:
        """Return what every client is given once, at its first contact, and keeps: nothing by default."""
        return Message()

    @abstractmethod
    def initial_state(self, initial: Tensors) -> State:
        """Return the server's state before the first round."""

    @abstractmethod
    def client_message(self, server: State, round: int, client: int, last_round: int | None) -> Message:
        """Return what goes down to a client in a round.

        Parameters
        ----------
        since
            The last round in which the server heard from this client; ``None`` if it never did.
        """

    @abstractmethod
    def aggregator(self, server: State, round: int) -> Aggregator:
        """Open a round's gathering of replies."""

    def server_update(self, server: State, round: int) -> ServerGenerator:
        """Train on the server after the replies are in, yielding each training it wants: nothing by default."""
        return server
        yield  # a generator, like the client half

    # The client half

    @abstractmethod
    def client_update(self, job: ClientJob) -> ClientGenerator:
        """Do a client's round, yielding each training it wants."""

    def client_state_shapes(self, reported: Numbers, channels: int, side: int) -> Tensors:
        """Return the shapes of what a client keeps besides its model; its costs follow from them. Nothing by default.

        Parameters
        ----------
        reported
            The numbers of the client's last update.
        channels, side
            Of the client's images.
        """
        return {}

    def num_stored_samples(self, reported: Numbers) -> int:
        """Return how many samples a client keeps besides its data set, by the numbers of its last update."""
        return 0

    # What a model is used with

    @abstractmethod
    def model_weights(self, server: State, base: Tensors, own: State | None) -> Tensors:
        """Return the weights a client would use now; with ``own = None``, a client never seen, or the server."""


def train_metrics(fitted: FitResult) -> Numbers:
    """Return what every message up says of the training behind it."""
    return {"samples": fitted.samples, "loss": float(fitted.loss)}


def check_layers(key: str, value: int, depth: int | None, spare: int = 0) -> None:
    """Check a number of layers against the model's depth; a timm model's own depth is only known once it is built.

    Parameters
    ----------
    spare
        Layers that must be left over.
    """
    if depth is not None and value > depth - spare:
        raise ConfigError(
            f"method.{key}", value, f"must be between 1 and {depth - spare}, the model having {depth} layers"
        )


def method_class(params: MethodParams) -> type[Method[Any]]:
    """Return the class of the method that a parameter table belongs to."""
    target: type[Method[Any]] = METHODS.entry_of(params).target
    return target


def make_method(params: MethodParams, context: MethodContext) -> Method[Any]:
    """Return the method that a configuration names."""
    return method_class(params)(params, context)


def adapt_model(params: MethodParams, vit: nn.Module) -> None:
    """Add to an architecture what the configured method needs in it."""
    method_class(params).adapt_model(params, vit)
