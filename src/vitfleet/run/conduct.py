"""The round loop: choose clients, send, gather, evaluate, record, checkpoint."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from safetensors.torch import save

from vitfleet.config.schema import Config
from vitfleet.files import write_atomically
from vitfleet.fleet.base import Request, in_order
from vitfleet.message import Message, State
from vitfleet.methods.base import Gathering, RefusalError
from vitfleet.progress import SILENCE, Progress
from vitfleet.randomness import Address, Purpose
from vitfleet.run import continual
from vitfleet.run.curves import Curves
from vitfleet.run.records import Accuracy, ClientRecord, LineFile, RoundRecord, summarize
from vitfleet.run.session import Session
from vitfleet.train.optim import learning_rate
from vitfleet.wire import encoded_size


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
    curves = Curves(folder, session.round + 1)
    try:
        for round in range(session.round + 1, config.rounds + 1):
            started = time.perf_counter()
            record = play_round(session, round, progress)
            seconds = time.perf_counter() - started
            records.append(record.line())
            timings.append(json.dumps({"round": round, "seconds": seconds}))
            curves.add(record)
            if round % config.machine.checkpoint_every == 0 or round == config.rounds:
                session.checkpoints.commit(
                    round,
                    session.server,
                    session.fleet.changed(),
                    session.heard,
                    (records.length(), timings.length()),
                    (session.total_up_bytes, session.total_down_bytes),
                )
                if session.method.file_backed:
                    session.server = session.checkpoints.mapped(session.server)
            listener.round_done(record, seconds)
    finally:
        records.close()
        timings.close()
        curves.close()
    _save_model(session)
    return summarize(folder, config, session.costs(), continual.summary(folder, config))


def play_round(session: Session, round: int, progress: Progress = SILENCE) -> RoundRecord:
    """Play one round and move the session on to its end."""
    config, method, server = session.config, session.method, session.server
    clients = choose_clients(config, round)
    due = round % config.eval.every == 0 or round == config.rounds
    down_bytes: dict[int, int] = {}

    def requests() -> Iterator[Request]:
        for client in clients:
            since = session.heard.get(client)
            down = method.instruct(server, round, client, since)
            down_bytes[client] = _size(down) + (_size(session.base) if since is None else 0)
            yield Request(round, client, down, due, config.stage(round), since)

    gathering = method.gather(server, round)
    entries: list[ClientRecord] = []
    taken: list[int] = []
    with progress.task(f"round {round}: clients", len(clients)) as advance:
        for reply in in_order(session.fleet.ask(requests()), clients):
            advance(1)
            down = down_bytes.get(reply.client, 0)  # a fleet may give up before it asked
            if reply.lost:
                session.heard.pop(reply.client, None)
            if reply.up is None:
                entries.append(ClientRecord(reply.client, down, 0, failure=reply.failure or "no reply"))
                continue
            try:
                gathering.add(reply.client, reply.up)
            except RefusalError as refused:
                entries.append(ClientRecord(reply.client, down, _size(reply.up), failure=str(refused)))
                continue
            taken.append(reply.client)
            right, tested = (reply.verdict.right, reply.verdict.tested) if reply.verdict else (None, None)
            entries.append(ClientRecord(reply.client, down, _size(reply.up), dict(reply.up.numbers), right, tested))
            del reply  # before the next one comes
    session.server, set_aside = _close(session, gathering, round, taken)
    session.heard |= {client: round for client in taken if client not in set_aside}
    entries = [_without(entry, set_aside.get(entry.client)) for entry in entries]
    session.round = round
    session.total_up_bytes += sum(entry.up_bytes for entry in entries)
    session.total_down_bytes += sum(entry.down_bytes for entry in entries)
    return RoundRecord(
        round,
        learning_rate(config.train, round, config.schedule_rounds),
        _mean_loss(entries),
        _accuracy(session, round, entries) if due else None,
        entries,
        session.total_up_bytes,
        session.total_down_bytes,
        continual.after_round(session, round, progress),
    )


def _close(session: Session, gathering: Gathering, round: int, taken: list[int]) -> tuple[State, Mapping[int, str]]:
    """Return the server's state after a round, and the replies that were set aside in the end, with the reason."""
    minimum = session.config.fleet.min_replies
    if len(taken) < minimum:
        reason = f"set aside: usable replies are {len(taken)}, and fleet.min_replies = {minimum}"
        return session.server, dict.fromkeys(taken, reason)
    state = gathering.finish()
    return session.refine(state, round), gathering.refused


def _without(entry: ClientRecord, reason: str | None) -> ClientRecord:
    """Return a client's record as that of a failure, if its reply was set aside."""
    return entry if reason is None else ClientRecord(entry.client, entry.down_bytes, entry.up_bytes, failure=reason)


def choose_clients(config: Config, round: int) -> list[int]:
    """Draw a round's clients, without replacement, in ascending order."""
    rng = Address(config.seed, Purpose.SAMPLE_CLIENTS, round).generator()
    chosen = rng.choice(config.fleet.clients, config.fleet.per_round + config.fleet.spare, replace=False)
    return [int(client) for client in np.sort(chosen)]


def _size(message: Message) -> int:
    """Return a message's bytes on the wire; one with nothing in it is not sent."""
    return encoded_size(message) if message.tensors or message.numbers else 0


def _mean_loss(entries: list[ClientRecord]) -> float | None:
    told = [entry.numbers for entry in entries if entry.numbers.get("samples")]
    samples = sum(_number(numbers["samples"]) for numbers in told)
    if not samples:
        return None
    return sum(_number(numbers["samples"]) * _number(numbers["loss"]) for numbers in told) / samples


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)


def _accuracy(session: Session, round: int, entries: list[ClientRecord]) -> Accuracy:
    at_home = [entry.accuracy for entry in entries if entry.accuracy is not None]
    local = sum(at_home) / len(at_home) if at_home else None
    if session.config.data.tasks:
        return Accuracy(None, None, 0, local)
    common = session.evaluator.common(session.method, round, session.server, session.base.tensors, session.fleet.own)
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
    tensors = {name: weights[name].detach().cpu().contiguous() for name in session.net.anatomy.shapes}
    # One key of metadata: the format does not keep the order of several, and equal models shall be equal bytes.
    write_atomically(session.folder / "model.safetensors", save(tensors, {"vitfleet": json.dumps(about)}))
