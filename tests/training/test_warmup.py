"""Warm-ups of steps are shown while they last, and timed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from conftest import MakeShard, MakeTrainer
from vitfleet.models.net import Net
from vitfleet.progress import Advance
from vitfleet.training.capture.path import WarmupTimer
from vitfleet.training.local_training import LocalTraining
from vitfleet.training.stacking.inputs import RngContext


class RecordingProgress:
    def __init__(self) -> None:
        self.labels: list[str] = []

    @contextmanager
    def task(self, label: str, total: int) -> Iterator[Advance]:
        self.labels.append(label)
        yield lambda units: None


def test_warmup_timer_times_the_first_of_a_key_and_pops_its_seconds() -> None:
    warmup, progress = WarmupTimer(), RecordingProgress()
    warmup.progress = progress
    assert warmup.pop_seconds() == 0
    for key in ("large", "large", "small", "large"):
        with warmup.time_first("compiling", key):
            pass
    assert progress.labels == ["compiling"] * 2
    assert warmup.pop_seconds() > 0
    assert warmup.pop_seconds() == 0


@pytest.mark.parametrize("compiled", [True, False])
def test_compilation_is_shown_once(
    compiled: bool, tiny_net: Net, make_trainer: MakeTrainer, make_shard: MakeShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    trainer = make_trainer(batch_size=8)
    trainer = replace(trainer, machine=replace(trainer.machine, compile=compiled))
    progress = RecordingProgress()
    trainer.runners.warmup.progress = progress
    training = LocalTraining(tiny_net.initial_weights(), tiny_net.parts.whole, 2)
    for round in (1, 2):
        trainer.train(training, make_shard(0, 20), RngContext(0, round, 0))  # steps of 8, 8 and 4
    assert progress.labels == (["compiling the model"] if compiled else [])
