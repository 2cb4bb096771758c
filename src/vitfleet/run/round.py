"""One round: plan, train, aggregate, evaluate. It takes a :class:`RunState` and returns the next one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

import torch

from vitfleet.config.fleet import BufferedSchedule
from vitfleet.costs.cost_model import DryRun, message_size
from vitfleet.data.images import Shard
from vitfleet.errors import printable
from vitfleet.fleet.base import Reply, Request, in_request_order
from vitfleet.message import Numbers, State
from vitfleet.methods.aggregation.server_optimizers import apply_server_optimizer
from vitfleet.methods.base import Aggregator, Method, start_server_update
from vitfleet.methods.reported import RejectedUpdateError, check_names, check_types, parse_numbers
from vitfleet.progress import NO_PROGRESS, Progress
from vitfleet.run.context import RunContext
from vitfleet.run.evaluate import continual, incremental
from vitfleet.run.head_exchange import solve_head, solve_last_head
from vitfleet.run.records import Accuracy, ClientRecord, RoundRecord
from vitfleet.run.round_plan import ClientPlan, apply_staleness, evaluation_due
from vitfleet.run.state import RunState
from vitfleet.training.driver import run_update
from vitfleet.training.optimizers.optimizer import learning_rate
from vitfleet.training.stacking.inputs import SERVER_CLIENT, RngContext
from vitfleet.wire import encode

SPARE_BYTES = 10**6  # that a message may have beyond twice those of an honest client's

Known = TypeVar("Known")


def run_next(context: RunContext, state: RunState, progress: Progress = NO_PROGRESS) -> tuple[RunState, RoundRecord]:
    """Run the next round: round 0, which solves the head that the run starts with, or one in which clients train."""
    if not state.awaits_start:
        return run_round(context, state, state.round + 1, progress)
    state = replace(state, awaits_start=False)
    return with_solved_head(context, state, RoundRecord(0, 0.0, None, None, [], 0, 0), progress)


def run_round(
    context: RunContext, state: RunState, round: int, progress: Progress = NO_PROGRESS
) -> tuple[RunState, RoundRecord]:
    """Run one round and return the state after it and its record."""
    config, head = context.config, None
    if config.head.is_solved_first and config.begins_task(round):
        state, head = solve_head(context, state, None, progress)
    plans, in_flight = context.planner.plan(state, round)
    aggregator = context.method.aggregator(state.server, round)
    aggregator.earlier_sizes = state.update_sizes
    aggregator.earlier_samples = {client: _samples(numbers) for client, numbers in state.client_metrics.items()}
    entries, lost_state = _collect_updates(context, state, round, plans, aggregator, progress)
    accepted = [entry.client for entry in entries if entry.failure is None]
    server, moments, rejected = _aggregate(context, state, round, aggregator, accepted, progress)
    used = {client for client in accepted if client not in rejected}
    context.fleet.commit(used)
    entries = sorted((entry.rejected(rejected.get(entry.client)) for entry in entries), key=lambda entry: entry.client)
    counted = {client: samples for client, samples in aggregator.counted_samples.items() if client in used}
    entries = [replace(entry, counted=counted.get(entry.client)) for entry in entries]
    reported = {entry.client: entry.numbers for entry in entries if entry.client in used}
    state = replace(
        state,
        server=server,
        moments=moments,
        round=round,
        total_up_bytes=state.total_up_bytes + sum(entry.up_bytes for entry in entries),
        total_down_bytes=state.total_down_bytes + sum(entry.down_bytes for entry in entries),
        last_seen={**_without(state.last_seen, lost_state), **dict.fromkeys(reported, round)},
        client_metrics={**_without(state.client_metrics, lost_state), **reported},
        in_flight=in_flight,
        last_head=State(),
        update_sizes=tuple(size for client, size in aggregator.sizes.items() if client in used) or state.update_sizes,
    )
    accuracy = task = None
    if context.processes.is_first:
        accuracy = _evaluate(context, state, entries, progress) if evaluation_due(config, round) else None
        evaluate_task = incremental.evaluate_task if config.is_incremental else continual.evaluate_task
        task = evaluate_task(context, state, progress)
    record = RoundRecord(
        round,
        learning_rate(config.train, round, config.schedule_rounds),
        _mean_loss(entries),
        accuracy,
        entries,
        state.total_up_bytes,
        state.total_down_bytes,
        task,
        in_flight.now if context.planner.virtual is not None else None,
        head=head,
    )
    if config.head.solve_due(round, state.is_finished(config.rounds)):
        return with_solved_head(context, state, record, progress)
    return (state if task is None else replace(state, task_records=(*state.task_records, task))), record


def with_solved_head(
    context: RunContext, state: RunState, record: RoundRecord, progress: Progress = NO_PROGRESS
) -> tuple[RunState, RoundRecord]:
    """Solve the head after a round, and return the run's state and the round's record with it."""
    is_last = state.is_finished(context.config.rounds)
    solve = solve_head if context.last is None or not is_last else solve_last_head
    state, head = solve(context, state, record.accuracy, progress)
    if record.head is not None:  # the run was stopped after a round in which its head was solved, and ends with another
        head = replace(head, clients=[*record.head.clients, *head.clients])
    is_evaluated = record.accuracy is not None or state.round == 0 or is_last
    accuracy = None
    if is_evaluated and context.processes.is_first:
        accuracy = _evaluate(context, state, record.clients, progress)
    return state, replace(
        record,
        accuracy=accuracy,
        total_up_bytes=state.total_up_bytes,
        total_down_bytes=state.total_down_bytes,
        virtual_seconds=state.in_flight.now if context.planner.virtual is not None else None,
        metrics={},  # those that were measured are of the head before
        head=head,
    )


def _without(known: Mapping[int, Known], lost: Sequence[int]) -> dict[int, Known]:
    """Return what is known of clients, but for those that lost their state: they count as new."""
    return {client: value for client, value in known.items() if client not in lost}


def _collect_updates(
    context: RunContext,
    state: RunState,
    round: int,
    plans: Sequence[ClientPlan],
    aggregator: Aggregator,
    progress: Progress,
) -> tuple[list[ClientRecord], list[int]]:
    """Train the planned clients and add each update to the aggregator as it comes.

    Return the record of every client, and the clients that no longer have their state.
    """
    config = context.config
    training = {plan.client: plan for plan in plans if plan.failure is None}
    evaluate = evaluation_due(config, round)
    honest: dict[int, DryRun] = {}  # of each client's round

    def requests() -> Iterator[Request]:
        for plan in training.values():
            dry_run = context.dry_run(round, plan.client, state.client_metrics.get(plan.client))
            honest[plan.client] = dry_run
            most = 2 * message_size(dry_run.update.message) + SPARE_BYTES if context.method.has_known_size else None
            task_index = config.task_index(round)
            yield Request(round, plan.client, plan.message, evaluate, task_index, plan.last_round, max_bytes=most)

    entries = [plan.record(failure=plan.failure) for plan in plans if plan.failure is not None]
    lost_state = []
    with progress.task(f"round {round}: clients", len(training)) as advance:
        for reply in in_request_order(context.fleet.train(requests()), training):
            advance(1)
            plan = training[reply.client]
            entries.append(_take_reply(context, state, round, plan, reply, honest.pop(reply.client), aggregator))
            if reply.state_lost:
                lost_state.append(reply.client)
            del reply  # it may be large: free it before the next one arrives
    return entries, lost_state


def _take_reply(
    context: RunContext,
    state: RunState,
    round: int,
    plan: ClientPlan,
    reply: Reply,
    honest: DryRun,
    aggregator: Aggregator,
) -> ClientRecord:
    """Add a client's update to the aggregator and return the client's record; ``honest`` is a dry run of its round."""
    schedule = context.config.fleet.schedule
    if reply.message is None:
        return (plan if reply.sent else replace(plan, down_bytes=0)).record(failure=reply.failure or "no reply")
    up_bytes, expected = message_size(reply.message), honest.update.message
    try:
        numbers = parse_numbers(reply.message.numbers, context.method)
        check_types(reply.message.tensors, plan.message.tensors)
        update = context.method.from_wire(reply.message)
        check_names(numbers, expected.numbers, context.method)
        if update.tensors and not numbers["samples"]:
            raise RejectedUpdateError("its number of samples is 0, and it sends tensors")
        context.method.check_update(expected, update)
        if isinstance(schedule, BufferedSchedule):
            update = apply_staleness(update, plan, state.server, schedule)
        aggregator.add(plan.client, update)
    except RejectedUpdateError as error:
        return plan.record(up_bytes, failure=printable(str(error)))  # it may name what the client sent
    if reply.state_lost:  # it began anew
        honest = context.dry_run(round, plan.client, None)
    gflops = context.gflops(honest, numbers)
    counts = {} if reply.evaluation is None else asdict(reply.evaluation)
    return plan.record(up_bytes, numbers=numbers, gflops=gflops, **counts)


def _aggregate(
    context: RunContext,
    state: RunState,
    round: int,
    aggregator: Aggregator,
    accepted: Sequence[int],
    progress: Progress,
) -> tuple[State, State, Mapping[int, str]]:
    """Return the server state and its optimiser's moments after a round, and why updates were rejected as a whole."""
    minimum = context.config.fleet.min_replies
    if len(accepted) < minimum:
        reason = f"set aside: usable replies are {len(accepted)}, and fleet.min_replies = {minimum}"
        return state.server, state.moments, dict.fromkeys(accepted, reason)
    parameters = context.net.parts.parameters
    server, moments = apply_server_optimizer(
        context.config.server, state.server, aggregator.finish(), state.moments, parameters
    )
    trains = type(context.method).server_update is not Method.server_update
    with (progress if trains else NO_PROGRESS).task(f"round {round}: the server trains", 1):
        return _update_server(context, server, round), moments, aggregator.rejected


