"""The exchange in which the server solves the head from what all clients send once (the table ``[head]``).

Every client that may train, not only some as in a round, passes its images through the model without training. What it
sends, and how a head is solved from it, is the method ``closed-form``: its client side runs beside the run's own
method, on the body that clients of this method have. A client's state stays as it is. A new client receives the initial
broadcast with the request and keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitfleet.costs.cost_model import CostModel, message_size
from vitfleet.data.tasks import draw_task_order
from vitfleet.errors import printable
from vitfleet.fleet.base import NO_ROUND, Reply, Request, RequestKind, in_request_order
from vitfleet.message import Message, Numbers, State, Tensors, add_numbers, with_numbers
from vitfleet.methods.base import Aggregator, Method
from vitfleet.methods.closed_form.closed_form import CLIENT_MEANS, SUMS, ClosedForm, sums_of_state
from vitfleet.methods.closed_form.sums import Sums
from vitfleet.methods.reported import RejectedUpdateError, parse_numbers
from vitfleet.models.variants.wide_head import SCALE, SHIFT, unsolved_head
from vitfleet.progress import Progress
from vitfleet.run.clients import VirtualFleet, training_clients
from vitfleet.run.records import Accuracy, ClientRecord, HeadRecord
from vitfleet.run.round_plan import ClientPlan, plans_on_clock
from vitfleet.run.state import RunState
from vitfleet.wire import encode

if TYPE_CHECKING:
    from vitfleet.run.context import RunContext


CLIENT_HEADS = "client-heads/"  # prefix of the heads of single clients


@dataclass(frozen=True)
class HeadExchange:
    """How a run's head is solved.

    Attributes
    ----------
    solver
        The method ``closed-form``, with the keys of the table ``[head]``.
    cost_model
        The costs of its client side.
    virtual
        The clients' devices; ``None`` if the fleet has none.
    kind
        What clients are asked for.
    """

    solver: ClosedForm
    cost_model: CostModel
    virtual: VirtualFleet | None
    kind: RequestKind = "head"


def solve_head(
    context: RunContext, state: RunState, accuracy_before: Accuracy | None, progress: Progress
) -> tuple[RunState, HeadRecord]:
    """Ask all clients for what the head is solved from, solve it, and return the run's state with it."""
    exchange = context.head
    assert exchange is not None
    body = context.method.model_weights(state.server, context.base.tensors, None)
    solver_state = exchange.solver.initial_state(body)
    solver_state = replace(solver_state, tensors={**solver_state.tensors, **state.head_sums.tensors})
    plans, now = _plan(context, exchange, state, solver_state, body)
    aggregator = exchange.solver.aggregator(solver_state, _round_of_images(context, state))
    entries, accepted, lost_state, own_sums = _collect(context, exchange, state, plans, body, aggregator, progress)
    server, solution, sums = state.server, State(), state.head_sums
    minimum = context.config.fleet.min_replies
    if len(accepted) >= minimum:
        solution = _solve(context, exchange.solver, aggregator, own_sums)
        head = context.method.parts.head.take(solution.tensors)
        if context.config.data.tasks is not None:
            head = _rows_of_task(context, state, body, head)
            sums = _kept_sums(context, solution)
        server = context.method.with_head(server, head, state.round)
        server = context.method.with_client_heads(server, with_numbers(solution.tensors, CLIENT_HEADS))
        entries = [entry.rejected(aggregator.rejected.get(entry.client)) for entry in entries]
    else:
        reason = f"set aside: usable replies are {len(accepted)}, and fleet.min_replies = {minimum}"
        entries = [entry.rejected(reason) for entry in entries]
    known = {client: NO_ROUND for client in accepted if client not in state.last_seen}
    state = replace(
        state,
        server=server,
        head_sums=sums,
        total_up_bytes=state.total_up_bytes + sum(entry.up_bytes for entry in entries),
        total_down_bytes=state.total_down_bytes + sum(entry.down_bytes for entry in entries),
        last_seen={client: last for client, last in {**known, **state.last_seen}.items() if client not in lost_state},
        client_metrics={client: told for client, told in state.client_metrics.items() if client not in lost_state},
        in_flight=replace(state.in_flight, now=now),
    )
    chosen = {name: number for name, number in solution.numbers.items() if not isinstance(number, list)}
    return state, HeadRecord(entries, chosen, accuracy_before)


