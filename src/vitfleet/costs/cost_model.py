"""Operations and bytes of clients' rounds, without training: dry runs and their counted operations.

A dry run executes the method's client update on tensors that have shapes but no values (meta tensors). The trainings
that it yields define what trains and what every step computes; the update that it returns is the message to send.
Operations, bytes and memory thus follow from the method itself. The memory of a training is computed by
:mod:`vitfleet.costs.memory`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitfleet.config.schema import TrainConfig
from vitfleet.costs.flops import META, FlopCounter, Flops, shapes_of
from vitfleet.data.images import ImageSet, Shard
from vitfleet.errors import UserError
from vitfleet.message import Message, Numbers, State
from vitfleet.methods.base import ClientRoundInput, ClientUpdate, Method, frozen_part, start_client_update
from vitfleet.models.net import Net
from vitfleet.training.local_training import LocalResult, LocalTraining
from vitfleet.training.step import kind_of_step
from vitfleet.training.views.cache import ViewPlan
from vitfleet.wire import encoded_size

KNOWN_STATES = 64  # of clients that have learned different tasks
NO_LABELS: NDArray[np.int64] = np.empty(0, dtype=np.int64)  # labels of a client without images
ONE_LABEL: NDArray[np.int64] = np.zeros(1, dtype=np.int64)


@dataclass(frozen=True)
class DryRun:
    """Result of a dry run of a client's round."""

    trainings: list[LocalTraining]  # the trainings that the client would run
    update: ClientUpdate  # the message it would send and the state it would keep
    # Tensors held during the whole round: received tensors, and state kept from earlier rounds
    held_tensors: list[Tensor]
    # What computes the cached views that the trainings are on, in the client's first round alone
    recordings: list[LocalTraining] = field(default_factory=list)
    is_first: bool = False  # whether it is that round

    @property
    def computed(self) -> list[LocalTraining]:
        """The trainings of this round, with what computes cached views if it is the client's first."""
        return [*self.recordings, *self.trainings] if self.is_first else self.trainings

    @property
    def views_bytes(self) -> int:
        """Bytes of the cached views that the client keeps."""
        views = {id(one.views.values): one.views.values for one in self.trainings if one.views is not None}
        return sum(values.nbytes for values in views.values())

    def kept_state(self) -> State | None:
        """Return the state that the client would keep, in tensors of its own: memory is counted per tensor."""
        state = self.update.client_state
        if state is None:
            return None
        copies = {id(tensor): torch.empty_like(tensor, device="meta") for tensor in state.tensors.values()}
        return replace(state, tensors={name: copies[id(tensor)] for name, tensor in state.tensors.items()})


