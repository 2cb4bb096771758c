"""What a method knows of the run it is part of."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from vitfleet.config.base import AggregationParams
from vitfleet.config.schema import TrainConfig
from vitfleet.config.train import EvaluatedBody
from vitfleet.data.tasks import NO_TASKS, TaskClasses
from vitfleet.methods.aggregation_rules import MeanParams
from vitfleet.models.net import Net
from vitfleet.models.parts import ModelParts


@dataclass(frozen=True)
class MethodContext:
    """The model, the training configuration and the sizes of a run, as a method sees them.

    Attributes
    ----------
    parts
        The named parts of the model.
    train
        The table ``[train]``.
    rounds, seed
        Number of rounds and seed of the run.
    num_classes
        Number of classes of the data set.
    num_tokens
        Number of tokens of a training image after masking, class token included.
    embed_dim
        Length of a token.
    device
        The device that trains.
    num_tasks
        Number of tasks that every client learns one after the other; 1 without tasks.
    aggregation
        The table ``[aggregate]``: the aggregation rule with its parameters.
    evaluated_body
        ``eval.body``: the body of the model that a client is evaluated with, where the body is shared.
    task_classes
        Which task each class belongs to, and whether the task of an image is known.
    """

    parts: ModelParts
    train: TrainConfig
    rounds: int
    seed: int
    num_classes: int
    num_tokens: int
    embed_dim: int
    device: torch.device
    num_tasks: int = 1
    aggregation: AggregationParams = field(default_factory=MeanParams)
    evaluated_body: EvaluatedBody = "own"
    task_classes: TaskClasses = NO_TASKS

    @classmethod
    def from_net(
        cls,
        net: Net,
        train: TrainConfig,
        rounds: int,
        seed: int,
        num_classes: int,
        device: torch.device,
        num_tasks: int = 1,
        aggregation: AggregationParams | None = None,
        evaluated_body: EvaluatedBody = "own",
        task_classes: TaskClasses = NO_TASKS,
    ) -> MethodContext:
        """Return the context of a model in a run."""
        return cls(
            parts=net.parts,
            train=train,
            rounds=rounds,
            seed=seed,
            num_classes=num_classes,
            num_tokens=net.num_prefix_tokens + net.num_kept_patches(train.mask_ratio),
            embed_dim=net.embed_dim,
            device=device,
            num_tasks=num_tasks,
            aggregation=aggregation or MeanParams(),
            evaluated_body=evaluated_body,
            task_classes=task_classes,
        )
