"""The interface of a federated learning method.

A method has a server part and a client part that exchange :class:`~vitfleet.message.Message` values. The server part
defines the initial state, the message to each client and the aggregation of the clients' updates. The client part
defines what a client does with its images. A method is stateless: the state of the server and of each client is an
argument and a result. Where clients run (in this process, in other processes, on other machines) is not its concern.

The client part is a generator. It *yields* every training as a
:class:`~vitfleet.training.local_training.LocalTraining` and receives the
:class:`~vitfleet.training.local_training.LocalResult`, so it reads like the algorithm in the paper. The caller decides
how a training is executed: alone, or stacked with those of other clients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import isfinite
from types import MappingProxyType
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import torch
from torch import nn

from vitfleet.config.base import AggregationParams, MethodParams
from vitfleet.config.head import HeadConfig, HeadSolver
from vitfleet.config.registry import METHODS
from vitfleet.config.schema import Config, TrainConfig
from vitfleet.data.images import Shard
from vitfleet.data.tasks import class_to_task
from vitfleet.errors import ConfigError, UserError
from vitfleet.message import Message, Number, Numbers, State, Tensors
from vitfleet.methods.reported import ClientMetric, check_shapes
from vitfleet.models.net import Net
from vitfleet.models.parts import ModelParts, Selection
from vitfleet.models.variants.wide_head import HeadFeatures, widen_head
from vitfleet.training.local_training import LocalResult, LocalTraining
from vitfleet.training.views.frozen import FrozenPart, find_frozen_part


@dataclass(frozen=True)
class MethodContext:
    """The run that a method is part of."""

    config: Config
    net: Net  # the model's architecture
    num_classes: int  # of the data set
    device: torch.device  # that trains

    @property
    def parts(self) -> ModelParts:
        """The named parts of the model."""
        return self.net.parts

    @property
    def train(self) -> TrainConfig:
        """The table ``[train]``."""
        return self.config.train

    @property
    def aggregation(self) -> AggregationParams:
        """The table ``[aggregate]``: the aggregation rule with its parameters, and whether the defence is on."""
        config = self.config
        return config.aggregate.model_copy(update={"defence": "clip" if config.defends else "off"})

    @property
    def rounds(self) -> int:
        """Number of rounds of the run."""
        return self.config.rounds

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.config.seed

    @property
    def num_tasks(self) -> int:
        """Number of tasks that every client learns one after the other; 1 without tasks."""
        return self.config.num_tasks

    @cached_property
    def class_to_task(self) -> tuple[int, ...]:
        """The task of each class, −1 for a class that belongs to none; empty without tasks."""
        return class_to_task(self.config.data.tasks, self.seed, self.num_classes)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of a training image after masking, class token included."""
        return self.net.num_prefix_tokens + self.net.num_kept_patches(self.train.mask_ratio)

    @property
    def embed_dim(self) -> int:
        """Length of a token."""
        return self.net.embed_dim


@dataclass(frozen=True)
class ClientRoundInput:
    """The input of a client's round."""

    round: int
    client: int
    message: Message  # the server's, of this round
    base_weights: Tensors  # that every client received once, before its first round: see `Method.initial_broadcast`
    client_state: State | None  # after the client's last round; None before its first round
    # The client's training images; in continual learning, those of its current task, or of all its tasks so far: see
    # `Method.accumulates_tasks`.
    shard: Shard
    task_index: int = 0  # of the client's current task, from 0; 0 without tasks


@dataclass(frozen=True)
class ClientUpdate:
    """The result of a client's round."""

    message: Message  # what is sent to the server
    # The client's whole model, on which local accuracy is measured. It is not sent. Empty: the client has no whole
    # model in this round.
    model_weights: Tensors
    client_state: State | None = None  # what the client keeps for its next round; None: nothing
    # Operations of an image beside those of the trainings, where they are not few: a sum counts two per addition
    image_flops: int = 0


@dataclass(frozen=True)
class ServerWork:
    """The server's own training after a round, for an estimate of its time."""

    samples: int  # that the server trains on, every epoch counted
    training: Callable[[Tensors], LocalTraining]  # given the model's weights


