"""The training loop of one client.

Nothing inside an epoch waits for the device: an epoch's draws are moved there ahead of it, sums stay there, and the
only synchronisation is the caller reading a result.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from vitfleet.config.schema import AugmentConfig, TrainConfig
from vitfleet.data.batches import EpochDraws, Preprocess, draw_epoch
from vitfleet.data.features import FeatureSet
from vitfleet.data.images import Shard
from vitfleet.message import Tensors
from vitfleet.models.net import Net
from vitfleet.train.machine import Machine
from vitfleet.train.objective import Fit, Fitted, References, Step, within_task
from vitfleet.train.optim import learning_rate, make_optimizer

Outcome = TypeVar("Outcome")
SCORED_AT_ONCE = 256  # images whose loss is measured in one batch
SERVER = -2  # the server's place among the clients, for what it draws itself


@dataclass(frozen=True)
class Place:
    """Where in a run a training happens: what its randomness is addressed by."""

    seed: int
    round: int
    client: int
    first_epoch: int = 0


@dataclass(frozen=True)
class Trainer:
    """Trains one client at a time.

    Attributes
    ----------
    tasks
        The task of each class, ``[classes]``, where an image's task is known: its class is then only looked for
        among those of its task. ``None``: among all.
    """

    net: Net
    preprocess: Preprocess
    config: TrainConfig
    augment: AugmentConfig
    rounds: int
    machine: Machine
    tasks: Tensor | None = None

    def fit(self, fit: Fit, shard: Shard, place: Place) -> Fitted:
        """Run a training that a method asked for, on a client's images or on the features that came with it.

        Who has no samples trains nothing: the weights come back as they were.
        """
        objective = fit.objective
        samples = len(shard) if fit.features is None else len(fit.features)
        trains = self.net.anatomy.trainable(objective.trains)
        leaves = {name: fit.weights[name].detach().clone().requires_grad_() for name in trains}
        # Running statistics are written in place by the forward pass: never into somebody else's tensors.
        buffers = {
            name: tensor.clone() for name, tensor in fit.weights.items() if name not in self.net.anatomy.parameters
        }
        weights = {**fit.weights, **buffers, **leaves}
        optimizer = make_optimizer(self.config, leaves.values(), learning_rate(self.config, place.round, self.rounds))
        observed = dict(objective.observer.start(leaves)) if objective.observer else {}
        counted = {
            name: torch.zeros((), device=self.machine.device)
            for name in (objective.transform.counts if objective.transform else ())
        }
        chosen: Tensor | None = None
        total = torch.zeros((), device=self.machine.device)
        steps = 0
        self.net.module.train()
        for epoch in range(fit.epochs):
            draws = self._draw(shard, fit.features, place, place.first_epoch + epoch)
            for start in range(0, samples, self.config.batch_size):
                batch = draws.rows(start, start + self.config.batch_size)
                step = self._forward(weights, leaves, shard, batch, epoch, fit)
                loss = objective.loss(step)
                found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
                gradients = dict(zip(leaves, found, strict=True))
                chooser, memory = objective.chooser, fit.memory
                if chooser and memory and len(memory) > chooser.k and steps % chooser.every == 0:
                    chosen = chooser(gradients, self._remember(weights, leaves, fit, None))
                references = self._references(weights, leaves, shard, batch, epoch, fit, chosen)
                with torch.no_grad():
                    if objective.observer:
                        observed = dict(objective.observer.see(observed, gradients, step))
                    applied: Tensors = gradients
                    if objective.transform:
                        applied, counts = objective.transform(gradients, references, step)
                        for name, count in counts.items():
                            counted[name] += count
                    for name, leaf in leaves.items():
                        leaf.grad = applied[name]
                    if self.config.clip is not None:
                        torch.nn.utils.clip_grad_norm_(leaves.values(), self.config.clip)
                    optimizer.step()
                    total += loss.detach() * step.share.shape[0]
                steps += 1
        trained = {name: leaf.detach() for name, leaf in leaves.items()}
        trained |= {name: buffers[name] for name in objective.trains if name in buffers}
        losses = self._score({**weights, **trained}, shard) if fit.score else total.new_empty(0)
        return Fitted(trained, total / max(1, samples * fit.epochs), samples, steps, observed | counted, losses)

    def _references(
        self,
        weights: dict[str, Tensor],
        leaves: dict[str, Tensor],
        shard: Shard,
        batch: EpochDraws,
        epoch: int,
        fit: Fit,
        chosen: Tensor | None,
    ) -> References | None:
        found: list[References] = []
        if fit.memory is not None and len(fit.memory):
            found.append(self._remember(weights, leaves, fit, chosen))
        if fit.elsewhere is not None:
            there = {name: fit.elsewhere[name].detach().clone().requires_grad_() for name in leaves}
            step = self._forward({**weights, **there}, there, shard, batch, epoch, fit)
            rows = torch.autograd.grad(
                fit.objective.loss(step), list(there.values()), allow_unused=True, materialize_grads=True
            )
            one = {name: row[None] for name, row in zip(there, rows, strict=True)}
            found.append(References(one, torch.ones(1, dtype=torch.bool, device=self.machine.device)))
        if not found:
            return None
        together = {name: torch.cat([part.gradients[name] for part in found]) for name in leaves}
        return References(together, torch.cat([part.present for part in found]))

    def _remember(
        self, weights: dict[str, Tensor], leaves: dict[str, Tensor], fit: Fit, chosen: Tensor | None
    ) -> References:
        """Return the gradients of the memory's parts (the chosen ones) at the current weights."""
        memory = fit.memory
        assert memory is not None
        places = range(len(memory)) if chosen is None else chosen.tolist()
        rows: list[tuple[Tensor, ...]] = []
        for place in places:
            with self.machine.autocast():
                logits = self.net(weights, self.preprocess(memory.images[place]), None, fit.objective.route)
            labels = memory.labels[place]
            losses = F.cross_entropy(within_task(logits, labels, self.tasks).float(), labels, reduction="none")
            rows.append(
                torch.autograd.grad(
                    torch.dot(losses, memory.share[place]),
                    list(leaves.values()),
                    allow_unused=True,
                    materialize_grads=True,
                )
            )
        stacked = {name: torch.stack(column) for name, column in zip(leaves, zip(*rows, strict=True), strict=True)}
        present = memory.share.sum(dim=1) > 0
        return References(stacked, present if chosen is None else present[chosen])

    @torch.no_grad()
    def _score(self, weights: dict[str, Tensor], shard: Shard) -> Tensor:
        self.net.module.eval()
        losses = [torch.empty(0, device=self.machine.device)]
        for index in torch.split(shard.index, SCORED_AT_ONCE):
            labels = shard.images.labels[index]
            with self.machine.autocast():
                logits = self.net(weights, self.preprocess(shard.images.images[index]))
            losses.append(F.cross_entropy(within_task(logits, labels, self.tasks).float(), labels, reduction="none"))
        return torch.cat(losses)

    def _draw(self, shard: Shard, features: FeatureSet | None, place: Place, epoch: int) -> EpochDraws:
        images = features is None
        return draw_epoch(
            place.seed,
            place.round,
            place.client,
            epoch,
            samples=len(shard) if features is None else len(features),
            side=shard.images.side,
            # Features are what is left of images that were augmented and masked already.
            augment=self.augment if images else AugmentConfig(),
            patches=self.net.patches if images else 0,
            kept=self.net.kept(self.config.mask_ratio) if images else 0,
            device=self.machine.device,
        )

    def _forward(
        self,
        weights: dict[str, Tensor],
        leaves: dict[str, Tensor],
        shard: Shard,
        batch: EpochDraws,
        epoch: int,
        fit: Fit,
    ) -> Step:
        split = fit.objective.split
        features: Tensor | None = None
        if fit.features is not None:
            features, labels = fit.features.take(batch.order)
            share = fit.features.shares(batch.order)
        else:
            index = shard.index[batch.order]
            images, labels = self.preprocess(shard.images.images[index], batch), shard.images.labels[index]
            share = torch.full((len(labels),), 1 / len(labels), device=self.machine.device)
        with self.machine.autocast():
            if split is None:
                logits = self.net(weights, images, batch.keep, fit.objective.route)
            else:
                if features is None:
                    features = self.net.until(weights, images, batch.keep, split)
                logits = self.net.onward(weights, features, split)
        logits = within_task(logits, labels, self.tasks)
        return Step(logits, labels, share, leaves, fit.constants, batch.order, epoch, features)


def drive(work: Generator[Fit, Fitted, Outcome], trainer: Trainer, shard: Shard, place: Place) -> Outcome:
    """Drive a half of a method to its end, running each training it yields."""
    try:
        fit = next(work)
        while True:
            fitted = trainer.fit(fit, shard, place)
            # Later trainings of the same round draw from later epochs: no two share their numbers.
            place = replace(place, first_epoch=place.first_epoch + fit.epochs)
            fit = work.send(fitted)
    except StopIteration as end:
        outcome: Outcome = end.value
        return outcome


def preprocess_for(net: Net, device: torch.device) -> Preprocess:
    """Return what turns stored pixels into this model's input, on this device."""
    return Preprocess(net.side, torch.tensor(net.mean, device=device), torch.tensor(net.std, device=device))