def _round_of_images(context: RunContext, state: RunState) -> int:
    """Return the round whose images the head is solved from: on tasks the next one, with which a task begins."""
    return state.round if context.config.data.tasks is None else state.round + 1


def _kept_sums(context: RunContext, solution: State) -> State:
    """Return what the heads of later tasks are solved from too: not where clients still have their earlier images."""
    if context.method.accumulates_tasks:
        return State()
    return State({name: tensor for name, tensor in solution.tensors.items() if name.startswith((SUMS, CLIENT_MEANS))})


def _rows_of_task(context: RunContext, state: RunState, before: Tensors, solved: Tensors) -> dict[str, Tensor]:
    """Return the head in which the rows of the new task's classes are the solved ones, and all others are kept.

    Features keep the shift and the scale of the first task; rows that are solved later are written for these.
    """
    (weight_name, bias_name), tasks = context.net.linear_head, context.config.data.tasks
    assert tasks is not None
    weight, bias = solved[weight_name], solved[bias_name]
    head = {name: before[name] for name in context.method.parts.head}
    if SHIFT in head:
        if state.round:
            slopes = weight * solved[SCALE]
            bias = bias + slopes @ (before[SHIFT] - solved[SHIFT])
            weight = slopes / before[SCALE]
        else:
            head |= {SHIFT: solved[SHIFT], SCALE: solved[SCALE]}
    task = draw_task_order(tasks, context.config.seed, client=0)[tasks.task_index(state.round + 1)]
    is_new = torch.tensor(context.method.context.class_to_task, device=bias.device) == int(task)
    is_new &= solved[weight_name].any(dim=1)  # a class of which nobody had an image has no weights
    return head | {
        weight_name: torch.where(is_new[:, None], weight, before[weight_name]),
        bias_name: torch.where(is_new, bias, before[bias_name]),
    }


def solve_last_head(
    context: RunContext, state: RunState, accuracy_before: Accuracy | None, progress: Progress
) -> tuple[RunState, HeadRecord]:
    """Solve the head that the run ends with, where that is not the one that trained (``[head.last]``).

    It is beside the server's state, which stays as it is: the run can go on from there.
    """
    last = context.last
    assert last is not None
    body = context.method.model_weights(state.server, context.base.tensors, None)
    server = last.method.with_head(state.server, unsolved_head(last.net, body), state.round)
    solved, record = solve_head(last, replace(state, server=server), accuracy_before, progress)
    is_solved = solved.server is not server
    head = State(last.method.parts.head.take(solved.server.tensors)) if is_solved else State()
    return replace(solved, server=state.server, last_head=head), record


def body_message(method: Method[Any], body: Tensors, base: Tensors) -> Message:
    """Return what a client needs besides the initial broadcast to compute features, as it is sent: what is not in that.

    That is the body, and what of the head no optimiser trains: the shift and the scale of its features.
    """
    parts = method.parts
    needed = [*parts.body, *(name for name in parts.head if name not in parts.parameters)]
    sent = method.to_wire(Message({name: body[name] for name in needed})).tensors
    known = method.to_wire(Message(base)).tensors
    return Message({name: weight for name, weight in sent.items() if not _same(known.get(name), weight)})


def _same(known: Tensor | None, weight: Tensor) -> bool:
    return known is weight or (known is not None and (weight.is_meta or torch.equal(known, weight)))


def _plan(
    context: RunContext, exchange: HeadExchange, state: RunState, solver_state: State, body: Tensors
) -> tuple[list[ClientPlan], float]:
    """Return each client's part, and the time on the virtual clock at which the last one has replied."""
    round, base_bytes = _round_of_images(context, state), message_size(context.method.to_wire(context.base))
    shared = body_message(context.method, body, context.base.tensors).tensors
    plans = []
    for client in training_clients(context.config):
        asked = exchange.solver.message_to_client(solver_state, round, client, None)
        message = Message({**shared, **context.method.to_wire(asked).tensors}, asked.numbers)
        last_round = state.last_seen.get(client)
        down_bytes = message_size(message) + (base_bytes if last_round is None else 0)
        plans.append(ClientPlan(client, message, down_bytes, last_round))
    now = state.in_flight.now
    if exchange.virtual is None:
        return plans, now
    return plans_on_clock(exchange.virtual, plans, round, now, len(plans), {}, "computing features")


