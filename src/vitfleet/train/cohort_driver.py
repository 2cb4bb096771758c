"""Driving the halves of a method: running each training that a generator yields, alone or with others of its kind."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from vitfleet.data.images import Shard
from vitfleet.train.cohort_inputs import ClientFit, RngContext
from vitfleet.train.objective import Fit, FitResult
from vitfleet.train.trainer import Trainer

Outcome = TypeVar("Outcome")
SERVER_CLIENT = -2  # the server's place among the clients, for what it draws itself
# Where the model is compiled, a step is computed for all of a group: there a client joins if it has at least this share
# of the largest one's steps an epoch (the rest is padding), or lacks no more than a few.
ALIKE = 0.5
FEW_STEPS = 8


@dataclass
class Participant(Generic[Outcome]):
    """A half of a method at work: its generator, its images, and where in the run it stands."""

    work: Generator[Fit, FitResult, Outcome]
    shard: Shard
    rng: RngContext


def run_participant(
    work: Generator[Fit, FitResult, Outcome], trainer: Trainer, shard: Shard, place: RngContext
) -> Outcome:
    """Drive one half to its end."""
    return run_cohort([Participant(work, shard, place)], trainer)[0]


def run_cohort(halves: Sequence[Participant[Outcome]], trainer: Trainer) -> list[Outcome]:
    """Drive several halves to their ends, training those together that want the same training at the same time."""
    outcomes: dict[int, Outcome] = {}
    waiting: dict[int, Fit] = {}

    def go_on(place: int, fitted: FitResult | None) -> None:
        half = halves[place]
        try:
            waiting[place] = next(half.work) if fitted is None else half.work.send(fitted)
        except StopIteration as end:
            outcomes[place] = end.value

    for place in range(len(halves)):
        go_on(place, None)
    while waiting:
        wanted = [(place, ClientFit(fit, halves[place].shard, halves[place].rng)) for place, fit in waiting.items()]
        waiting.clear()
        for group in group_fits(wanted, trainer):
            found = trainer.fit_cohort([one for _, one in group])
            for (place, one), fitted in zip(group, found, strict=True):
                # Later trainings of the same round draw from later epochs: no two share their numbers.
                half = halves[place]
                half.rng = replace(half.rng, first_epoch=half.rng.first_epoch + one.fit.epochs)
                go_on(place, fitted)
    return [outcomes[place] for place in range(len(halves))]


Numbered = tuple[int, ClientFit]


def group_fits(wanted: Sequence[Numbered], trainer: Trainer) -> Iterator[list[Numbered]]:
    """Put those together that can be trained together."""
    left = sorted(wanted, key=lambda one: -len(one[1]))
    while left:
        first = left[0][1]
        joins = [_may_join(first, other, trainer) for _, other in left]
        yield [one for one, joined in zip(left, joins, strict=True) if joined]
        left = [one for one, joined in zip(left, joins, strict=True) if not joined]


def _may_join(first: ClientFit, other: ClientFit, trainer: Trainer) -> bool:
    if first is other:
        return True
    one, two = first.fit, other.fit

    def steps(whose: ClientFit) -> int:
        return -(-len(whose) // trainer.config.batch_size)

    return (
        trainer.net.stackable
        and len(other) > 0
        and (not trainer.machine.compile or steps(other) >= min(ALIKE * steps(first), steps(first) - FEW_STEPS))
        and one.features is None
        and two.features is None
        and first.shard.images is other.shard.images
        and one.epochs == two.epochs
        and one.score_samples == two.score_samples
        and one.objective == two.objective
        and one.constants.keys() == two.constants.keys()
        and (one.reference_weights is None) == (two.reference_weights is None)
        and (one.memory is None) == (two.memory is None)
    )
