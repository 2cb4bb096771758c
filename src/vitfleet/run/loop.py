"""The round loop: choose clients, send, gather, evaluate, record, checkpoint."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

from vitfleet.config.schema import Config
from vitfleet.costs.flops import message_size
from vitfleet.files import write_atomically
from vitfleet.fleet.base import EvalResult, Request, in_request_order
from vitfleet.message import Number, State
from vitfleet.methods.base import Aggregator, Method, RejectedUpdateError
from vitfleet.progress import NO_PROGRESS, Progress
from vitfleet.run import continual
from vitfleet.run.context import RunContext
from vitfleet.run.records import Accuracy, ClientRecord, LineFile, RoundRecord, summarize
from vitfleet.run.round_plan import ClientPlan, InFlight
from vitfleet.run.trackers import Trackers
from vitfleet.train.optim import learning_rate
from vitfleet.wire import safetensors_chunks


class Listener(Protocol):
    """Somebody who wants to hear of each round."""

    def round_done(self, record: RoundRecord, seconds: float) -> None:
        """Hear of a finished round."""
        ...


def run_rounds(context: RunContext, listener: Listener, progress: Progress = NO_PROGRESS) -> dict[str, Any]:
    """Run a session's remaining rounds and return its summary, showing progress within each round.

    Killed at any moment, the run goes on from its last checkpoint as if nothing had happened.
    """
    config, folder = context.config, context.folder
    latest = context.checkpoints.latest
    records = LineFile(folder / "records.jsonl", latest.records_length if latest else 0)
    timings = LineFile(folder / "timings.jsonl", latest.timings_length if latest else 0)
    trackers = Trackers(config, folder, context.round + 1)
    warmup = context.trainer.runners.warmup
    warmup.progress = progress
    # What is there now stays until the end: without this, a full collection goes through half a million objects, which
    # takes as long as a round does on a GPU.
    gc.freeze()
    try:
        for round in range(context.round + 1, config.rounds + 1):
            started = time.perf_counter()
            record = run_round(context, round, progress)
            seconds = time.perf_counter() - started
            records.append(record.line())
            timings.append(json.dumps({"round": round, "seconds": seconds, "warm_up_seconds": warmup.pop_seconds()}))
            trackers.add(record)
            if _checkpoint_due(config, round):
                context.processes.barrier()  # until nobody reads the checkpoint before
                context.checkpoints.commit(
                    round,
                    context.traffic.pack(context.server),
                    context.fleet.changed_states(),
                    context.last_seen,
                    (records.length(), timings.length()),
                    (context.total_up_bytes, context.total_down_bytes),
                )
                if not context.overlaps:
                    context.checkpoints.wait()
                context.processes.barrier()
                _map_parts(context)
            listener.round_done(record, seconds)
    finally:
        gc.unfreeze()
        records.close()
        timings.close()
        trackers.close()
        context.checkpoints.wait()
    _save_model(context)
    return summarize(folder, config, context.costs(), continual.summary(folder, config))


def follow(context: RunContext) -> None:
    """Play a session's remaining rounds on a rank that is not the first: that one alone judges and writes."""
    for round in range(context.round + 1, context.config.rounds + 1):
        run_round(context, round)
        if _checkpoint_due(context.config, round):
            context.fleet.changed_states()  # the first rank writes them
            context.processes.barrier()
            context.processes.barrier()  # now they are written
            context.checkpoints.reload()
            _map_parts(context)


def _map_parts(context: RunContext) -> None:
    """Let the parts of the server's state go from memory, where its method has them on disk."""
    if context.method.state_on_disk:
        context.server, _ = InFlight.unpack(context.checkpoints.mapped(context.server), context.traffic.now)


def _checkpoint_due(config: Config, round: int) -> bool:
    return round % config.machine.checkpoint_every == 0 or round == config.rounds