@dataclass(frozen=True)
class Work:
    """The most that a method asks of a client, known from the configuration alone, before a model is built."""

    # Passes over the client's images that its trainings make in a round: those that train a part of the model, tune it,
    # or measure something. Choosing the samples to store, a forward pass per image, is not among them.
    epochs: int
    images_per_step: int  # those of the batch, and the stored samples that are drawn with it
    passes: int = 1  # forward passes of an image in a step
    stored_share: float = 0.0  # of its images, stored as samples: they remain when those of their task are gone
    shown_share: float = 0.0  # of an image's patches, whose features are sent in a round: of each view by itself
    cached_views: int = 0  # of every image, kept as the frozen part of the model computes them


ClientGenerator: TypeAlias = Generator[LocalTraining, LocalResult, ClientUpdate]
ServerGenerator: TypeAlias = Generator[LocalTraining, LocalResult, State]
#: Returns the state of a client that has had a round with images in each of these tasks, one after the other: tensors
#: without values, by dry runs of its own updates. Without tasks, after a round without images.
StateAfterTasks: TypeAlias = Callable[[Sequence[int]], State | None]


class Aggregator(ABC):
    """Aggregates the updates of one round into the server's new state.

    Updates are added one by one as they arrive, so memory does not grow with their number.
    """

    #: After :meth:`finish`: the clients whose updates were added but not used, and the reason. These are updates that
    #: can only be judged in comparison with the others.
    rejected: Mapping[int, str] = MappingProxyType({})
    #: Set before the first update: sizes of the updates that were used in the round before.
    earlier_sizes: Sequence[float] = ()
    #: By client, the size of each update added so far, if the aggregator limits sizes; what it is, is the method's.
    sizes: Mapping[int, float] = MappingProxyType({})
    #: Set before the first update: by client, the samples that it reported in its last update that was used.
    earlier_samples: Mapping[int, int] = MappingProxyType({})
    #: After :meth:`finish`: with how many samples a client counted, if these are fewer than it reported.
    counted_samples: Mapping[int, int] = MappingProxyType({})

    @abstractmethod
    def add(self, client: int, message: Message) -> None:
        """Add one client's update. Updates are added in the order of the requests, not of arrival.

        Raises
        ------
        RejectedUpdateError
            The update cannot be used. It is recorded as a failure, and the round continues without it.
        """

    @abstractmethod
    def finish(self) -> State:
        """Return the server's new state. Tensors that no client sent are the same objects as before."""


WIRE_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
HEAD_METHOD = "closed-form"  # it solves heads, by itself or for the table ``[head]``

Params = TypeVar("Params", bound=MethodParams)
Outcome = TypeVar("Outcome")


