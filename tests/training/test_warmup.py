"""What makes a step ready is shown while it lasts, and timed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from conftest import MakeShard, MakeTrainer
from vitfleet.models.net import Net
from vitfleet.progress import Advance
from vitfleet.training.cohort_inputs import RngContext
from vitfleet.training.objective import Fit, Objective
from vitfleet.training.warmup import WarmupTimer


class Listener:
    def __init__(self) -> None:
        self.last_seen: list[str] = []

    @contextmanager
    def task(self, label: str, total: int) -> Iterator[Advance]:
        self.last_seen.append(label)
        yield lambda units: None


def test_only_the_first_of_a_kind_is_shown_and_seconds_are_told_once() -> None:
    warmup, listener = WarmupTimer(), Listener()
    warmup.progress = listener
    assert warmup.pop_seconds() == 0
    for kind in ("large", "large", "small", "large"):
        with warmup.time_first("compiling", kind):
            pass
    assert listener.last_seen == ["compiling"] * 2
    assert warmup.pop_seconds() > 0
    assert warmup.pop_seconds() == 0


@pytest.mark.parametrize("compiled", [True, False])
def test_a_model_that_is_compiled_says_so_once_a_form(
    compiled: bool, tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)
    trainer = make_trainer(batch_size=8)
    trainer = replace(trainer, machine=replace(trainer.machine, compile=compiled))
    listener = Listener()
    trainer.runners.warmup.progress = listener
    fit = Fit(tiny_net.initial_weights(), Objective(tiny_net.anatomy.whole), 2)
    for round in (1, 2):
        trainer.fit(fit, make_shard(0, 20), RngContext(0, round, 0))  # steps of 8, 8 and 4
    assert listener.last_seen == (["compiling the model"] * 2 if compiled else [])
