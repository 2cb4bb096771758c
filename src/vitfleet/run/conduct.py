"""The round loop: choose clients, send, gather, evaluate, record, checkpoint."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

from vitfleet.config.schema import Config
from vitfleet.files import write_atomically
from vitfleet.fleet.base import Request, Verdict, in_order
from vitfleet.message import Number, State
from vitfleet.methods.base import Gathering, Method, RefusalError
from vitfleet.progress import SILENCE, Progress
from vitfleet.run import continual
from vitfleet.run.costs import message_size
from vitfleet.run.curves import Curves
from vitfleet.run.dispatch import Traffic, Turn
from vitfleet.run.records import Accuracy, ClientRecord, LineFile, RoundRecord, summarize
from vitfleet.run.session import Session
from vitfleet.train.optim import learning_rate
from vitfleet.wire import lay_out


class Listener(Protocol):
    """Somebody who wants to hear of each round."""

    def round_done(self, record: RoundRecord, seconds: float) -> None:
        """Hear of a finished round."""
        ...


def conduct(session: Session, listener: Listener, progress: Progress = SILENCE) -> dict[str, Any]:
    """Run a session's remaining rounds and return its summary, showing progress within each round.

    Killed at any moment, the run goes on from its last checkpoint as if nothing had happened.
    """
    config, folder = session.config, session.folder
    latest = session.checkpoints.latest
    records = LineFile(folder / "records.jsonl", latest.records_length if latest else 0)
    timings = LineFile(folder / "timings.jsonl", latest.timings_length if latest else 0)
    curves = Curves(config, folder, session.round + 1)
    warmth = session.trainer.courses.warmth
    warmth.progress = progress
    # What is there now stays until the end: without this, a full collection goes through half a million objects, which
    # takes as long as a round does on a GPU.
    gc.freeze()
    try:
        for round in range(session.round + 1, config.rounds + 1):
            started = time.perf_counter()
            record = play_round(session, round, progress)
            seconds = time.perf_counter() - started
            records.append(record.line())
            timings.append(json.dumps({"round": round, "seconds": seconds, "warm_up_seconds": warmth.taken()}))
            curves.add(record)
            if _checkpoint_due(config, round):
                session.ranks.wait()  # until nobody reads the checkpoint before
                session.checkpoints.commit(
                    round,
                    session.traffic.pack(session.server),
                    session.fleet.changed(),
                    session.heard,
                    (records.length(), timings.length()),
                    (session.total_up_bytes, session.total_down_bytes),
                )
                if not session.overlaps:
                    session.checkpoints.wait()
                session.ranks.wait()
                _map_parts(session)
            listener.round_done(record, seconds)
    finally:
        gc.unfreeze()
        records.close()
        timings.close()
        curves.close()
        session.checkpoints.wait()
    _save_model(session)
    return summarize(folder, config, session.costs(), continual.summary(folder, config))


def follow(session: Session) -> None:
    """Play a session's remaining rounds on a rank that is not the first: that one alone judges and writes."""
    for round in range(session.round + 1, session.config.rounds + 1):
        play_round(session, round)
        if _checkpoint_due(session.config, round):
            session.fleet.changed()  # the first rank writes them; here they are let go, and read back when needed
            session.ranks.wait()
            session.ranks.wait()  # now they are written
            session.checkpoints.reload()
            _map_parts(session)


def _map_parts(session: Session) -> None:
    """Let the parts of the server's state go from memory, where its method has them on disk."""
    if session.method.file_backed:
        session.server, _ = Traffic.unpack(session.checkpoints.mapped(session.server), session.traffic.now)


def _checkpoint_due(config: Config, round: int) -> bool:
    return round % config.machine.checkpoint_every == 0 or round == config.rounds