def run_round(context: RunContext, round: int, progress: Progress = NO_PROGRESS) -> RoundRecord:
    """Play one round and move the session on to its end."""
    config, server = context.config, context.server
    due = round % config.eval.every == 0 or round == config.rounds
    turns, traffic = context.planner.turns(server, context.last_seen, context.client_metrics, context.traffic, round)
    asked = {turn.client: turn for turn in turns if turn.failure is None}

    def requests() -> Iterator[Request]:
        for turn in asked.values():
            yield Request(round, turn.client, turn.message, due, config.task_index(round), turn.last_round)

    gathering = context.method.aggregator(server, round)
    entries = [_entry(turn, failure=turn.failure) for turn in turns if turn.failure is not None]
    taken: list[int] = []
    with progress.task(f"round {round}: clients", len(asked)) as advance:
        for reply in in_request_order(context.fleet.train(requests()), asked):
            advance(1)
            turn = asked[reply.client]
            if reply.state_lost:
                context.last_seen.pop(reply.client, None)
                context.client_metrics.pop(reply.client, None)
            if reply.message is None:
                entries.append(_entry(turn, failure=reply.failure or "no reply"))
                continue
            up_bytes, numbers = message_size(reply.message), dict(reply.message.numbers)
            try:
                gathering.add(reply.client, context.up_to_date(reply.message, turn))
            except RejectedUpdateError as refused:
                entries.append(_entry(turn, up_bytes, failure=str(refused)))
                continue
            taken.append(reply.client)
            gflops = context.gflops(round, reply.client, numbers)
            entries.append(_entry(turn, up_bytes, numbers, evaluation=reply.evaluation, gflops=gflops))
            del reply  # before the next one comes
    context.server, set_aside = _close(context, gathering, round, taken, progress)
    used = [client for client in taken if client not in set_aside]
    context.fleet.commit(used)
    context.last_seen |= dict.fromkeys(used, round)
    context.client_metrics |= {entry.client: entry.numbers for entry in entries if entry.client in used}
    entries = sorted((_without(entry, set_aside.get(entry.client)) for entry in entries), key=lambda one: one.client)
    context.round = round
    context.traffic = traffic
    context.total_up_bytes += sum(entry.up_bytes for entry in entries)
    context.total_down_bytes += sum(entry.down_bytes for entry in entries)
    return RoundRecord(
        round,
        learning_rate(config.train, round, config.schedule_rounds),
        _mean_loss(entries),
        _accuracy(context, round, entries, progress) if due and context.processes.is_first else None,
        entries,
        context.total_up_bytes,
        context.total_down_bytes,
        continual.after_round(context, round, progress) if context.processes.is_first else None,
        traffic.now if context.planner.virtual is not None else None,
    )


def _close(
    context: RunContext, gathering: Aggregator, round: int, taken: list[int], progress: Progress
) -> tuple[State, Mapping[int, str]]:
    """Return the server's state after a round, and the replies that were set aside in the end, with the reason."""
    minimum = context.config.fleet.min_replies
    if len(taken) < minimum:
        reason = f"set aside: usable replies are {len(taken)}, and fleet.min_replies = {minimum}"
        return context.server, dict.fromkeys(taken, reason)
    state = gathering.finish()
    trains = type(context.method).server_update is not Method.server_update
    with (progress if trains else NO_PROGRESS).task(f"round {round}: the server trains", 1):
        return context.server_update(state, round), gathering.rejected


def _without(entry: ClientRecord, reason: str | None) -> ClientRecord:
    """Return a client's record as that of a failure, if its reply was set aside."""
    return (
        entry if reason is None else replace(entry, numbers={}, correct=None, tested=None, gflops=None, failure=reason)
    )


def _entry(
    turn: ClientPlan,
    up_bytes: int = 0,
    numbers: dict[str, Number] | None = None,
    evaluation: EvalResult | None = None,
    failure: str | None = None,
    gflops: float | None = None,
) -> ClientRecord:
    correct, tested = (evaluation.correct, evaluation.tested) if evaluation else (None, None)
    times = turn.began, turn.ended
    return ClientRecord(turn.client, turn.down_bytes, up_bytes, numbers or {}, correct, tested, failure, gflops, *times)


def _mean_loss(entries: list[ClientRecord]) -> float | None:
    told = [entry.numbers for entry in entries if entry.numbers.get("samples")]
    samples = sum(_number(numbers["samples"]) for numbers in told)
    if not samples:
        return None
    return sum(_number(numbers["samples"]) * _number(numbers["loss"]) for numbers in told) / samples


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)


def _accuracy(context: RunContext, round: int, entries: list[ClientRecord], progress: Progress) -> Accuracy:
    at_home = [entry.accuracy for entry in entries if entry.accuracy is not None]
    local = sum(at_home) / len(at_home) if at_home else None
    if context.config.data.tasks:
        return Accuracy(None, None, 0, local)
    common = context.evaluator.evaluate_global(
        context.method, round, context.server, context.base.tensors, context.fleet.client_state, progress
    )
    return Accuracy(*common, local)


def _save_model(context: RunContext) -> None:
    """Write the global model, under timm's names, for whoever wants to use it."""
    if not context.method.has_global_model:
        return
    weights = context.method.model_weights(context.server, context.base.tensors, None)
    about = {
        "model": context.config.model.name,
        "classes": context.data.classes,
        "rounds": context.round,
        "sizes": context.config.model.model_dump(exclude={"name", "weights"}),
        "input": {"channels": context.data.train.channels, "side": context.net.image_size},
        "normalisation": {"mean": context.net.mean, "std": context.net.std},
    }
    tensors = {name: weights[name] for name in context.net.anatomy.shapes}
    write_atomically(context.folder / "model.safetensors", safetensors_chunks(tensors, {"vitfleet": json.dumps(about)}))