class Method(ABC, Generic[Params]):
    """A federated learning algorithm.

    Parameters
    ----------
    params
        The table ``[method]``.
    context
        The run that the method is part of.
    """

    #: Whether clients must learn a sequence of tasks (``data.tasks``).
    needs_tasks: ClassVar[bool] = False
    #: Whether a client trains on its images of all tasks up to the current one, instead of the current one alone.
    accumulates_tasks: ClassVar[bool] = False
    #: The mask ratio that the method is designed for: `vitfleet cost` assumes it if the configuration sets none.
    usual_mask_ratio: ClassVar[float] = 0.0
    #: Whether the server has a complete model. If not, the clients' models are evaluated in its place.
    has_global_model: bool = True
    #: Whether clients have models whose body the server averages: ``eval.body`` chooses between theirs and its own.
    shares_body: ClassVar[bool] = False
    #: Whether a client has a model of its own for every task: see :meth:`Method.task_weights`.
    has_task_models: ClassVar[bool] = False
    #: Whether a client's message has a size that is known before, whatever images it has.
    has_known_size: ClassVar[bool] = True
    #: The numbers that its clients report, besides ``samples`` and ``loss``.
    client_metrics: ClassVar[tuple[ClientMetric, ...]] = ()
    #: Names of the figures that a report shows for this method: see ``vitfleet.report.figures.methods``.
    figures: ClassVar[tuple[str, ...]] = ()

    def __init__(self, params: Params, context: MethodContext) -> None:
        self.params = params
        self.context = context
        self.parts = context.parts

    @property
    def name(self) -> str:
        """Name under which the method is registered."""
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
        if config.eval.body == "aggregated" and not cls.shares_body:
            raise ConfigError(
                "eval.body", config.eval.body, f"must be own: with {params.name} no client has a shared body of its own"
            )

    @classmethod
    def declared_work(cls, params: Params, config: Config) -> Work:
        """Return the most that is asked of a client: what its owner's limits apply to.

        By default, ``train.epochs`` with batches of ``train.batch_size``, and nothing is stored.
        """
        return Work(config.train.epochs, config.train.batch_size)

    @classmethod
    def averages_weights(cls, params: Params) -> bool:
        """Return whether the server averages weights that clients send: what a server optimiser applies to."""
        return True

    @classmethod
    def takes_head(cls, params: Params) -> bool:
        """Return whether the server has the head of the model, so that it can be replaced by one that is solved."""
        return False

    @classmethod
    def keeps_heads(cls, params: Params) -> bool:
        """Return whether every client keeps a head of its own."""
        return False

    @classmethod
    def takes_last_head(cls, params: Params) -> bool:
        """Return whether the run can end with a head that sees more than the one that trained (``head.last``).

        By default, where no client keeps a head of its own.
        """
        return cls.takes_head(params) and not cls.keeps_heads(params)

    @classmethod
    def adapt_model(cls, params: Params, vit: nn.Module, class_to_task: Sequence[int]) -> None:
        """Change the architecture as the method needs it: prompts, low-rank factors, other blocks. By default it stays.

        Parameters
        ----------
        class_to_task
            The task of each class, −1 for a class that belongs to none; empty without tasks.
        """

    @property
    def trainable(self) -> Selection:
        """The weights that a client trains: by default the whole model."""
        return self.parts.whole

    @property
    def feature_split(self) -> int | None:
        """The block before which features leave a client; ``None``: none do. ``declared_work`` has their share."""
        return None

    @property
    def cost_round(self) -> int:
        """The round whose costs a report states, where rounds differ: by default the first that trains the head."""
        return first_round_of_head(self.context.config)

    # Messages

    def to_wire(self, message: Message) -> Message:
        """Return a message as it is sent: its weights in the type ``fleet.message_dtype``.

        What else a method sends (features, sums, running statistics) has a type of its own.
        """
        return self._with_type(message, torch.float32, self._wire_type)

    def from_wire(self, message: Message) -> Message:
        """Return a message that was received, with its weights in float32."""
        return self._with_type(message, self._wire_type, torch.float32)

    @property
    def _wire_type(self) -> torch.dtype:
        return WIRE_TYPES[self.context.config.fleet.message_dtype]

    def _with_type(self, message: Message, given: torch.dtype, wanted: torch.dtype) -> Message:
        if given == wanted:
            return message
        weights = self.parts.parameters
        tensors = {
            name: tensor.to(wanted) if name in weights and tensor.dtype == given else tensor
            for name, tensor in message.tensors.items()
        }
        return replace(message, tensors=tensors)

    # Server

    @property
    def state_on_disk(self) -> bool:
        """Whether the parts of the server's state are memory-mapped from the checkpoint's files."""
        return False

    def initial_broadcast(self, initial_weights: Tensors) -> Message:
        """Return what every client receives once, before its first round, and keeps. By default nothing."""
        return Message()

    @abstractmethod
    def initial_state(self, initial_weights: Tensors) -> State:
        """Return the server's state before the first round."""

    def message_to_client(self, server_state: State, round: int, client: int, last_round: int | None) -> Message:
        """Return the message to a client in a round: by default the server's tensors.

        Parameters
        ----------
        last_round
            The last round in which an update of this client was received; ``None``: none so far.
        """
        return Message(server_state.tensors)

    def evaluation_message(self, server_state: State, round: int) -> Message:
        """Return what a client needs in addition in a round in which it evaluates its model. By default nothing."""
        return Message()

    @abstractmethod
    def aggregator(self, server_state: State, round: int) -> Aggregator:
        """Return the aggregator of a round's updates."""

    def check_update(self, expected: Message, update: Message) -> None:
        """Reject an update of another form than an honest client's: with other tensors, or with other shapes.

        A method whose clients choose what they send checks that itself.

        Parameters
        ----------
        expected
            What an honest client sends in this round, by a dry run: tensors without values.

        Raises
        ------
        RejectedUpdateError
            The reason.
        """
        if update.tensors or update.numbers["samples"]:  # a client without samples may send none
            check_shapes(update.tensors, expected.tensors)

    def server_update(self, server_state: State, round: int) -> ServerGenerator:
        """Train on the server after the aggregation, yielding each training. By default it does not train."""
        return server_state
        yield  # makes this function a generator

    def without_client(self, server_state: State, client: int, sent: Callable[[], Message]) -> State:
        """Return the server's state as if a client had never taken part; ``sent`` computes what it sent once more.

        Raises
        ------
        UserError
            It cannot be told: by default, what a client sent is part of all that came after.
        """
        raise UserError(f"--client {client}: with {self.name}, what clients sent cannot be subtracted; run again")

    def server_work(self, stored_images: int, new_images: int) -> ServerWork | None:
        """Return what the server itself trains after a round, for an estimate of its time. By default nothing.

        Parameters
        ----------
        stored_images, new_images
            Training images of all clients that have taken part so far, and of those of this round.
        """
        return None

    def with_head(self, server_state: State, head: Tensors, round: int) -> State:
        """Return the server's state after a round with another head: see the table ``[head]``."""
        return replace(server_state, tensors={**server_state.tensors, **head})

    def with_client_heads(self, server_state: State, heads: Mapping[int, Tensors]) -> State:
        """Return the server's state with a head for each of these clients, where :meth:`keeps_heads` holds."""
        return server_state

    # Client

    def own_body(self, client_state: State | None) -> Tensors:
        """Return the weights that a client has in place of the server's when it computes features. By default none."""
        return {}

    @abstractmethod
    def client_update(self, job: ClientRoundInput) -> ClientGenerator:
        """Run a client's round, yielding each training."""

    @abstractmethod
    def model_weights(self, server_state: State, base_weights: Tensors, client_state: State | None) -> Tensors:
        """Return the whole model of a client.

        Parameters
        ----------
        client_state
            ``None``: a client that has not taken part yet, or the server.
        """

    def task_weights(
        self, server_state: State, base_weights: Tensors, client_state: State | None, task_index: int
    ) -> Tensors:
        """Return the model with which a client is evaluated on one of its tasks: by default the same for all tasks."""
        return self.model_weights(server_state, base_weights, client_state)

    def kept_state(self, reported: Numbers, after_tasks: StateAfterTasks) -> State | None:
        """Return what a client keeps after an update, as tensors without values: the costs of its next round need it.

        By default, what it keeps after any round. A method that keeps something of every task says which tasks.

        Parameters
        ----------
        reported
            The numbers of the update. They are the client's word: implausible ones are to be limited.
        """
        return after_tasks((0,))


