"""A linear head on a frozen pretrained body, in closed form, from sums over clients: one round, no training.

A client passes its images through the body once and sends sums of the features that the head sees
(:mod:`~vitfleet.methods.closed_form.sums`). The server adds them and solves
(:mod:`~vitfleet.methods.closed_form.solvers`). However images are spread over clients, the result is that of all images
in one place: AFL (He et al., CVPR 2025), FedCGS (Guan et al., AAAI 2025), FedNCM (Legate et al., NeurIPS 2023), with
random features RanPAC's (McDonnell et al., NeurIPS 2023). With FedCOF (Goswami et al., NeurIPS 2025) clients send class
means alone, and the result depends on how classes are spread.

A client is asked once. In later rounds, sums of clients that were not asked before are added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vitfleet.config.base import MethodParams
from vitfleet.config.head import HeadSolver
from vitfleet.config.registry import register_method
from vitfleet.config.schema import Config
from vitfleet.errors import ConfigError
from vitfleet.message import Message, State, Tensors, add_prefix, label_dtype, with_prefix
from vitfleet.methods.aggregation.limits import check_rms
from vitfleet.methods.base import (
    Aggregator,
    ClientGenerator,
    ClientRoundInput,
    ClientUpdate,
    Method,
    MethodContext,
    Work,
    head_features,
)
from vitfleet.methods.closed_form.solvers import ClientMeans, Head, solve, temperature
from vitfleet.methods.closed_form.sums import FEATURES, LABELS, Sums, received_sums, sums_of_received_features
from vitfleet.methods.reported import RejectedUpdateError
from vitfleet.models.parts import Selection
from vitfleet.models.variants.wide_head import SCALE, SHIFT, widen_head
from vitfleet.training.local_training import LocalResult, LocalTraining
from vitfleet.training.samples import Outputs, Samples
from vitfleet.training.step import StepView

COUNTED = "counted"  # the clients whose sums the server has; in a message: that the receiver is one of them
SUMS, CLIENT_MEANS = "sums/", "client-means/"  # prefixes of tensors of the server's state
ROWS_MULTIPLE = 32  # rows of recorded features are rounded up to a multiple, so that shapes recur from client to client


class ClosedFormParams(HeadSolver, MethodParams):
    """A head in closed form on the pretrained body, from sums over clients: one round (AFL, FedCGS, FedNCM, FedCOF)."""


@register_method("closed-form", ClosedFormParams, title="Closed form")
class ClosedForm(Method[ClosedFormParams]):
    """Adds sums of features over clients and solves the head."""

    @classmethod
    def check_config(cls, params: ClosedFormParams, config: Config) -> None:
        """Check that there is a pretrained body, and one model for all classes."""
        super().check_config(params, config)
        if config.fleet.kind == "simulation":  # a device gets the weights in a message, not the name of their file
            check_pretrained(config)
        if config.data.tasks is not None:
            raise ConfigError("method.name", "closed-form", "has one head for all classes; leave data.tasks out")
        aggregation = config.aggregate
        for key, value in (("clip_update", aggregation.clip_update), ("norm_factor", aggregation.norm_factor)):
            if value is not None:
                raise ConfigError(f"aggregate.{key}", value, "applies to averaged weights, not to sums; leave it out")
        if aggregation.rule != "mean":
            raise ConfigError("aggregate.rule", aggregation.rule, "must be mean: sums are added")

    @classmethod
    def declared_work(cls, params: ClosedFormParams, config: Config) -> Work:
        """Return one pass over a client's images."""
        return Work(1, config.train.batch_size)

    @classmethod
    def averages_weights(cls, params: ClosedFormParams) -> bool:
        """Return that the server averages none."""
        return False

    @classmethod
    def adapt_model(cls, params: ClosedFormParams, vit: nn.Module, class_to_task: Sequence[int]) -> None:
        """Let the head see the features."""
        widen_head(vit, head_features(params))

    def __init__(self, params: ClosedFormParams, context: MethodContext) -> None:
        super().__init__(params, context)
        self.width = context.net.head_width
        self.second_order = params.solver in ("ridge", "lda")

    @property
    def trainable(self) -> Selection:
        """Nothing."""
        return self.parts.union()

    # Server

    def initial_broadcast(self, initial_weights: Tensors) -> Message:
        """Return the body, and what standardises its features before random ones are computed of them."""
        fixed = self.parts.select((SHIFT, SCALE)) if self.params.project else self.parts.union()
        return Message(self.parts.union(self.parts.body, fixed).take(initial_weights))

    def initial_state(self, initial_weights: Tensors) -> State:
        """Return the initial head, without sums."""
        return State(self.parts.head.take(initial_weights))

    def message_to_client(self, server_state: State, round: int, client: int, last_round: int | None) -> Message:
        """Return nothing, or that the client's sums are known."""
        return Message(numbers={COUNTED: 1} if client in counted_clients(server_state) else {})

    def aggregator(self, server_state: State, round: int) -> Aggregator:
        """Return the addition of clients' sums."""
        return SumsUpdate(self, server_state)

    def solve(self, sums: Sums) -> dict[str, Tensor]:
        """Return the tensors of the head that these sums give, as the model has them."""
        solution = solve(sums, self.params)
        given = self.params.temperature
        head = solution.head.divided_by(temperature(solution, sums) if given == "auto" else given)
        return self.head_tensors(head)

    def head_tensors(self, head: Head) -> dict[str, Tensor]:
        """Return the tensors of a head as the model has them.

        The model's own head has no shift and no scale, and those of random features are before these: both are then
        parts of weight and bias.
        """
        shapes, (weight, bias) = self.parts.shapes, self.context.net.linear_head
        standardises = SHIFT in shapes and not self.params.project
        head = head if standardises else head.folded()
        tensors = {weight: head.weight, bias: head.bias}
        if standardises:
            tensors |= {SHIFT: head.shift, SCALE: head.scale}
        return {name: tensor.float() for name, tensor in tensors.items()}

    def model_weights(self, server_state: State, base_weights: Tensors, client_state: State | None) -> Tensors:
        """Return the body with the server's head."""
        return {**base_weights, **self.parts.head.take(server_state.tensors)}

    # Client

    def client_update(self, job: ClientRoundInput) -> ClientGenerator:
        """Compute the features of the client's images; send their sums, or the features themselves."""
        if COUNTED in job.message.numbers:
            return ClientUpdate(Message(numbers={"samples": 0}), {})
        body = {**job.base_weights, **job.message.tensors}
        result = yield self.recording(body, len(job.shard))
        return ClientUpdate(self.client_message(result, job.shard.labels, next(iter(body.values())).device), {})

    def recording(self, body: Tensors, samples: int) -> LocalTraining:
        """Return the pass that records what the head sees of every image, in the order of the client's images."""
        rows = samples + 1  # the last one takes padding
        rows += -rows % ROWS_MULTIPLE
        features = torch.zeros(rows, self.width, device=self.context.device)
        weights = {**body, **self._no_standardisation()}
        step = RecordingStep(self.width)
        kept, train = {FEATURES: features}, self.context.train
        return LocalTraining(weights, self.trainable, 1, step, kept=kept, train=train, augment=False)

    def _no_standardisation(self) -> dict[str, Tensor]:
        """Return the shift and the scale with which a wide head sees features as they are; none before random ones."""
        if SHIFT not in self.parts.shapes or self.params.project:
            return {}
        ones = torch.ones(self.parts.shapes[SHIFT], device=self.context.device)
        return {SHIFT: torch.zeros_like(ones), SCALE: ones}

    def client_message(self, result: LocalResult, labels: Tensor, device: torch.device) -> Message:
        """Return what a client sends of its recorded features; without images, no tensors."""
        numbers = {"samples": result.samples}
        if not result.samples:
            return Message(numbers=numbers)
        features, num_classes = result.kept[FEATURES][: result.samples].to(device), self.context.num_classes
        if self.params.send == "features":
            return Message({FEATURES: features.half(), LABELS: labels.to(label_dtype(num_classes))}, numbers)
        sums = Sums.of(features, labels.long().to(device), num_classes, self.second_order)
        return Message(sums.message(torch.unique(labels.long().cpu()), self.params.dtype), numbers)

    def received(self, message: Message) -> Sums:
        """Return the sums that a client sent; raises ``RejectedUpdateError`` if they cannot be sums of features."""
        form = self.context.num_classes, self.width, self.second_order
        device = self.context.device
        if self.params.send == "features":
            sums = sums_of_received_features(message.tensors, *form, device)
        else:
            sums = received_sums(message.tensors, *form, self.params.dtype, device)
        if message.numbers.get("samples") != int(sums.samples):
            raise RejectedUpdateError(
                f"it reports {message.numbers.get('samples')} samples, and sums of {int(sums.samples)}"
            )
        return sums


