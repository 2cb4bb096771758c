"""Runs the trainings that a method's generators yield, and stacks those that can be trained together."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeAlias, TypeVar

from vitfleet.data.images import Shard
from vitfleet.training.cohort_inputs import ClientFit, RngContext
from vitfleet.training.objective import Fit, FitResult
from vitfleet.training.trainer import Trainer

Outcome = TypeVar("Outcome")
IndexedFit: TypeAlias = tuple[int, ClientFit]


@dataclass
class Participant(Generic[Outcome]):
    """The generator of a client update or of a server update, with its images and its random address.

    Attributes
    ----------
    update
        Yields the trainings to run, is sent their results, and returns the outcome.
    """

    update: Generator[Fit, FitResult, Outcome]
    shard: Shard
    rng: RngContext


def run_participant(
    update: Generator[Fit, FitResult, Outcome], trainer: Trainer, shard: Shard, rng: RngContext
) -> Outcome:
    """Run a single update to its end."""
    return run_cohort([Participant(update, shard, rng)], trainer)[0]


def run_cohort(participants: Sequence[Participant[Outcome]], trainer: Trainer) -> list[Outcome]:
    """Run several updates to their ends; equal trainings that are requested at the same time run together."""
    outcomes: dict[int, Outcome] = {}
    requested: dict[int, Fit] = {}

    def resume(index: int, result: FitResult | None) -> None:
        """Run an update until its next training, or to its end."""
        update = participants[index].update
        try:
            requested[index] = next(update) if result is None else update.send(result)
        except StopIteration as end:
            outcomes[index] = end.value

    for index in range(len(participants)):
        resume(index, None)
    while requested:
        indexed_fits = [
            (index, ClientFit(fit, participants[index].shard, participants[index].rng))
            for index, fit in requested.items()
        ]
        requested.clear()
        for group in group_fits(indexed_fits, trainer):
            results = trainer.fit_cohort([client_fit for _, client_fit in group])
            for (index, client_fit), result in zip(group, results, strict=True):
                # Later trainings of the same round draw from later epochs, so that no two share their numbers.
                participant = participants[index]
                first_epoch = participant.rng.first_epoch + client_fit.fit.epochs
                participant.rng = replace(participant.rng, first_epoch=first_epoch)
                resume(index, result)
    return [outcomes[index] for index in range(len(participants))]


def group_fits(indexed_fits: Sequence[IndexedFit], trainer: Trainer) -> Iterator[list[IndexedFit]]:
    """Yield groups of fits that can be trained together, the largest client of each group first."""
    remaining = sorted(indexed_fits, key=lambda indexed_fit: -len(indexed_fit[1]))
    while remaining:
        largest = remaining[0][1]
        joins = [_can_join(largest, client_fit, trainer) for _, client_fit in remaining]
        yield [indexed_fit for indexed_fit, joined in zip(remaining, joins, strict=True) if joined]
        remaining = [indexed_fit for indexed_fit, joined in zip(remaining, joins, strict=True) if not joined]


def _can_join(largest: ClientFit, candidate: ClientFit, trainer: Trainer) -> bool:
    if largest is candidate:
        return True
    first, second = largest.fit, candidate.fit
    return (
        trainer.net.stackable
        and len(candidate) > 0
        and first.features is None
        and second.features is None
        and largest.shard.images is candidate.shard.images
        and first.epochs == second.epochs
        and first.score_samples == second.score_samples
        and first.objective == second.objective
        and first.weights.keys() == second.weights.keys()
        and first.constants.keys() == second.constants.keys()
        and (first.reference_weights is None) == (second.reference_weights is None)
        and (first.companion_weights is None) == (second.companion_weights is None)
        and (first.memory is None) == (second.memory is None)
        and first.train == second.train
        and _replays(first) == _replays(second)
    )


def _replays(fit: Fit) -> int:
    return 0 if fit.replay is None else fit.replay.replays
