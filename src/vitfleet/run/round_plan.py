"""Which clients train in a round, what they are sent and, on simulated devices, when they finish."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np

from vitfleet.config.fleet import BufferedSchedule
from vitfleet.config.schema import Config
from vitfleet.costs.cost_model import message_size
from vitfleet.costs.virtual_clock import ClientInFlight, close_round, collect_replies
from vitfleet.errors import UserError
from vitfleet.message import Message, Numbers, State
from vitfleet.methods.base import Method
from vitfleet.randomness import Address, Purpose
from vitfleet.run.clients import VirtualFleet, training_clients
from vitfleet.run.records import ClientRecord
from vitfleet.run.state import InFlight, RunState

TOO_LATE = "too late"


@dataclass(frozen=True)
class ClientPlan:
    """One client's part in a round, before it trains."""

    client: int
    message: Message
    down_bytes: int  # size of the message and, for a new client, of the initial broadcast
    last_round: int | None  # the last round whose update the server used; ``None`` for a new client
    # Start and end on the virtual clock, where there is one
    began: float | None = None
    ended: float | None = None
    failure: str | None = None  # why the client does not train, or why its update is not waited for
    staleness: int = 0  # age of the server state that the message was made from, in versions

    def record(self, up_bytes: int = 0, **measured: Any) -> ClientRecord:
        """Return the client's record: what was planned, what it sent, and the other fields of the record."""
        return ClientRecord(self.client, self.down_bytes, up_bytes, began=self.began, ended=self.ended, **measured)


def plans_on_clock(
    virtual: VirtualFleet,
    plans: Sequence[ClientPlan],
    round: int,
    now: float,
    wanted: int,
    client_metrics: Mapping[int, Numbers],
    work: str,
) -> tuple[list[ClientPlan], float]:
    """Return plans with the times of the virtual clock, and the time at which ``wanted`` of the clients have replied.

    Clients that are too late, or whose devices are too small, are marked as failures. ``client_metrics`` are the
    numbers in each client's last update; ``work`` is what they do, in a word.
    """
    failures = {plan.client: virtual.failure_reason(plan.client) for plan in plans}
    seconds = {
        plan.client: virtual.seconds(round, plan.client, plan.down_bytes, client_metrics.get(plan.client))
        for plan in plans
        if failures[plan.client] is None
    }
    arrivals, end = close_round(virtual.config.schedule, wanted, now, seconds)
    by_client = {arrival.client: arrival for arrival in arrivals}
    timed = []
    for plan in plans:
        arrival = by_client.get(plan.client)
        if arrival is None:
            timed.append(replace(plan, failure=failures[plan.client], down_bytes=0))
            continue
        taken = f"{work} takes {seconds[plan.client]:.3g} virtual seconds, the round ended after {end - now:.3g}"
        failure = None if arrival.counts else f"{TOO_LATE}: {taken}"
        timed.append(replace(plan, began=arrival.began, ended=arrival.ended, failure=failure))
    return timed, end