def check_pretrained(config: Config) -> None:
    """Refuse a model whose body is not pretrained."""
    if config.model.weights is None:
        remedy = "a head in closed form needs a pretrained body; name a .safetensors file, hub or digits"
        raise ConfigError("model.weights", None, remedy)


@dataclass(frozen=True)
class RecordingStep:
    """The client's step: records what the head sees of the batch.

    Attributes
    ----------
    width
        Number of features: clients of heads that see others are not trained together.
    """

    width: int

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        """Return no gradients."""
        view.keep(view.map(record, view.kept, view.features(batch)))
        return {}


def record(kept: Tensors, outputs: Outputs) -> Tensors:
    """Write the features of a batch to the rows of its images, in place; padding goes to the last row."""
    assert outputs.features is not None
    features = kept[FEATURES]
    rows = torch.where(outputs.sample_weight > 0, outputs.positions, features.shape[0] - 1)
    features.index_put_((rows,), outputs.features.float())
    return kept


class SumsUpdate(Aggregator):
    """Adds the sums of clients that were not asked before, and solves the head.

    The size of an update is the root mean square of its features.
    """

    def __init__(self, method: ClosedForm, server_state: State) -> None:
        self.method = method
        self.server_state = server_state
        self.counted = set(counted_clients(server_state))
        self.sizes: dict[int, float] = {}
        self.added: list[tuple[int, Sums]] = []  # class means are kept by client: they cannot be added
        self.sums: Sums | None = None

    def add(self, client: int, message: Message) -> None:
        """Add a client's sums."""
        if client in self.counted:
            if message.tensors:
                raise RejectedUpdateError("its sums were added before")
            return
        if message.tensors:
            self._add(client, self.method.received(message))
        elif message.numbers.get("samples"):
            raise RejectedUpdateError("it has images and sends nothing of them")
        self.counted.add(client)

    def _add(self, client: int, sums: Sums) -> None:
        limits, samples = self.method.context.aggregation, float(sums.samples)
        if limits.max_samples is not None and samples > limits.max_samples:
            raise RejectedUpdateError(
                f"its number of samples is {samples:.0f}; aggregate.max_samples = {limits.max_samples}"
            )
        size = mean_size(sums)
        if not math.isfinite(size) or (limits.max_change is not None and size > limits.max_change):
            raise RejectedUpdateError(
                f"its features have the size {size:.3g}; aggregate.max_change = {limits.max_change}"
            )
        check_rms(size, [*self.earlier_sizes, *self.sizes.values()], limits, floor=0.0)
        self.sizes[client] = size
        if self.method.second_order:
            self.sums = sums if self.sums is None else self.sums + sums
        else:
            self.added.append((client, sums))

    def finish(self) -> State:
        """Return the server's state with the sums so far and the head that they give."""
        before = self.server_state
        kept = self._stored_sums()
        sums = sums_of_state(kept, self.method.context.num_classes)
        head = {} if sums is None else self.method.solve(sums)
        numbers = {**before.numbers, COUNTED: sorted(self.counted)}
        return replace(before, tensors={**before.tensors, **kept, **head}, numbers=numbers)

    def _stored_sums(self) -> dict[str, Tensor]:
        """Return the tensors of all sums so far."""
        stored = self.server_state.tensors
        if self.method.params.solver == "means-covariance":
            before = with_prefix(stored, CLIENT_MEANS)
            known = [ClientMeans(**before)] if before else []
            known += [ClientMeans.of(client, sums) for client, sums in self.added]
            return add_prefix(CLIENT_MEANS, ClientMeans.join(known).tensors()) if known else {}
        before = with_prefix(stored, SUMS)
        all_sums = [Sums.of_tensors(before)] if before else []
        all_sums += [sums for _, sums in self.added] + ([] if self.sums is None else [self.sums])
        if not all_sums:
            return {}
        total = all_sums[0]
        for sums in all_sums[1:]:
            total = total + sums
        return add_prefix(SUMS, total.tensors())


def counted_clients(server_state: State) -> Sequence[int]:
    """Return the clients whose sums the server has, in rising order."""
    counted = server_state.numbers.get(COUNTED, [])
    return [int(client) for client in counted] if isinstance(counted, list) else []


def sums_of_state(tensors: Tensors, num_classes: int) -> Sums | None:
    """Return the sums that a server's state has; ``None`` if there are none."""
    if client_means := with_prefix(tensors, CLIENT_MEANS):
        return ClientMeans(**client_means).to_sums(num_classes)
    sums = with_prefix(tensors, SUMS)
    return Sums.of_tensors(sums) if sums else None


def mean_size(sums: Sums) -> float:
    """Return the root mean square of the features, or without second-order sums of the class means."""
    if sums.gram is not None:
        return math.sqrt(max(0.0, float(sums.gram.diagonal().mean() / sums.samples)))
    squares = sums.class_means.square().mean(dim=1)
    return math.sqrt(float((squares * sums.counts).sum() / sums.samples))
