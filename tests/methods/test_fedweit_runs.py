"""Runs of FedWEIT: configurations that are rejected, stacked clients, and the bytes of their messages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conftest import MakeConfig
from vitfleet.config import load_config
from vitfleet.errors import UserError
from vitfleet.run.context import load_state
from vitfleet.run.round import run_round
from vitfleet.run.setup import open_run

TINY = (
    "method.name=fedweit",
    "data.tasks.rounds_per_task=2",
    "model.dim=16",
    "model.depth=2",
    "model.heads=2",
    "model.patch_size=4",
    "train.epochs=1",
    "fleet.clients=4",
    "fleet.per_round=3",
    "machine.device=cpu",
)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.tasks.scenario=class", r"data\.tasks\.scenario = 'class': must be task"),
        (
            "fleet.schedule.kind=buffered fleet.schedule.concurrency=3",
            r"fleet\.schedule\.kind = 'buffered': must be another one",
        ),
    ],
)
def test_configurations_that_it_cannot_run_are_rejected(override: str, message: str, tiny_config: MakeConfig) -> None:
    tasks = "data.tasks.count=3", "data.tasks.classes=2", "data.tasks.per_client=[1,2]", "data.tasks.rounds_per_task=1"
    with pytest.raises(UserError, match=message):
        tiny_config("method.name=fedweit", *tasks, "fleet.devices.nano=6", *override.split())
    with pytest.raises(UserError, match="learns task after task"):
        tiny_config("method.name=fedweit")


def test_clients_train_stacked_as_alone_and_records_have_the_bytes_of_their_messages(tmp_path: Path) -> None:
    """Clients that missed a task, with other numbers of earlier tasks and of others' adaptive weights."""
    keys = *TINY, "train.optimizer=sgd", "train.lr=0.05", "method.drift_weight=1"
    configs = {size: load_config("fedvit-digits", [*keys, f"machine.stack_size={size}"]) for size in (1, 3)}
    alone, together = (open_run(config, tmp_path / str(size)) for size, config in configs.items())
    state, other = load_state(alone), load_state(together)
    body = 4 * alone.net.anatomy.count_parameters(alone.net.anatomy.body)
    sent: dict[int, list[tuple[int, int]]] = {}  # of each client, the tasks of its updates and the adaptive weights
    for round in range(1, 6):
        state, record = run_round(alone, state, round)
        other, other_record = run_round(together, other, round)
        assert not [entry.failure for entry in (*record.clients, *other_record.clients) if entry.failure]
        task, before = (round - 1) // 2, {client: list(updates) for client, updates in sent.items()}
        for entry in record.clients:
            kept = int(str(entry.numbers["adaptive_kept"]))
            own = sent.setdefault(entry.client, [])
            known = bool(own) and own[-1][0] == task
            others = [
                [count for earlier, count in updates if earlier < task][-1:]
                for client, updates in before.items()
                if client != entry.client and not known
            ]
            expected = body + 8 * sum(sum(counts) for counts in others)
            base = 0 if own else alone.net.anatomy.count_parameters(alone.net.anatomy.head) * 4
            header = 150 * (len(alone.net.anatomy.whole) + 2 * len(others) + 2)
            assert expected + base <= entry.down_bytes <= expected + base + header
            assert body + 8 * kept <= entry.up_bytes <= body + 8 * kept + header
            own.append((task, kept))
    assert max(entry.numbers["past_tasks"] for entry in record.clients) == 2
    assert any(entry.numbers["adaptive_received"] == 3 for entry in record.clients)
    for name, tensor in state.server.tensors.items():
        torch.testing.assert_close(other.server.tensors[name], tensor, rtol=1e-3, atol=1e-4)
    for client in range(4):
        mine, theirs = alone.fleet.client_state(client), together.fleet.client_state(client)
        assert mine is not None
        assert theirs is not None
        for name, tensor in mine.tensors.items():
            if not name.startswith("knowledge."):  # a value at the threshold is sent by one of them alone
                assert float((theirs.tensors[name] - tensor).norm()) <= 1e-3 * float(tensor.norm()) + 1e-4, name