def train_metrics(result: LocalResult) -> Numbers:
    """Return the numbers that every update reports: the client's samples and its mean training loss.

    If the loss is not finite, the update is rejected, and ``diverged_step`` says at which step, from 1, that began.
    """
    loss = float(result.loss)
    numbers: dict[str, Number] = {"samples": result.samples, "loss": loss}
    return numbers if isfinite(loss) else {**numbers, "diverged_step": int(result.finite_steps) + 1}


def first_round_of_head(config: Config) -> int:
    """Return the first round in which the head is trained."""
    return min(config.head.freeze_rounds + 1, config.rounds)


def start_client_update(method: Method[Any], job: ClientRoundInput) -> ClientGenerator:
    """Return a method's client update; in the first ``head.freeze_rounds`` rounds, it does not train the head."""
    update = method.client_update(job)
    return _without_head(update, method.parts.head) if _head_frozen(method, job.round) else update


def start_server_update(method: Method[Any], server_state: State, round: int) -> ServerGenerator:
    """Return the server's own training, under the same rule."""
    update = method.server_update(server_state, round)
    return _without_head(update, method.parts.head) if _head_frozen(method, round) else update


def _head_frozen(method: Method[Any], round: int) -> bool:
    return 0 < round <= method.context.config.head.freeze_rounds


def _without_head(
    update: Generator[LocalTraining, LocalResult, Outcome], head: Selection
) -> Generator[LocalTraining, LocalResult, Outcome]:
    """Run an update whose trainings do not train the head: their results have it as it was."""
    result: LocalResult | None = None
    try:
        while True:
            training = next(update) if result is None else update.send(result)
            frozen = tuple(name for name in training.trainable if name in head)
            trained = Selection(tuple(name for name in training.trainable if name not in head))
            result = yield replace(training, trainable=trained)
            unchanged = {name: training.weights[name] for name in frozen}
            result = replace(result, weights={**result.weights, **unchanged})
    except StopIteration as end:
        outcome: Outcome = end.value
        return outcome