def _collect(
    context: RunContext,
    exchange: HeadExchange,
    state: RunState,
    plans: Sequence[ClientPlan],
    body: Tensors,
    aggregator: Aggregator,
    progress: Progress,
) -> tuple[list[ClientRecord], list[int], list[int], dict[int, Sums]]:
    """Return every client's record, the clients whose update counts, those that have lost their state, and sums.

    The sums are those of single clients, where their own images count more for their heads.
    """
    asked = {plan.client: plan for plan in plans if plan.failure is None}
    entries = {plan.client: plan.record(failure=plan.failure) for plan in plans}
    accepted, lost_state, own_sums = list[int](), list[int](), dict[int, Sums]()
    weighted = context.config.head.own_weight != 1
    round = _round_of_images(context, state)
    task_index = context.config.task_index(round)
    requests = (
        Request(round, plan.client, plan.message, task_index=task_index, last_round=plan.last_round, kind=exchange.kind)
        for plan in asked.values()
    )
    with progress.task("the head: clients", len(asked)) as advance:
        for reply in in_request_order(context.fleet.train(requests), asked):
            advance(1)
            entry = _take_reply(context, exchange, round, asked[reply.client], reply, aggregator)
            entries[reply.client] = entry
            if entry.failure is None:
                accepted.append(reply.client)
                if weighted and reply.message is not None and reply.message.tensors:
                    own_sums[reply.client] = exchange.solver.received(reply.message, body)[0]
            if reply.state_lost:
                lost_state.append(reply.client)
            del reply
    context.fleet.commit(())  # no client's state changes
    return list(entries.values()), accepted, lost_state, own_sums


def _take_reply(
    context: RunContext, exchange: HeadExchange, round: int, plan: ClientPlan, reply: Reply, aggregator: Aggregator
) -> ClientRecord:
    """Add what a client sent to the aggregator and return the client's record."""
    if reply.message is None:
        return (plan if reply.sent else replace(plan, down_bytes=0)).record(failure=reply.failure or "no reply")
    up_bytes = message_size(reply.message)
    try:
        numbers = parse_numbers(reply.message.numbers, exchange.solver)
        aggregator.add(plan.client, reply.message)
    except RejectedUpdateError as error:
        return plan.record(up_bytes, failure=printable(str(error)))
    return plan.record(up_bytes, numbers=numbers, gflops=_gflops(context, exchange, plan.client, round, numbers))


def _gflops(context: RunContext, exchange: HeadExchange, client: int, round: int, numbers: Numbers) -> float | None:
    """Return the operations of a client's passes, in billions; ``None`` if its samples are unknown."""
    samples = numbers.get("samples")
    if not isinstance(samples, int):
        return None
    dry_run_result = exchange.cost_model.dry_run(1, client, context.labels(client, round))
    return exchange.cost_model.round_flops(dry_run_result, samples) / 1e9


def _solve(context: RunContext, solver: ClosedForm, aggregator: Aggregator, own_sums: Mapping[int, Sums]) -> State:
    """Return the solved head, the heads of single clients, and what was chosen.

    Of several processes the first solves and sends the result.
    """
    processes = context.processes
    if not processes.is_first:
        received = processes.broadcast_payload(State, None, context.machine.device)
        assert received is not None
        return received
    state = aggregator.finish()
    heads = add_numbers(CLIENT_HEADS, _client_heads(context, solver, state, own_sums))
    solution = State({**context.method.parts.head.take(state.tensors), **heads}, state.numbers)
    if processes.size > 1:
        processes.broadcast(encode(solution))
    return replace(solution, tensors={**state.tensors, **heads})  # with the sums: only this process solves again


def _client_heads(
    context: RunContext, solver: ClosedForm, solved: State, own_sums: Mapping[int, Sums]
) -> dict[int, Tensors]:
    """Return a head for each client in whose sums its own images count more often than those of others."""
    total = sums_of_state(solved.tensors, solver.context.num_classes)
    if total is None:
        return {}
    more = context.config.head.own_weight - 1
    return {client: solver.solve(total + own.times(more)) for client, own in own_sums.items()}
