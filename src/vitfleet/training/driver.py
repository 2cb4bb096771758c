"""Runs the trainings that a method's generators yield, and stacks those that can be trained together."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeAlias, TypeVar

from vitfleet.data.images import Shard
from vitfleet.training.local_training import LocalResult, LocalTraining
from vitfleet.training.stacking.inputs import ClientTraining, RngContext
from vitfleet.training.trainer import Trainer

Outcome = TypeVar("Outcome")
IndexedTraining: TypeAlias = tuple[int, ClientTraining]


@dataclass
class PendingUpdate(Generic[Outcome]):
    """The generator of a client update or of a server update, with its images and its random address."""

    update: Generator[LocalTraining, LocalResult, Outcome]  # yields trainings, is sent their results
    shard: Shard
    rng: RngContext


def run_update(
    update: Generator[LocalTraining, LocalResult, Outcome], trainer: Trainer, shard: Shard, rng: RngContext
) -> Outcome:
    """Run a single update to its end."""
    return run_updates([PendingUpdate(update, shard, rng)], trainer)[0]


def run_updates(updates: Sequence[PendingUpdate[Outcome]], trainer: Trainer) -> list[Outcome]:
    """Run several updates to their ends; equal trainings that are requested at the same time run together."""
    outcomes: dict[int, Outcome] = {}
    requested: dict[int, LocalTraining] = {}

    def resume(index: int, result: LocalResult | None) -> None:
        """Run an update until its next training, or to its end."""
        update = updates[index].update
        try:
            requested[index] = next(update) if result is None else update.send(result)
        except StopIteration as end:
            outcomes[index] = end.value

    for index in range(len(updates)):
        resume(index, None)
    while requested:
        indexed = [
            (index, ClientTraining(training, updates[index].shard, updates[index].rng))
            for index, training in requested.items()
        ]
        requested.clear()
        for group in group_trainings(indexed, trainer):
            results = trainer.train_together([client_training for _, client_training in group])
            for (index, client_training), result in zip(group, results, strict=True):
                # Later trainings of the same round draw from later epochs, so that no two share their numbers.
                pending = updates[index]
                first_epoch = pending.rng.first_epoch + client_training.training.epochs
                pending.rng = replace(pending.rng, first_epoch=first_epoch)
                resume(index, result)
    return [outcomes[index] for index in range(len(updates))]


def group_trainings(indexed: Sequence[IndexedTraining], trainer: Trainer) -> Iterator[list[IndexedTraining]]:
    """Yield groups of trainings that can be stacked, the largest client of each group first."""
    remaining = sorted(indexed, key=lambda pair: -len(pair[1]))
    while remaining:
        largest = remaining[0][1]
        joins = [_can_join(largest, training, trainer) for _, training in remaining]
        yield [pair for pair, joined in zip(remaining, joins, strict=True) if joined]
        remaining = [pair for pair, joined in zip(remaining, joins, strict=True) if not joined]


def _can_join(largest: ClientTraining, candidate: ClientTraining, trainer: Trainer) -> bool:
    return largest is candidate or (
        trainer.net.stackable
        and len(candidate) > 0
        and largest.shard.images is candidate.shard.images
        and largest.training.stacks_with(candidate.training)
    )
