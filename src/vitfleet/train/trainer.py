"""The training loop, for one client or for several at once.

Nothing inside an epoch waits for the device: an epoch's draws are moved there ahead of it, sums stay there, and the
only synchronisation is the caller reading a result. On a GPU a step is captured once in a CUDA graph and replayed: the
graph takes each step's batch from the epoch's tables by a counter that it moves on itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from vitfleet.config.schema import AugmentConfig, TrainConfig
from vitfleet.data.batches import EpochBatches, make_epoch_batches
from vitfleet.data.epoch_draws import draw_epoch
from vitfleet.data.images import Shard
from vitfleet.data.preprocess import Preprocess
from vitfleet.models.net import Net
from vitfleet.train.cohort_inputs import ClientFit, RngContext, stack_inputs
from vitfleet.train.engine import StepEngine
from vitfleet.train.execution import ExecutionSummary
from vitfleet.train.machine import Machine
from vitfleet.train.memory_budget import MemoryBudget
from vitfleet.train.objective import Fit, FitResult
from vitfleet.train.optim import learning_rate
from vitfleet.train.step_runner import RunnerCache, StepRunner

ALL_PARTS = 1 << 30
WIDTHS = 8  # a captured batch is a multiple of this wide, so that shapes recur


@dataclass(frozen=True)
class Trainer:
    """Trains clients.

    Attributes
    ----------
    tasks
        The task of each class, ``[classes]``, where an image's task is known: its class is then only looked for
        among those of its task. ``None``: among all.
    parts_at_once
        Parts of a memory whose gradients are computed together: many are fast on a GPU, one takes the least memory.
        ``None``: all on a GPU, one on a CPU.
    """

    net: Net
    preprocess: Preprocess
    config: TrainConfig
    augment: AugmentConfig
    rounds: int
    machine: Machine
    class_tasks: Tensor | None = None
    parts_at_once: int | None = None
    runners: RunnerCache = field(default_factory=RunnerCache)
    memory_budget: MemoryBudget = field(default_factory=MemoryBudget)

    @cached_property
    def engine(self) -> StepEngine:
        """What a step is computed with."""
        at_once = self.parts_at_once or (1 if self.machine.device.type == "cpu" else ALL_PARTS)
        return StepEngine(self.net, self.preprocess, self.config, self.machine, self.class_tasks, at_once)

    def execution_summary(self) -> ExecutionSummary:
        """Return which execution path the trainings so far took, those of all trainers that share the cache."""
        return self.runners.execution.summary()

    def fit(self, fit: Fit, shard: Shard, place: RngContext) -> FitResult:
        """Run a training that a method asked for, on a client's images or on the features that came with it.

        Who has no samples trains nothing: the weights come back as they were.
        """
        return self.fit_cohort([ClientFit(fit, shard, place)])[0]

    def fit_cohort(self, group: Sequence[ClientFit]) -> list[FitResult]:
        """Run the trainings of several clients at once; they have the same objective, and all have samples."""
        # The largest first: those who still have steps are then the first few, and a step can leave the others out.
        order = sorted(range(len(group)), key=lambda place: -len(group[place]))
        found = self._fit_within_room([group[place] for place in order])
        answers = dict(zip(order, found, strict=True))
        return [answers[place] for place in range(len(group))]

    def _fit_within_room(self, group: Sequence[ClientFit]) -> list[FitResult]:
        """Train no more at once than the device's memory holds, as measured on those before.

        What does not fit all the same is halved.
        """
        most = self.memory_budget.most(len(group), self.machine.device)
        if most == len(group):
            try:
                with self.memory_budget.measure(len(group), self.machine.device):
                    return self._fit(group)
            except torch.OutOfMemoryError:
                if len(group) == 1:
                    raise
            self.runners.clear()
            torch.cuda.empty_cache()
            most = (len(group) + 1) // 2
        parts = [group[start : start + most] for start in range(0, len(group), most)]
        return [fitted for part in parts for fitted in self._fit_within_room(part)]

    def _fit(self, group: Sequence[ClientFit]) -> list[FitResult]:
        first = group[0].fit
        rate = learning_rate(self.config, group[0].rng.round, self.rounds)
        given = stack_inputs(group, self.net)
        if not len(group[0]):
            return self.runners.plain(self.engine, group, given, rate).cohort.results(group, [0], again=False)
        if not self.net.module.training:  # it goes through all of its parts, again and again
            self.net.module.train()
        graphed = self.machine.graphs and self.net.stackable and (first.features is None or first.features.on_device)
        course: StepRunner | None = None
        steps = [0] * len(group)
        for epoch in range(first.epochs):
            epoch_batches = self._visits(group, epoch, WIDTHS if graphed else 1)
            if course is None:
                course = (
                    self.runners.graph(self.engine, group, given, rate, epoch_batches)
                    if graphed
                    else self.runners.plain(self.engine, group, given, rate)
                )
            course.epoch(epoch_batches, epoch)
            steps = [
                taken + sum(who < active for active in epoch_batches.active_clients) for who, taken in enumerate(steps)
            ]
        assert course is not None
        self.runners.execution.add_training(course.name, self.engine, len(group))
        return course.cohort.results(group, steps, again=graphed)

    def _visits(self, group: Sequence[ClientFit], epoch: int, multiple: int) -> EpochBatches:
        """Draw an epoch of every client and lay them side by side."""
        images = group[0].fit.features is None
        kept = self.net.num_kept_patches(self.config.mask_ratio) if images else 0
        draws = [
            draw_epoch(
                one.rng.seed,
                one.rng.round,
                one.rng.client,
                one.rng.first_epoch + epoch,
                samples=len(one),
                image_size=one.shard.images.image_size,
                # Features are what is left of images that were augmented and masked already.
                augment=self.augment if images else AugmentConfig(),
                num_patches=self.net.num_patches if images else 0,
                num_kept=kept,
            )
            for one in group
        ]
        many = len(group) > 1
        epoch_batches = make_epoch_batches(draws, self.config.batch_size, kept, self.machine.device, many, multiple)
        if not images:
            return epoch_batches
        # From places among the client's own samples to places in the set.
        index = torch.nn.utils.rnn.pad_sequence([one.shard.index for one in group], batch_first=True)
        places = epoch_batches.stacked.shard_positions
        found = index.expand(len(epoch_batches), -1, -1).gather(-1, places) if many else index[0][places]
        return replace(epoch_batches, stacked=replace(epoch_batches.stacked, image_indices=found))


def preprocess_for(net: Net, device: torch.device) -> Preprocess:
    """Return what turns stored pixels into this model's input, on this device."""
    return Preprocess(net.image_size, torch.tensor(net.mean, device=device), torch.tensor(net.std, device=device))