def _update_server(context: RunContext, server: State, round: int) -> State:
    """Run the method's training on the server. Of several processes the first does it and sends the result."""
    processes, device = context.processes, context.machine.device
    if not processes.is_first:
        updated = processes.broadcast_payload(State, None, device)
        assert updated is not None
        return replace(server, tensors=updated.tensors, numbers=updated.numbers)
    no_images = Shard(context.data.train, torch.empty(0, dtype=torch.long, device=device))
    generator = start_server_update(context.method, server, round)
    updated = run_update(generator, context.trainer, no_images, RngContext(context.config.seed, round, SERVER_CLIENT))
    if processes.size > 1:
        processes.broadcast(encode(updated))
    return updated


def _evaluate(context: RunContext, state: RunState, entries: Sequence[ClientRecord], progress: Progress) -> Accuracy:
    """Return the accuracy after a round; in a run of tasks, only that of the round's clients."""
    measured = [entry.accuracy for entry in entries if entry.accuracy is not None]
    local = sum(measured) / len(measured) if measured else None
    if context.config.data.tasks:
        return Accuracy(None, None, 0, local)
    context, state = context.at_the_end(state)
    accuracy, loss, models = context.evaluator.evaluate_global(
        context.method, state.round, state.server, context.base.tensors, context.fleet.client_state, progress
    )
    return Accuracy(accuracy, loss, models, local)


def _samples(numbers: Numbers) -> int:
    """Return the samples that a client reported in an update that was used."""
    samples = numbers.get("samples")
    return samples if isinstance(samples, int) else 0


def _mean_loss(entries: Sequence[ClientRecord]) -> float | None:
    """Return the mean training loss of the clients that trained, weighted by samples."""
    trained: list[Any] = [(entry.numbers.get("samples"), entry.numbers.get("loss")) for entry in entries]
    trained = [(samples, loss) for samples, loss in trained if samples and loss is not None]
    total: float = sum(samples for samples, _ in trained)
    return sum(samples * loss for samples, loss in trained) / total if trained else None
