"""What a client reports is parsed before a round uses it, and no round leaves anything behind in what it was given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_messages import MUTATED, ROUND, GivenReplies, opened

from vitfleet.fleet.base import Reply
from vitfleet.message import Message
from vitfleet.run.round import run_round

LAST_OF_A_TASK = 4


def reporting(replies: list[Reply], **numbers: Any) -> list[Reply]:
    """Return replies of which one reports something else."""
    message = next(reply.message for reply in replies if reply.client == MUTATED)
    assert message is not None
    changed = Reply(MUTATED, Message(message.tensors, {**message.numbers, **numbers}))
    return [changed if reply.client == MUTATED else reply for reply in replies]


@pytest.mark.parametrize("name", ["fedvit", "gem"])
def test_a_round_refuses_what_cannot_be_and_goes_on(name: str, tmp_path: Path) -> None:
    context, state, honest = opened(name, tmp_path)
    wrong: dict[str, Any] = {"stored": [3, 3, 3, 3], "memory_bytes": [70], "samples": 0.5}
    for key, value in wrong.items():
        replies = reporting(honest, **{key: value})
        after, record = run_round(replace(context, fleet=GivenReplies(context.fleet, replies)), state, ROUND)
        failures = {entry.client: entry.failure for entry in record.clients if entry.failure is not None}
        assert set(failures) == {MUTATED}
        assert key in failures[MUTATED]
        assert MUTATED not in after.client_metrics or after.client_metrics[MUTATED].get(key) != value


def test_a_round_that_is_tried_again_finds_the_tasks_as_they_were(tmp_path: Path) -> None:
    context, state, _ = opened("fedvit", tmp_path)
    state, _ = run_round(context, state, ROUND)
    for _ in range(3):
        after, record = run_round(context, state, LAST_OF_A_TASK)
        assert record.task is not None
        assert (record.task.task, len(after.task_records), len(state.task_records)) == (2, 2, 1)