@dataclass(frozen=True)
class RoundPlanner:
    """Plans rounds: chooses clients, makes their messages and applies the schedule."""

    config: Config
    method: Method[Any]
    base: Message  # as it is sent
    virtual: VirtualFleet | None

    def plan(self, state: RunState, round: int) -> tuple[list[ClientPlan], InFlight]:
        """Return the plans of a round, in ascending order of clients, and what is in flight after it."""
        schedule = self.config.fleet.schedule
        if isinstance(schedule, BufferedSchedule):
            return self._plan_buffered(schedule, state, round)
        evaluates = evaluation_due(self.config, round)
        plans = [
            self._plan_client(state.server, round, client, state.last_seen.get(client), evaluates)
            for client in choose_clients(self.config, round)
        ]
        if self.virtual is None:
            return plans, state.in_flight
        now, wanted = state.in_flight.now, self.config.fleet.per_round
        timed, end = plans_on_clock(self.virtual, plans, round, now, wanted, state.client_metrics, "training")
        return timed, InFlight(end)

    def _plan_client(
        self, server: State, round: int, client: int, last_round: int | None, evaluates: bool
    ) -> ClientPlan:
        message = self.method.message_to_client(server, round, client, last_round)
        if evaluates:
            more = self.method.evaluation_message(server, round)
            message = Message({**message.tensors, **more.tensors}, {**message.numbers, **more.numbers})
        message = self.method.to_wire(message)
        base_bytes = message_size(self.base) if last_round is None else 0
        return ClientPlan(client, message, message_size(message) + base_bytes, last_round)

    def _plan_buffered(
        self, schedule: BufferedSchedule, state: RunState, round: int
    ) -> tuple[list[ClientPlan], InFlight]:
        """Plan a round of FedBuff: it ends when ``fleet.per_round`` of the clients in flight have finished."""
        virtual = self.virtual
        assert virtual is not None  # the configuration requires devices
        version, in_flight = round - 1, state.in_flight
        usable = sorted(set(virtual.usable_clients) & set(training_clients(self.config)))
        if len(usable) < schedule.concurrency + self.config.fleet.per_round:
            raise UserError(
                f"fleet.schedule.concurrency = {schedule.concurrency}: only {len(usable)} clients have enough memory "
                "to train; reduce it, or choose other fleet.devices"
            )
        starts, evaluates = count(), evaluation_due(self.config, round)

        def start_client(training: Sequence[ClientInFlight], at: float) -> ClientInFlight:
            """Draw one of the idle clients and return when it finishes."""
            idle = sorted(set(usable) - {flight.client for flight in training})
            rng = Address(self.config.seed, Purpose.SAMPLE_CLIENTS, round, next(starts)).generator()
            client = idle[int(rng.integers(len(idle)))]
            last_round = state.last_seen.get(client)
            plan = self._plan_client(state.server, round, client, last_round, evaluates)
            ended = at + virtual.seconds(round, client, plan.down_bytes, state.client_metrics.get(client))
            return ClientInFlight(ended, client, version, -1 if last_round is None else last_round, at)

        training = list(in_flight.clients)
        while len(training) < schedule.concurrency:
            training.append(start_client(training, in_flight.now))
        finished, training = collect_replies(training, self.config.fleet.per_round, in_flight.now, start_client)
        past_states = {**in_flight.past_states, version: State(state.server.tensors, state.server.numbers)}
        plans = []
        for flight in sorted(finished, key=lambda flight: flight.client):
            last_round = None if flight.last_round < 0 else flight.last_round
            past, past_round = past_states[flight.version], flight.version + 1
            plan = self._plan_client(past, past_round, flight.client, last_round, evaluates)
            plans.append(replace(plan, staleness=version - flight.version, began=flight.began, ended=flight.ended))
        needed = {flight.version for flight in training}
        past_states = {version: past for version, past in past_states.items() if version in needed}
        return plans, InFlight(finished[-1].ended, tuple(training), past_states)


def evaluation_due(config: Config, round: int) -> bool:
    """Return whether models are evaluated after a round."""
    return round % config.eval.every == 0 or round == config.rounds


def choose_clients(config: Config, round: int) -> list[int]:
    """Draw a round's clients without replacement, never a held-out client; return them in ascending order."""
    rng = Address(config.seed, Purpose.SAMPLE_CLIENTS, round).generator()
    chosen = rng.choice(training_clients(config), config.fleet.asked, replace=False)
    return [int(client) for client in np.sort(chosen)]


def apply_staleness(up: Message, plan: ClientPlan, server: State, schedule: BufferedSchedule) -> Message:
    """Return a stale update as if it had started from the current model.

    FedBuff adds the changes of weights, whichever version they started from. A change that is ``s`` versions old is
    scaled by (1 + s)^−a and added to the server's weights. Tensors that are not weights of the server, such as
    features, are not changed.
    """
    if not plan.staleness:
        return up
    scale = (1 + plan.staleness) ** -schedule.staleness
    tensors = {
        name: (server.tensors[name] + scale * (tensor - plan.message.tensors[name])).to(tensor.dtype)
        if name in plan.message.tensors and name in server.tensors
        else tensor
        for name, tensor in up.tensors.items()
    }
    return Message(tensors, up.numbers)