def method_class(params: MethodParams) -> type[Method[Any]]:
    """Return the class of the method that a parameter table belongs to."""
    target: type[Method[Any]] = METHODS.entry_of(params).target
    return target


def declared_work(config: Config) -> Work:
    """Return the most that a configuration's method asks of a client; see :meth:`Method.declared_work`."""
    work = method_class(config.method).declared_work(config.method, config)
    if views := config.train.cached_views:
        work = replace(work, epochs=work.epochs + views, cached_views=views)
    solver = head_solver_params(config)
    if solver is None:
        return work
    for_head = method_class(solver).declared_work(solver, config)
    return replace(work, epochs=max(work.epochs, for_head.epochs))


def make_method(params: MethodParams, context: MethodContext) -> Method[Any]:
    """Return the configured method."""
    method = method_class(params)(params, context)
    if context.config.is_incremental and not method.has_global_model:
        raise ConfigError(
            "data.tasks.partitioned",
            True,
            f"with {params.name} as configured the server has no model to evaluate; choose shared heads "
            "(method.heads = shared), or another method",
        )
    frozen = context.config.head.freeze_rounds
    frozen_part(method)  # refuses a configuration without any
    server_trains = type(method).server_update is not Method.server_update
    if frozen and not server_trains and set(method.parts.trainable(method.trainable)) <= set(method.parts.head):
        raise ConfigError("head.freeze_rounds", frozen, f"must be 0: {params.name} trains nothing but the head")
    return method


def frozen_part(method: Method[Any]) -> FrozenPart | None:
    """Return the part of the model of which clients keep what it computes; ``None`` without ``train.cached_views``.

    It is what every client has from the start and no client trains.
    """
    context, parts, views = method.context, method.parts, method.context.train.cached_views
    if not views:
        return None
    shapes = {name: torch.empty(shape, device="meta") for name, shape in parts.shapes.items()}
    part = find_frozen_part(parts, set(method.initial_broadcast(shapes).tensors) - set(method.trainable))
    if part is None:
        remedy = f"must be 0: clients train or receive every layer of the model in each round with {method.name}"
        raise ConfigError("train.cached_views", views, f"{remedy} as configured; with fed-head only the head changes")
    part.shape(context.net, context.train.mask_ratio)  # refuses models of which it is not known
    return part


def adapt_model(
    params: MethodParams, vit: nn.Module, class_to_task: Sequence[int] = (), features: HeadFeatures | None = None
) -> None:
    """Change an architecture: by what the method needs (:meth:`Method.adapt_model`), and by what the head sees."""
    method_class(params).adapt_model(params, vit, class_to_task)
    if features is not None:
        widen_head(vit, features)


def model_adaptation(config: Config, num_classes: int) -> Callable[[nn.Module], None]:
    """Return the function that changes the architecture of a run's model."""
    tasks = class_to_task(config.data.tasks, config.seed, num_classes)
    return partial(adapt_model, config.method, class_to_task=tasks, features=head_features(config.head))


def head_features(solver: HeadSolver) -> HeadFeatures:
    """Return what the head sees, by the table ``[head]`` or by the parameters of the method that solves heads."""
    return HeadFeatures(solver.features, solver.blocks, solver.project, solver.project_seed)


def head_solver_params(config: Config) -> MethodParams | None:
    """Return the parameters of the method that solves the head of a run; ``None`` if none does."""
    if not config.head.is_solved:
        return None
    keys = {key: getattr(config.head, key) for key in HeadSolver.model_fields}
    params: MethodParams = METHODS.make_params(HEAD_METHOD, **keys)
    return params


def make_head_solver(context: MethodContext) -> Method[Any] | None:
    """Return the method that solves the head of a run, from whole images, beside the run's own; ``None`` if none does.

    What the head sees and how it is solved are the keys of the table ``[head]``.
    """
    params = head_solver_params(context.config)
    if params is None:
        return None
    whole_images = context.train.model_copy(update={"mask_ratio": 0.0, "cached_views": 0})
    own = {"method": params, "head": HeadConfig(), "train": whole_images}
    return make_method(params, replace(context, config=context.config.model_copy(update=own)))
