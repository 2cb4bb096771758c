"""The training loop, for one client or for several clients at once.

The host never waits for the device within an epoch: the random draws of an epoch are copied to the device before it,
sums stay there, and the only synchronisation is the caller reading a result. On a GPU a step is captured once in a
CUDA graph and replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from vitfleet.config.schema import AugmentConfig, TrainConfig
from vitfleet.data.batches import EpochBatches, draw_epoch, make_epoch_batches
from vitfleet.data.features import FeatureBlock, FeatureLoader
from vitfleet.data.images import Shard
from vitfleet.data.preprocess import Preprocess
from vitfleet.models.net import Net, num_kept
from vitfleet.training.capture.cache import RunnerCache
from vitfleet.training.capture.path import ExecutionSummary
from vitfleet.training.capture.runner import StepRunner
from vitfleet.training.engine import StepEngine
from vitfleet.training.execution.memory_budget import MemoryBudget, is_out_of_memory
from vitfleet.training.execution.settings import ExecutionSettings
from vitfleet.training.local_training import LocalResult, LocalTraining
from vitfleet.training.optimizers.optimizer import learning_rate
from vitfleet.training.stacking.inputs import SERVER_CLIENT, ClientTraining, RngContext, stack_inputs
from vitfleet.training.stacking.results import local_results
from vitfleet.training.views.cache import ViewPlan, ViewStore, load_or_compute
from vitfleet.training.views.frozen import FrozenPart

ALL_PARTS = 1 << 30
CAPTURED_WIDTH_MULTIPLE = 8  # samples; the width of a captured batch is rounded up, so that shapes recur


@dataclass(frozen=True)
class Trainer:
    """Trains clients."""

    net: Net
    preprocess: Preprocess
    config: TrainConfig
    augment: AugmentConfig
    rounds: int  # of the learning-rate schedule
    machine: ExecutionSettings
    class_to_task: Tensor | None = None  # [classes], where the task of an image is known: only its classes are possible
    # Parts of a set of stored samples whose gradients are computed together: more are faster on a GPU, one takes the
    # least memory. By default all parts on a GPU, one on a CPU.
    parts_at_once: int | None = None
    frozen_part: FrozenPart | None = None  # of the model, where clients keep what it makes of their images
    view_store: ViewStore = field(default_factory=ViewStore)
    runners: RunnerCache = field(default_factory=RunnerCache)
    memory_budget: MemoryBudget = field(default_factory=MemoryBudget)
    feature_block: FeatureBlock = field(default_factory=FeatureBlock)

    @cached_property
    def engine(self) -> StepEngine:
        """What steps are computed with."""
        parts_at_once = self.parts_at_once or (1 if self.machine.device.type == "cpu" else ALL_PARTS)
        return StepEngine(self.net, self.preprocess, self.config, self.machine, self.class_to_task, parts_at_once)

    def engine_for(self, training: LocalTraining) -> StepEngine:
        """Return what the steps of a training are computed with."""
        return self.engine.for_training(
            training.train or self.config, None if training.views is None else training.views.part
        )

    def execution_summary(self) -> ExecutionSummary:
        """Return the execution path of all trainings so far, of all trainers that share the runner cache."""
        return self.runners.execution.summary

    def train(self, training: LocalTraining, shard: Shard, rng: RngContext) -> LocalResult:
        """Run the training of one client, on its images or on features.

        A client without samples takes no step, and its weights are returned unchanged.
        """
        return self.train_together([ClientTraining(training, shard, rng)])[0]

    def train_together(self, group: Sequence[ClientTraining]) -> list[LocalResult]:
        """Run the trainings of several clients at once.

        The trainings of a group of several stack, and each has at least one sample.
        """
        return self._train_largest_first(self._on_cached_views(group))

    def _on_cached_views(self, group: Sequence[ClientTraining]) -> Sequence[ClientTraining]:
        """Return the trainings on cached views of the images, if they can be; views that are missing are computed."""
        first, device = group[0], self.machine.device
        train, bf16 = first.training.train or self.config, self.machine.bf16
        plan = ViewPlan.of(first.training, self.frozen_part, train, self.augment, bf16) if len(first) else None
        if plan is None:
            return group
        views = load_or_compute(plan, group, self.view_store, self.net, device, self._train_largest_first)
        return [
            replace(client, training=plan.on_views(client.training, values))
            for client, values in zip(group, views, strict=True)
        ]

    def _train_largest_first(self, group: Sequence[ClientTraining]) -> list[LocalResult]:
        # Sorted by falling size, the clients that have a step are always the first ones, and the others are left out.
        order = sorted(range(len(group)), key=lambda index: -len(group[index]))
        results = dict(zip(order, self._train_within_memory([group[index] for index in order]), strict=True))
        return [results[index] for index in range(len(group))]

    def _train_within_memory(self, group: Sequence[ClientTraining]) -> list[LocalResult]:
        """Train at most as many clients at once as the memory budget allows; halve a group that does not fit."""
        num_clients = self.memory_budget.max_clients(len(group), self.machine.device)
        if num_clients == len(group):
            try:
                with self.memory_budget.measure(len(group), self.machine.device):
                    return self._train(group)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                self.runners.clear()  # for a single client too: a capture that failed may have destroyed its graph
                if len(group) == 1:
                    raise
            torch.cuda.empty_cache()
            num_clients = (len(group) + 1) // 2
        parts = [group[start : start + num_clients] for start in range(0, len(group), num_clients)]
        return [result for part in parts for result in self._train_within_memory(part)]

    def _train(self, group: Sequence[ClientTraining]) -> list[LocalResult]:
        training = group[0].training
        config = training.train or self.config
        engine = self.engine_for(training)
        lr = learning_rate(config, group[0].rng.round, self.rounds)
        inputs = stack_inputs(group, self.machine.device)
        if not len(group[0]):
            runner = self.runners.eager_runner(engine, group, inputs, lr)
            return local_results(runner.stack, group, [0], tensors_reused=False)
        use_graphs = self.machine.graphs
        features = training.features
        loader = None if features is None else FeatureLoader(features, self.machine.device, self.feature_block)
        active_runner: StepRunner | None = None
        num_steps = [0] * len(group)
        for epoch in range(training.epochs):
            batches = self._epoch_batches(group, epoch, config, CAPTURED_WIDTH_MULTIPLE if use_graphs else 1)
            if loader is not None:
                batches = replace(batches, complete=loader.complete)
            if active_runner is None:
                active_runner = (
                    self.runners.graph_runner(engine, group, inputs, lr, batches)
                    if use_graphs
                    else self.runners.eager_runner(engine, group, inputs, lr)
                )
            active_runner.run_epoch(batches, epoch)
            for client in range(len(group)):
                num_steps[client] += sum(client < active for active in batches.active_clients)
        assert active_runner is not None
        self.runners.execution.add_training(
            active_runner.name, engine, len(group), server=group[0].rng.client == SERVER_CLIENT
        )
        return local_results(active_runner.stack, group, num_steps, tensors_reused=use_graphs)

    def _epoch_batches(
        self, group: Sequence[ClientTraining], epoch: int, config: TrainConfig, width_multiple: int
    ) -> EpochBatches:
        """Draw an epoch of every client, and arrange the clients' batches side by side."""
        training = group[0].training
        features, views = training.features, training.views
        sees_images = features is None and views is None
        if features is None:
            num_patches = self.net.num_patches
            num_tokens_kept = num_patches if views else self.net.num_kept_patches(config.mask_ratio)
        else:
            num_patches = features.num_tokens - self.net.num_prefix_tokens
            num_tokens_kept = num_kept(num_patches, features.token_dropout)
        draws = [
            draw_epoch(
                client.rng.seed,
                client.rng.round,
                client.rng.client,
                client.rng.first_epoch + epoch,
                samples=len(client),
                image_size=client.shard.images.image_size,
                # Features and views were computed from images that were already augmented and masked.
                augment=self.augment if sees_images and training.augment else AugmentConfig(),
                num_patches=num_patches,
                num_kept=num_tokens_kept,
                drawn={name: (stored.sizes[0], stored.draws) for name, stored in client.training.drawn_sets().items()},
                random=training.random,
                cached_views=0 if views is None else views.count,
            )
            for client in group
        ]
        stacked = len(group) > 1
        batches = make_epoch_batches(
            draws, config.batch_size, num_tokens_kept, self.machine.device, stacked, width_multiple
        )
        if features is not None:
            return batches
        # From positions in each client's shard to indices into the image set.
        shard_indices = [client.shard.index for client in group]
        index = torch.nn.utils.rnn.pad_sequence(shard_indices, batch_first=True)
        positions = batches.stacked.shard_positions
        image_indices = index.expand(len(batches), -1, -1).gather(-1, positions) if stacked else index[0][positions]
        return replace(batches, stacked=replace(batches.stacked, image_indices=image_indices))


def preprocess_for(net: Net, device: torch.device) -> Preprocess:
    """Return the preprocessing from stored pixels to the input of a model, on a device."""
    return Preprocess(net.image_size, torch.tensor(net.mean, device=device), torch.tensor(net.std, device=device))