class CostModel:
    """Computes the costs of clients' rounds; the operations of each distinct step are counted once.

    The tensors of the method must be on the CPU; nothing is computed with them. Without ``image_size``, the clients'
    images have the model's input size. ``counted`` are operations that were counted before, for models of the same
    shapes; new counts are added.
    """

    def __init__(
        self,
        method: Method[Any],
        net: Net,
        train: TrainConfig,
        image_size: int | None = None,
        counted: dict[Hashable, Any] | None = None,
    ) -> None:
        self.method = method
        self.train = train
        self.net = net.with_constants_on("meta")
        self.image_size = image_size or net.image_size
        self.blank = shapes_of(net)
        self.counter = FlopCounter(net, train, counted)
        self.frozen_part = frozen_part(method)
        self._after_tasks = lru_cache(KNOWN_STATES)(self._state_after)

    def dry_run(
        self,
        round: int,
        client: int,
        labels: NDArray[np.int64],
        task_index: int = 0,
        client_metrics: Numbers | None = None,
    ) -> DryRun:
        """Execute a client's round on meta tensors.

        ``task_index`` is the number of tasks before this one; ``client_metrics`` are the numbers of the client's last
        message, ``None`` in its first round.
        """
        kept = None if client_metrics is None else self.kept_state(client_metrics)
        return self._dry_run(labels, round, client, task_index, kept, is_first=client_metrics is None)

    def _dry_run(
        self,
        labels: NDArray[np.int64],
        round: int = 1,
        client: int = 0,
        task_index: int = 0,
        client_state: State | None = None,
        is_first: bool = False,
    ) -> DryRun:
        method, net, size = self.method, self.net, self.image_size
        received = method.message_to_client(method.initial_state(self.blank), round, client, None)
        targets = torch.from_numpy(np.asarray(labels, dtype=np.int64))
        pixels = torch.empty(len(targets), len(net.mean), size, size, dtype=torch.uint8, device="meta")
        shard = Shard(ImageSet(pixels, targets), torch.arange(len(targets)))
        base = method.initial_broadcast(self.blank).tensors
        job = ClientRoundInput(round, client, received, base, client_state, shard, task_index)
        requested = start_client_update(method, job)
        kept = client_state.tensors.values() if client_state else ()
        trainings: list[LocalTraining] = []
        views: dict[ViewPlan, tuple[LocalTraining, Tensor]] = {}
        with self._explained():
            try:
                training = next(requested)
                while True:
                    training = self._on_views(training, len(targets), views)
                    trainings.append(training)
                    result = _blank_result(training, len(targets), method.context.num_classes, len(trainings))
                    training = requested.send(result)
            except StopIteration as end:
                update: ClientUpdate = end.value
        held = [*received.tensors.values(), *base.values(), *kept]
        return DryRun(trainings, update, held, [recording for recording, _ in views.values()], is_first)

    def _on_views(
        self, training: LocalTraining, samples: int, views: dict[ViewPlan, tuple[LocalTraining, Tensor]]
    ) -> LocalTraining:
        """Return a training as the trainer runs it: on cached views, where it can be; new ones are added."""
        train, augment = training.train or self.train, self.method.context.config.data.augment
        plan = ViewPlan.of(training, self.frozen_part, train, augment, bf16=False)
        if plan is None:
            return training
        if plan not in views:
            shape = plan.count * samples, *plan.part.shape(self.net, plan.mask_ratio)
            recording = plan.recording(training, self.net, samples, META)
            views[plan] = recording, torch.empty(shape, device=META)
        return plan.on_views(training, views[plan][1])

    def late_round(self, labels: Sequence[NDArray[np.int64]]) -> DryRun:
        """Dry-run the most expensive round of a client: its second one in the last task, after a round in every task.

        ``labels`` are those of the client's images in each task. A round that trains nothing, because it goes on with
        what the one before has computed, has its trainings.
        """
        client_state: State | None = None
        trainings: list[LocalTraining] = []
        for position in range(len(labels) + 1):
            task_index = min(position, len(labels) - 1)
            first_task = 0 if self.method.accumulates_tasks else task_index
            task_labels = np.concatenate(labels[first_task : task_index + 1])
            dry_run_result = self._dry_run(task_labels, self.method.cost_round, 0, task_index, client_state)
            client_state = dry_run_result.kept_state()
            trainings = dry_run_result.trainings or trainings
        return replace(dry_run_result, trainings=trainings)

    def kept_state(self, client_metrics: Numbers) -> State | None:
        """Return what a client keeps, by the numbers of its last update: tensors without values; ``None``: nothing."""
        kept = self.method.kept_state(client_metrics, lambda tasks: self._after_tasks(tuple(tasks)))
        if kept is None:
            return None
        return replace(kept, numbers={name: client_metrics.get(name, number) for name, number in kept.numbers.items()})

    def _state_after(self, tasks: tuple[int, ...]) -> State | None:
        """Return the state of a client after a round with an image in each task; without tasks, without images."""
        if not tasks:
            return self._dry_run(NO_LABELS).kept_state()
        before = self._after_tasks(tasks[:-1]) if tasks[1:] else None
        return self._dry_run(ONE_LABEL, task_index=tasks[-1], client_state=before).kept_state()

    def per_image(self, dry_run_result: DryRun) -> Flops:
        """Return the operations per image seen in training, with all passes of the round.

        A pass that only measures something makes no image of its own: its operations are those of the images that are
        trained on, as are those of cached views in the client's first round. Where nothing trains, all passes count.
        """
        seen, trainings = dry_run_result.trainings, dry_run_result.computed
        with self._explained():
            counted = [self.counter.step(one, kind_of_step(one.step, 0)).per_sample for one in trainings]
        trained = sum(one.epochs for one in seen if one.trainable) or sum(one.epochs for one in seen)
        whole = sum(flops.training * one.epochs for flops, one in zip(counted, trainings, strict=True))
        return Flops(
            sum(flops.forward * one.epochs for flops, one in zip(counted, trainings, strict=True)) // trained,
            (whole + dry_run_result.update.image_flops) // trained,
        )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn torch's error about tensors without values into one for the author of the method."""
        try:
            yield
        except (RuntimeError, NotImplementedError) as error:
            if "meta" not in str(error):
                raise
            raise UserError(
                f"method {self.method.name}: for its costs its client half runs on tensors without values, and fails "
                f"({str(error).splitlines()[0]}); read no value of a weight or a message there, and take `result.kept` "
                "to a weight's device: kept.to(weight.device) (docs/writing-methods.md, The dry run)"
            ) from error

    def round_flops(self, dry_run_result: DryRun, samples: int) -> int:
        """Count the operations of a client's whole round: all passes of all steps, and the scoring of its samples."""
        return self.training_flops(dry_run_result.computed, samples) + samples * dry_run_result.update.image_flops

    def training_flops(self, trainings: Sequence[LocalTraining], samples: int) -> int:
        """Count the operations of trainings on so many samples."""
        return sum(self.counter.training(training, samples) for training in trainings)

    def up_bytes(self, dry_run_result: DryRun) -> int:
        """Return the encoded size of a client's message; an empty message is not sent."""
        return message_size(self.method.to_wire(dry_run_result.update.message))

    def down_bytes(self) -> tuple[int, int]:
        """Return the encoded sizes of the server's message in the method's cost round and of the initial broadcast."""
        server: State = self.method.initial_state(self.blank)
        return (
            message_size(self.method.to_wire(self.method.message_to_client(server, self.method.cost_round, 0, None))),
            message_size(self.method.to_wire(self.method.initial_broadcast(self.blank))),
        )


@lru_cache(maxsize=4096)
def _blank_weight(name: str, shape: torch.Size, training: int) -> Tensor:
    """Return a weight as a meta tensor; cached, because creating it takes longer than the rest of a dry run.

    Memory is counted per tensor: each training of a round, by its number, has tensors of its own.
    """
    return torch.empty(shape, device="meta")


def _blank_result(training: LocalTraining, samples: int, num_classes: int, number: int) -> LocalResult:
    scored, steps = samples if training.score_samples else 0, max(1, training.epochs)
    return LocalResult(
        {name: _blank_weight(name, training.weights[name].shape, number) for name in training.trainable},
        torch.zeros(()),
        samples,
        steps,
        # Methods read kept tensors on the host, so they need values: zeros.
        {name: torch.zeros_like(tensor, device="cpu") for name, tensor in training.kept.items()},
        sample_losses=torch.zeros(scored),
        finite_steps=torch.tensor(float(steps)),
        sample_logits=torch.empty(scored, num_classes, device="meta"),
    )


def message_size(message: Message) -> int:
    """Return a message's encoded size in bytes; an empty message is not sent, so its size is 0."""
    return encoded_size(message) if message.tensors or message.numbers else 0
