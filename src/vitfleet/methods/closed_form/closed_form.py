"""A linear head on a frozen pretrained body, in closed form, from sums over clients: one round, no training.

A client passes its images through the body once and sends sums of the features that the head sees
(:mod:`~vitfleet.methods.closed_form.sums`). The server adds them and solves
(:mod:`~vitfleet.methods.closed_form.solvers`). However images are spread over clients, the result is that of all images
in one place: AFL (He et al., CVPR 2025), FedCGS (Guan et al., AAAI 2025), FedNCM (Legate et al., NeurIPS 2023), with
random features RanPAC's (McDonnell et al., NeurIPS 2023). With FedCOF (Goswami et al., NeurIPS 2025) clients send class
means alone, and the result depends on how classes are spread.

A client is asked once, or twice where images that it holds out choose the regularisation
(:mod:`~vitfleet.methods.closed_form.held_out`), or where all clients' images standardise what random features are made
of: then it is asked for the moments of that first. In later rounds, sums of clients that were not asked before are
added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from vitfleet.config.base import MethodParams
from vitfleet.config.head import HeadSolver
from vitfleet.config.registry import register_method
from vitfleet.config.schema import Config
from vitfleet.errors import ConfigError, UserError
from vitfleet.message import Message, Number, Numbers, State, Tensors, add_prefix, label_dtype, with_prefix
from vitfleet.methods.aggregation.limits import check_rms
from vitfleet.methods.base import (
    Aggregator,
    ClientGenerator,
    ClientRoundInput,
    ClientUpdate,
    Method,
    MethodContext,
    StateAfterTasks,
    Work,
    head_features,
)
from vitfleet.methods.closed_form.held_out import (
    CORRECT,
    LOSSES,
    Answers,
    compare_heads,
    heads_to_compare,
    split_images,
)
from vitfleet.methods.closed_form.solvers import ClientMeans, Head, solve, temperature
from vitfleet.methods.closed_form.sums import FEATURES, LABELS, ROWS, Moments, Sums, received_features, received_sums
from vitfleet.methods.reported import RejectedUpdateError
from vitfleet.models.parts import Selection
from vitfleet.models.variants.wide_head import SCALE, SHIFT, expand, widen_head
from vitfleet.training.local_training import LocalTraining
from vitfleet.training.samples import Outputs, Samples
from vitfleet.training.step import StepView

COUNTED = "counted"  # the clients whose sums the server has; in a message: that the receiver is one of them
TASK = "task"  # the index of the task whose sums these clients have sent
ANSWERED = "answered"  # the clients that have compared heads
MEASURED = "measured"  # how many images have standardised what random features are made of
SUMS, CLIENT_MEANS = "sums/", "client-means/"  # prefixes of tensors of the server's state
HEADS, ANSWERS = "heads/", "answers/"
ROWS_MULTIPLE = 32  # rows of recorded features are rounded up to a multiple, so that shapes recur from client to client


class ClosedFormParams(HeadSolver, MethodParams):
    """A head in closed form on the pretrained body, from sums over clients: one round (AFL, FedCGS, FedNCM, FedCOF)."""


@register_method("closed-form", ClosedFormParams, title="Closed form")
class ClosedForm(Method[ClosedFormParams]):
    """Adds sums of features over clients and solves the head."""

    has_known_size = False

    @classmethod
    def check_config(cls, params: ClosedFormParams, config: Config) -> None:
        """Check that there is a pretrained body, and one model for all classes."""
        super().check_config(params, config)
        if config.fleet.kind == "simulation":  # a device gets the weights in a message, not the name of their file
            check_pretrained(config)
        if config.data.tasks is not None and not cls.needs_tasks:
            remedy = (
                "is one round for all classes; leave data.tasks out, or choose analytic, whose sums add up over tasks"
            )
            raise ConfigError("method.name", "closed-form", remedy)
        if params.asks_twice and config.rounds < 2:
            held_out = params.regularization == "held-out"
            key = "method.regularization = held-out" if held_out else "method.standardize = data"
            raise ConfigError("rounds", config.rounds, f"must be at least 2 with {key}: clients are asked twice")
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
        """Return false: the server adds sums."""
        return False

    @classmethod
    def adapt_model(cls, params: ClosedFormParams, vit: nn.Module, class_to_task: Sequence[int]) -> None:
        """Let the head see the features."""
        widen_head(vit, head_features(params))

    def __init__(self, params: ClosedFormParams, context: MethodContext) -> None:
        super().__init__(params, context)
        self.width = context.net.head_width  # of the input of the linear layer
        self.seen_width = context.net.representation_width
        self.second_order = params.solver in ("ridge", "lda")
        self.measures = params.standardize == "data"  # whether clients' images standardise what they see

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
        """Return nothing, or that the client's sums are known, with the heads that it is to compare.

        Where clients' images standardise what random features are made of, it is asked for sums once that is known.
        """
        if client not in self.counted(server_state, round):
            is_measured = MEASURED in server_state.numbers and self.params.send == "sums"
            return Message(self.standardisation(server_state.tensors)) if is_measured else Message()
        heads = {} if client in listed(server_state, ANSWERED) else with_prefix(server_state.tensors, HEADS)
        return Message(heads, {COUNTED: 1})

    def check_update(self, expected: Message, update: Message) -> None:
        """Do nothing: what a client sends depends on its classes. :meth:`received` checks its form."""

    def aggregator(self, server_state: State, round: int) -> Aggregator:
        """Return the addition of clients' sums."""
        return SumsUpdate(self, server_state, round)

    def counted(self, server_state: State, round: int) -> Sequence[int]:
        """Return the clients whose sums the server has: of their images of a round's task, where there are tasks."""
        is_of_task = server_state.numbers.get(TASK, 0) == self.context.config.task_index(round)
        return listed(server_state, COUNTED) if is_of_task else ()

    def without_client(self, server_state: State, client: int, sent: Callable[[], Message]) -> State:
        """Return the server's state without a client's sums; the client is never asked again."""
        if self.params.regularization == "held-out":
            raise UserError(
                f"--client {client}: with method.regularization = held-out its images have chosen the head; run again"
            )
        if self.measures:
            raise UserError(
                f"--client {client}: with method.standardize = data its images are in what all sums are of; run again"
            )
        tensors = dict(server_state.tensors)
        if self.params.solver == "means-covariance":
            means = ClientMeans(**with_prefix(tensors, CLIENT_MEANS)).without(client)
            tensors |= add_prefix(CLIENT_MEANS, means.tensors())
        elif (message := sent()).tensors:
            remaining = Sums.of_tensors(with_prefix(tensors, SUMS)) - self.received(message, tensors)[0]
            tensors |= add_prefix(SUMS, remaining.tensors())
        sums = sums_of_state(tensors, self.context.num_classes)
        if sums is None or not float(sums.samples):
            raise UserError(f"--client {client}: no images remain without it")
        return replace(server_state, tensors={**tensors, **self.solve(sums)})

    def solve(self, sums: Sums) -> dict[str, Tensor]:
        """Return the tensors of the head that these sums give, as the model has them."""
        solution, given = solve(sums, self.params), self.params.temperature
        return self.head_tensors(solution.head.divided_by(temperature(solution, sums) if given == "auto" else given))

    def solve_with_answers(self, sums: Sums, answers: Answers) -> dict[str, Tensor]:
        """Return the tensors of the head with the regularisation and the temperature that clients found best."""
        regularization, factor = answers.best(self.params)
        solution, given = solve(sums, self.params, regularization), self.params.temperature
        own = factor * temperature(solution, sums) if given == "auto" else given
        return self.head_tensors(solution.head.divided_by(own))

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
        """Compute what the head sees of the client's images; send sums of its features, or what it sees itself."""
        counted, heads = COUNTED in job.message.numbers, job.message.tensors
        if counted and not heads:
            return ClientUpdate(Message(numbers={"samples": 0}), {})
        labels, flops = job.shard.labels, self.image_flops
        kept, held_out = self._split(len(job.shard), job.client)
        body = job.base_weights if counted else {**job.base_weights, **job.message.tensors}
        if job.client_state is not None and (counted or self.measures):  # what it has kept is what is asked for
            # A server's dry run may know fewer of the images of a real device than it reported.
            seen = job.client_state.tensors[FEATURES][: len(labels)]
            if counted:
                return ClientUpdate(self._answer(heads, seen, labels[held_out], body), {}, image_flops=flops)
            return ClientUpdate(self.client_message(seen, labels[kept], body), {}, image_flops=flops)
        result = yield self.recording(body, len(job.shard))
        # Where it is a dry run, the body has no values, and what is computed of it needs none.
        seen = result.kept[FEATURES][: len(job.shard)].to(next(iter(body.values())).device)
        if self.measures and self.params.send == "sums" and SHIFT not in job.message.tensors:
            moments = Moments.of(seen).tensors() if len(labels) else {}
            return ClientUpdate(Message(moments, {"samples": len(labels)}), {}, State({FEATURES: seen}))
        of_kept, of_held_out = (seen[index.to(seen.device)] for index in (kept, held_out))
        if counted:
            return ClientUpdate(self._answer(heads, of_held_out, labels[held_out], body), {}, image_flops=flops)
        message = self.client_message(of_kept, labels[kept], body)
        return ClientUpdate(message, {}, State({FEATURES: of_held_out}) if len(held_out) else None, flops)

    def kept_state(self, reported: Numbers, after_tasks: StateAfterTasks) -> State | None:
        """Return what a client keeps between two questions: what the head sees of its images."""
        samples = reported.get("samples")
        if self.params.regularization == "held-out" or not self.params.asks_twice or not isinstance(samples, int):
            return super().kept_state(reported, after_tasks)
        return State({FEATURES: torch.empty(samples, self.seen_width, device="meta")})

    def _split(self, samples: int, client: int) -> tuple[Tensor, Tensor]:
        """Return which of a client's images it sends the sums of first, and which it holds out: on the CPU."""
        share = self.params.held_out if self.params.regularization == "held-out" else 0.0
        return split_images(samples, share, self.context.seed, client)

    def _answer(self, heads: Tensors, seen: Tensor, labels: Tensor, body: Tensors) -> Message:
        """Return what a client says of the heads that it compares on held-out images, and the sums of these."""
        message = self.client_message(seen, labels, body)
        if not message.tensors:
            return message
        compared = compare_heads(heads, self.features(seen, body).float(), labels.to(seen.device))
        return replace(message, tensors={**message.tensors, **compared})

    @property
    def image_flops(self) -> int:
        """The operations of a client's sums for an image: its random features, and the products of all features."""
        if self.params.send == "features":
            return 0
        products = 2 * self.width**2 if self.second_order else 0
        return products + (2 * self.seen_width * self.width if self.params.project else 0)

    def recording(self, body: Tensors, samples: int) -> LocalTraining:
        """Return the pass that records what the head sees of every image, in the order of the client's images.

        That is as it is, neither standardised nor expanded to random features.
        """
        rows = samples + 1  # the last one takes padding
        rows += -rows % ROWS_MULTIPLE
        seen = torch.zeros(rows, self.seen_width, device=self.context.device)
        step = RecordingStep(self.seen_width)
        return LocalTraining(
            body, self.trainable, 1, step, kept={FEATURES: seen}, train=self.context.train, augment=False
        )

    def standardisation(self, tensors: Tensors) -> dict[str, Tensor]:
        """Return those of the tensors that standardise what random features are made of."""
        return {name: tensors[name] for name in (SHIFT, SCALE)}

    def features(self, seen: Tensor, tensors: Tensors) -> Tensor:
        """Return φ: what the head sees, as it is, or random features of that.

        What that is standardised with is among the tensors. In float64 they do not depend on which images are together.
        """
        if not self.params.project:
            return seen
        vit: Any = self.context.net.module.vit
        shift, scale = self.standardisation(tensors).values()
        return expand(seen.double(), shift.double(), scale.double(), vit.head.projection.to(seen.device, torch.float64))

    def sums(self, seen: Tensor, labels: Tensor, tensors: Tensors) -> Sums:
        """Return the sums of features of images, given what the head sees of them."""
        sums = Sums.zeros(self.context.num_classes, self.width, self.second_order, seen.device)
        for start in range(0, len(labels), ROWS):
            rows = slice(start, start + ROWS)
            sums.add_(self.features(seen[rows], tensors), labels[rows].to(seen.device))
        return sums

    def client_message(self, seen: Tensor, labels: Tensor, body: Tensors) -> Message:
        """Return what a client sends of images of which the head sees this; without images, no tensors."""
        numbers, num_classes = {"samples": len(labels)}, self.context.num_classes
        if not len(labels):
            return Message(numbers=numbers)
        if self.params.send == "features":
            return Message({FEATURES: seen.half(), LABELS: labels.to(label_dtype(num_classes))}, numbers)
        labels = labels.long()
        sums = self.sums(seen, labels, body)
        return Message(sums.message(torch.unique(labels.cpu()), self.params.dtype), numbers)

    def received(self, message: Message, tensors: Tensors) -> tuple[Sums, float]:
        """Return the sums that a client sent, or those of the features that it sent, and the size of these features.

        Raises
        ------
        RejectedUpdateError
            They cannot be sums of features.
        """
        if self.params.send == "features":
            seen, labels = self.received_features(message)
            return self.sums(seen, labels, tensors), Moments.of(seen).size(len(labels))
        form = self.context.num_classes, self.width, self.second_order
        sums = received_sums(message.tensors, *form, self.params.dtype, self.context.device)
        check_samples(message, int(sums.samples))
        return sums, mean_size(sums)

    def received_features(self, message: Message) -> tuple[Tensor, Tensor]:
        """Return what the head sees of a client's images and their labels, as it sent them."""
        seen, labels = received_features(
            message.tensors, self.context.num_classes, self.seen_width, self.context.device
        )
        check_samples(message, len(labels))
        return seen, labels


