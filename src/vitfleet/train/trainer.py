"""The training loop of one client.

Nothing in the loop waits for the device: draws are made for a whole epoch ahead, sums stay on the device,
and the only synchronisation is the caller reading a result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vitfleet.config.schema import AugmentConfig, TrainConfig
from vitfleet.data.batches import EpochDraws, Preprocess, draw_epoch
from vitfleet.data.images import Shard
from vitfleet.models.net import Net
from vitfleet.train.machine import Machine
from vitfleet.train.objective import Fit, Fitted, Step
from vitfleet.train.optim import learning_rate, make_optimizer


@dataclass(frozen=True)
class Place:
    """Where in a run a training happens: what its randomness is addressed by."""

    seed: int
    round: int
    client: int
    first_epoch: int = 0


@dataclass(frozen=True)
class Trainer:
    """Trains one client at a time."""

    net: Net
    preprocess: Preprocess
    config: TrainConfig
    augment: AugmentConfig
    rounds: int
    machine: Machine

    def fit(self, fit: Fit, shard: Shard, place: Place) -> Fitted:
        """Run a training that a method asked for on one client's images.

        A client without images trains nothing: its weights come back as they were.
        """
        objective = fit.objective
        trains = self.net.anatomy.trainable(objective.trains)
        leaves = {name: fit.weights[name].detach().clone().requires_grad_() for name in trains}
        # Running statistics are written in place by the forward pass: never into somebody else's tensors.
        buffers = {
            name: tensor.clone() for name, tensor in fit.weights.items() if name not in self.net.anatomy.parameters
        }
        weights = {**fit.weights, **buffers, **leaves}
        optimizer = make_optimizer(self.config, leaves.values(), learning_rate(self.config, place.round, self.rounds))
        observed = objective.observer.start(leaves) if objective.observer else {}
        total = torch.zeros((), device=self.machine.device)
        steps = 0
        self.net.module.train()
        for epoch in range(place.first_epoch, place.first_epoch + fit.epochs):
            draws = self._draw(shard, place, epoch)
            for start in range(0, len(shard), self.config.batch_size):
                batch = draws.rows(start, start + self.config.batch_size)
                step = self._forward(weights, leaves, shard, batch, fit)
                loss = objective.loss(step)
                gradients = dict(
                    zip(
                        leaves,
                        torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True),
                        strict=True,
                    )
                )
                with torch.no_grad():
                    if objective.observer:
                        observed = objective.observer.see(observed, gradients, step)
                    applied = objective.transform(gradients, step) if objective.transform else gradients
                    for name, leaf in leaves.items():
                        leaf.grad = applied[name]
                    if self.config.clip is not None:
                        torch.nn.utils.clip_grad_norm_(leaves.values(), self.config.clip)
                    optimizer.step()
                    total += loss.detach() * step.share.shape[0]
                steps += 1
        trained = {name: leaf.detach() for name, leaf in leaves.items()}
        trained |= {name: buffers[name] for name in objective.trains if name in buffers}
        seen = max(1, len(shard) * fit.epochs)
        return Fitted(trained, total / seen, len(shard), steps, observed)

    def _draw(self, shard: Shard, place: Place, epoch: int) -> EpochDraws:
        return draw_epoch(
            place.seed,
            place.round,
            place.client,
            epoch,
            samples=len(shard),
            side=shard.images.side,
            augment=self.augment,
            patches=self.net.patches,
            kept=self.net.kept(self.config.mask_ratio),
            device=self.machine.device,
        )

    def _forward(
        self, weights: dict[str, Tensor], leaves: dict[str, Tensor], shard: Shard, batch: EpochDraws, fit: Fit
    ) -> Step:
        index = shard.index[batch.order]
        images = self.preprocess(shard.images.images[index], batch)
        with self.machine.autocast():
            logits = self.net(weights, images, batch.keep, fit.objective.route)
        share = torch.full((len(index),), 1 / len(index), device=self.machine.device)
        return Step(logits, shard.images.labels[index], share, leaves, fit.constants)


def preprocess_for(net: Net, device: torch.device) -> Preprocess:
    """Return what turns stored pixels into this model's input, on this device."""
    return Preprocess(net.side, torch.tensor(net.mean, device=device), torch.tensor(net.std, device=device))
