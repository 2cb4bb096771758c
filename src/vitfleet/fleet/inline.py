"""The whole fleet in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from vitfleet.data.images import Shard
from vitfleet.fleet.base import Reply, Request, Verdict
from vitfleet.message import State, Tensors
from vitfleet.methods.base import Answer, Job, Method, Work
from vitfleet.train.trainer import Place, Trainer


class InlineFleet:
    """Clients that are trained here, one after the other, on shards of one resident data set.

    Parameters
    ----------
    shard
        Returns a client's images.
    judge
        Tries a client's own model out on its own test images.
    base
        What every client was given once; one copy serves all.
    owned
        Clients' states to go on from.
    """

    def __init__(
        self,
        method: Method[Any],
        trainer: Trainer,
        seed: int,
        shard: Callable[[int], Shard],
        judge: Callable[[int, Tensors], Verdict],
        base: Tensors,
        owned: Mapping[int, State],
    ) -> None:
        self.method = method
        self.trainer = trainer
        self.seed = seed
        self.shard = shard
        self.judge = judge
        self.base = base
        self.owned = dict(owned)
        self._changed: set[int] = set()

    def ask(self, requests: Iterable[Request]) -> Iterator[Reply]:
        """Train each client as its turn comes."""
        for request in requests:
            job = Job(request.round, request.client, request.down, self.base, self.own(request.client))
            place = Place(self.seed, request.round, request.client)
            answer = work_alone(self.method.work(job), self.trainer, self.shard(request.client), place)
            self._keep(request.client, answer.own)
            verdict = self.judge(request.client, answer.model) if request.evaluate else None
            yield Reply(request.client, answer.up, verdict)

    def own(self, client: int) -> State | None:
        """Return a client's own state."""
        return self.owned.get(client)

    def changed(self) -> Mapping[int, State | None]:
        """Return the states that changed since the last call."""
        changes = {client: self.owned.get(client) for client in sorted(self._changed)}
        self._changed.clear()
        return changes

    def _keep(self, client: int, own: State | None) -> None:
        if own is None and client not in self.owned:
            return
        if own is None:
            del self.owned[client]
        else:
            self.owned[client] = own
        self._changed.add(client)


def work_alone(work: Work, trainer: Trainer, shard: Shard, place: Place) -> Answer:
    """Drive one client's half to its end, running each training it yields."""
    try:
        fit = next(work)
        while True:
            fitted = trainer.fit(fit, shard, place)
            # Later trainings of the same round draw from later epochs: no two share their numbers.
            place = replace(place, first_epoch=place.first_epoch + fit.epochs)
            fit = work.send(fitted)
    except StopIteration as end:
        answer: Answer = end.value
        return answer