def check_samples(message: Message, samples: int) -> None:
    """Reject a message that reports other samples than those that it has sums or features of."""
    if message.numbers.get("samples") != samples:
        raise RejectedUpdateError(f"it reports {message.numbers.get('samples')} samples, and sums of {samples}")


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
        Length of what the head sees: clients of heads that see something else are not trained together.
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

    def __init__(self, method: ClosedForm, server_state: State, round: int) -> None:
        self.method = method
        self.server_state = server_state
        self.task_index = method.context.config.task_index(round)
        self.counted = set(method.counted(server_state, round))
        self.answered = set(listed(server_state, ANSWERED))
        self.sizes: dict[int, float] = {}
        self.added: list[tuple[int, Sums]] = []  # class means are kept by client: they cannot be added
        self.moments: Moments | None = None  # where clients' images are yet to standardise what the head sees
        self.measured = 0
        self.waiting: list[tuple[int, Tensor, Tensor]] = []  # features until then
        self.sums: Sums | None = None
        self.answers: Answers | None = None
        if stored := with_prefix(server_state.tensors, ANSWERS):
            self.answers = Answers(**stored)

    def add(self, client: int, message: Message) -> None:
        """Add a client's sums, or what it answered."""
        if not message.tensors:
            if message.numbers.get("samples"):
                raise RejectedUpdateError("it has images and sends nothing of them")
        elif self.method.measures and MEASURED not in self.server_state.numbers:
            self._measure(client, message)
            if self.method.params.send == "sums":
                return
        elif client not in self.counted:
            self._add(client, *self.method.received(message, self.server_state.tensors))
        elif self.method.params.regularization == "held-out" and client not in self.answered:
            self._add_answer(client, message)
        else:
            raise RejectedUpdateError("its sums were added before")
        (self.answered if client in self.counted else self.counted).add(client)

    def _measure(self, client: int, message: Message) -> None:
        """Add the moments of what the head sees of a client's images: it sent them, or what they follow from."""
        method, samples = self.method, message.numbers.get("samples")
        if method.params.send == "features":
            seen, labels = method.received_features(message)
            moments, samples = Moments.of(seen), len(labels)
        elif isinstance(samples, int) and samples > 0:
            moments = Moments.received(message.tensors, samples, method.seen_width, method.context.device)
        else:
            raise RejectedUpdateError(f"it reports {samples} samples, and sends sums of them")
        self._check_size(client, moments.size(samples), samples)
        self.moments = moments if self.moments is None else self.moments + moments
        self.measured += samples
        if method.params.send == "features":
            self.waiting.append((client, seen, labels))

    def _add_answer(self, client: int, message: Message) -> None:
        names = (CORRECT, LOSSES)
        sent = {name: tensor for name, tensor in message.tensors.items() if name not in names}
        sums, size = self.method.received(replace(message, tensors=sent), self.server_state.tensors)
        device = self.method.context.device
        answers = Answers.received(message.tensors, int(sums.samples), self.method.params, device)
        self._add(client, sums, size)
        self.answers = answers if self.answers is None else self.answers + answers

    def _add(self, client: int, sums: Sums, size: float) -> None:
        self._check_size(client, size, float(sums.samples))
        self._add_sums(client, sums)

    def _add_sums(self, client: int, sums: Sums) -> None:
        if self.method.second_order:
            self.sums = sums if self.sums is None else self.sums + sums
        else:
            self.added.append((client, sums))

    def _check_size(self, client: int, size: float, samples: float) -> None:
        limits = self.method.context.aggregation
        if limits.max_samples is not None and samples > limits.max_samples:
            raise RejectedUpdateError(
                f"its number of samples is {samples:.0f}; aggregate.max_samples = {limits.max_samples}"
            )
        if not math.isfinite(size) or (limits.max_change is not None and size > limits.max_change):
            raise RejectedUpdateError(
                f"its features have the size {size:.3g}; aggregate.max_change = {limits.max_change}"
            )
        check_rms(size, [*self.earlier_sizes, *self.sizes.values()], limits, floor=0.0)
        self.sizes[client] = size

    def _standardisation(self) -> tuple[dict[str, Tensor], dict[str, Number]]:
        """Return what standardises what the head sees, by the images of this round's clients, and how many they are.

        Features that have waited for it are added.
        """
        if self.moments is None:
            return {}, {}
        found = dict(zip((SHIFT, SCALE), self.moments.standardisation(self.measured), strict=True))
        for client, seen, labels in self.waiting:
            self._add_sums(client, self.method.sums(seen, labels, found))
        return found, {MEASURED: self.measured}

    def finish(self) -> State:
        """Return the server's state with the sums so far and the head that they give."""
        before, method = self.server_state, self.method
        standardisation, measured = self._standardisation()
        known = {name: tensor for name, tensor in before.tensors.items() if not name.startswith(HEADS)}
        stored = self._stored_sums()
        sums = sums_of_state(stored, method.context.num_classes)
        if sums is not None:
            stored |= method.solve(sums) if self.answers is None else method.solve_with_answers(sums, self.answers)
        numbers = {**before.numbers, **measured, COUNTED: sorted(self.counted)}
        if method.context.config.data.tasks is not None:
            numbers[TASK] = self.task_index
        if method.params.regularization == "held-out":
            numbers[ANSWERED] = sorted(self.answered)
            if sums is not None and self.answered < self.counted:
                stored |= add_prefix(HEADS, heads_to_compare(sums, method.params))
            if self.answers is not None:
                stored |= add_prefix(ANSWERS, self.answers.tensors())
        return replace(before, tensors={**known, **standardisation, **stored}, numbers=numbers)

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


def listed(server_state: State, name: str) -> Sequence[int]:
    """Return the clients that a server's state lists under a name, in rising order."""
    clients = server_state.numbers.get(name, [])
    return [int(client) for client in clients] if isinstance(clients, list) else []


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