def play_round(session: Session, round: int, progress: Progress = SILENCE) -> RoundRecord:
    """Play one round and move the session on to its end."""
    config, server = session.config, session.server
    due = round % config.eval.every == 0 or round == config.rounds
    turns, traffic = session.dispatch.turns(server, session.heard, session.said, session.traffic, round)
    asked = {turn.client: turn for turn in turns if turn.failure is None}

    def requests() -> Iterator[Request]:
        for turn in asked.values():
            yield Request(round, turn.client, turn.down, due, config.stage(round), turn.since)

    gathering = session.method.gather(server, round)
    entries = [_entry(turn, failure=turn.failure) for turn in turns if turn.failure is not None]
    taken: list[int] = []
    with progress.task(f"round {round}: clients", len(asked)) as advance:
        for reply in in_order(session.fleet.ask(requests()), asked):
            advance(1)
            turn = asked[reply.client]
            if reply.lost:
                session.heard.pop(reply.client, None)
                session.said.pop(reply.client, None)
            if reply.up is None:
                entries.append(_entry(turn, failure=reply.failure or "no reply"))
                continue
            up_bytes, numbers = message_size(reply.up), dict(reply.up.numbers)
            try:
                gathering.add(reply.client, session.up_to_date(reply.up, turn))
            except RefusalError as refused:
                entries.append(_entry(turn, up_bytes, failure=str(refused)))
                continue
            taken.append(reply.client)
            gflops = session.gflops(round, reply.client, numbers)
            entries.append(_entry(turn, up_bytes, numbers, verdict=reply.verdict, gflops=gflops))
            del reply  # before the next one comes
    session.server, set_aside = _close(session, gathering, round, taken, progress)
    used = [client for client in taken if client not in set_aside]
    session.fleet.settle(used)
    session.heard |= dict.fromkeys(used, round)
    session.said |= {entry.client: entry.numbers for entry in entries if entry.client in used}
    entries = sorted((_without(entry, set_aside.get(entry.client)) for entry in entries), key=lambda one: one.client)
    session.round = round
    session.traffic = traffic
    session.total_up_bytes += sum(entry.up_bytes for entry in entries)
    session.total_down_bytes += sum(entry.down_bytes for entry in entries)
    return RoundRecord(
        round,
        learning_rate(config.train, round, config.schedule_rounds),
        _mean_loss(entries),
        _accuracy(session, round, entries, progress) if due and session.ranks.first else None,
        entries,
        session.total_up_bytes,
        session.total_down_bytes,
        continual.after_round(session, round, progress) if session.ranks.first else None,
        traffic.now if session.dispatch.virtual is not None else None,
    )


def _close(
    session: Session, gathering: Gathering, round: int, taken: list[int], progress: Progress
) -> tuple[State, Mapping[int, str]]:
    """Return the server's state after a round, and the replies that were set aside in the end, with the reason."""
    minimum = session.config.fleet.min_replies
    if len(taken) < minimum:
        reason = f"set aside: usable replies are {len(taken)}, and fleet.min_replies = {minimum}"
        return session.server, dict.fromkeys(taken, reason)
    state = gathering.finish()
    trains = type(session.method).refine is not Method.refine
    with (progress if trains else SILENCE).task(f"round {round}: the server trains", 1):
        return session.refine(state, round), gathering.refused


def _without(entry: ClientRecord, reason: str | None) -> ClientRecord:
    """Return a client's record as that of a failure, if its reply was set aside."""
    return entry if reason is None else replace(entry, numbers={}, right=None, tested=None, gflops=None, failure=reason)


def _entry(
    turn: Turn,
    up_bytes: int = 0,
    numbers: dict[str, Number] | None = None,
    verdict: Verdict | None = None,
    failure: str | None = None,
    gflops: float | None = None,
) -> ClientRecord:
    right, tested = (verdict.right, verdict.tested) if verdict else (None, None)
    times = turn.began, turn.ended
    return ClientRecord(turn.client, turn.down_bytes, up_bytes, numbers or {}, right, tested, failure, gflops, *times)


def _mean_loss(entries: list[ClientRecord]) -> float | None:
    told = [entry.numbers for entry in entries if entry.numbers.get("samples")]
    samples = sum(_number(numbers["samples"]) for numbers in told)
    if not samples:
        return None
    return sum(_number(numbers["samples"]) * _number(numbers["loss"]) for numbers in told) / samples


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)


def _accuracy(session: Session, round: int, entries: list[ClientRecord], progress: Progress) -> Accuracy:
    at_home = [entry.accuracy for entry in entries if entry.accuracy is not None]
    local = sum(at_home) / len(at_home) if at_home else None
    if session.config.data.tasks:
        return Accuracy(None, None, 0, local)
    common = session.evaluator.common(
        session.method, round, session.server, session.base.tensors, session.fleet.own, progress
    )
    return Accuracy(*common, local)


def _save_model(session: Session) -> None:
    """Write the global model, under timm's names, for whoever wants to use it."""
    if not session.method.has_global_model:
        return
    weights = session.method.model(session.server, session.base.tensors, None)
    about = {
        "model": session.config.model.name,
        "classes": session.data.classes,
        "rounds": session.round,
        "sizes": session.config.model.model_dump(exclude={"name", "weights"}),
        "input": {"channels": session.data.train.channels, "side": session.net.side},
        "normalisation": {"mean": session.net.mean, "std": session.net.std},
    }
    tensors = {name: weights[name] for name in session.net.anatomy.shapes}
    write_atomically(session.folder / "model.safetensors", lay_out(tensors, {"vitfleet": json.dumps(about)}))
