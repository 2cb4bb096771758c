"""What a method declares is what its trainings do; what a client keeps is what dry runs of its rounds say."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import MakeConfig, long_but
from vitfleet.config.registry import METHODS
from vitfleet.config.schema import Config, ModelConfig
from vitfleet.costs.cost_model import CostModel
from vitfleet.costs.flops import CountedModels, FlopCounter, StepPasses
from vitfleet.data.tasks import class_to_task
from vitfleet.message import Numbers, State, Tensors
from vitfleet.methods import MethodContext, Work, adapt_model, declared_work, make_method
from vitfleet.methods.averaging.fedavg import FedAvgParams, WeightAveraging
from vitfleet.methods.personal.shared_body import SharedBody
from vitfleet.models.zoo import build_model
from vitfleet.run.context import load_state
from vitfleet.run.round import run_round
from vitfleet.run.setup import open_run
from vitfleet.training.local_training import LocalTraining, SampleSet
from vitfleet.training.step import kind_of_step

CLASSES, TASKS, BATCH, EPOCHS = 6, 3, 4, 3
NEEDED = {"transfl": {"k": 1}, "eftvit": {"local_layers": 1}, "fedbfpt": {"local_layers": 2}}
VARIANTS: dict[str, dict[str, object]] = {
    "fedvit, tuned among tasks": {"name": "fedvit", "tune_epochs": 4, "tune_integrated": True, "k": 1, "rerank": 2},
    "fedvit, never tuned": {"name": "fedvit", "tune_epochs": 0, "head_epochs": 0},
    "fedknow, never tuned": {"name": "fedknow", "tune_epochs": 0},
    "fedbfpt, centred": {"name": "fedbfpt", "local_layers": 2, "center_features": True},
    "er, more draws": {"name": "er", "replays": 3},
    "der++, more draws": {"name": "der++", "replays": 2},
    "der": {"name": "der++", "beta": 0.0},
    "bcn, long game": {"name": "bcn", "ascent_steps": 4, "descent_steps": 3},
    "ewc, true labels": {"name": "ewc", "fisher_labels": "data"},
    "eftvit, features only": {"name": "eftvit", "local_layers": 1, "local_rounds": 0, "train_head": False},
}
TABLES = {**{name: {"name": name, **NEEDED.get(name, {})} for name in METHODS.names()}, **VARIANTS}


def make_cost_model(table: Mapping[str, object]) -> CostModel:
    """Return the cost model of a method on a tiny model."""
    tree: dict[str, object] = {
        "method": dict(table),
        "model": {"weights": "digits"},  # closed-form needs some; they are not loaded
        "train": {"epochs": EPOCHS, "batch_size": BATCH},
    }
    if METHODS[str(table["name"])].target.needs_tasks:
        tree["data"] = {"tasks": {"count": TASKS, "classes": 2, "per_client": [2, 2]}}
    config = Config.model_validate(tree)
    tasks = class_to_task(config.data.tasks, config.seed, CLASSES)
    model = ModelConfig(dim=16, depth=3, heads=2, patch_size=4)
    net = build_model(model, CLASSES, 1, 8, 0, partial(adapt_model, config.method, class_to_task=tasks))
    return CostModel(
        make_method(config.method, MethodContext(config, net, CLASSES, torch.device("cpu"))), net, config.train
    )


def images_per_step(training: LocalTraining) -> int:
    draws = sum(samples.draws for samples in training.sets.values())
    return (BATCH if training.train is None else training.train.batch_size) * (1 + draws)


def count_passes(trainings: list[LocalTraining], model: CostModel, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the most forward passes of one image in a step of any training."""
    found: list[int] = []
    passes = CountedModels.passes

    def spied(self: CountedModels, sets: Mapping[str, SampleSet]) -> StepPasses:
        found.extend(sum(flops.forward > 0 for flops in of_origin) for of_origin in self.per_sample.values())
        return passes(self, sets)

    with monkeypatch.context() as patch:
        patch.setattr(CountedModels, "passes", spied)
        counter = FlopCounter(model.net, model.train)
        for training in trainings:
            for index in range(4):
                counter.step(training, kind_of_step(training.step, index))
    return max(found)


@pytest.mark.parametrize("label", sorted(TABLES))
def test_what_is_declared_is_what_the_most_expensive_round_does(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_cost_model(TABLES[label])
    work = declared_work(model.method.context.config)
    labels = [np.arange(20, dtype=np.int64) % CLASSES] * model.method.context.num_tasks
    first, late = model.dry_run(1, 0, labels[0]), model.late_round(labels)
    assert sum(training.epochs for training in first.trainings) <= work.epochs
    assert sum(training.epochs for training in late.trainings) == work.epochs
    assert max(map(images_per_step, first.trainings)) <= work.images_per_step
    assert max(map(images_per_step, late.trainings)) == work.images_per_step
    assert count_passes(late.trainings, model, monkeypatch) == work.passes
    stored = late.update.message.numbers.get("stored", [0])
    assert isinstance(stored, list)
    assert stored[-1] == pytest.approx(work.stored_share * 20, abs=CLASSES)
    assert (stored[-1] > 0) == (work.stored_share > 0)


def test_a_plug_ins_method_declares_what_it_inherits() -> None:
    class Mine(WeightAveraging[FedAvgParams]):
        """A method that declares nothing."""

    config = Config.model_validate({"train": {"epochs": 7, "batch_size": 5}})
    assert Mine.declared_work(FedAvgParams(), config) == Work(7, 5, passes=1, stored_share=0.0)


STREAM = (
    "data.tasks={count=3, classes=2, per_client=[1, 2], share=[0.2, 0.4], rounds_per_task=2}",
    "rounds=6",
    "fleet.clients=4",
    "fleet.per_round=3",
    "train.epochs=2",
)
WITH_STATE = sorted({name for name in METHODS.names() if issubclass(METHODS[name].target, SharedBody)} | {"fedweit"})
MORE_STATES = {"fedvit, limited": ("fedvit", "method.memory_bytes=700", "method.stored_share=1.0")}


def shapes(state: State | None, but: str = "no name") -> dict[str, Any]:
    tensors: Tensors = {} if state is None else state.tensors
    return {name: (t.shape, t.dtype) for name, t in tensors.items() if not name.startswith(but)}


LABELS = (*WITH_STATE, *MORE_STATES, "apfl", "transfl", "eftvit", "standalone")
LIKE_OTHERS = {"a-gem", "mas", "er", "der++", "bcn", "fedper", "fedrep", "fedvit", "joint"}


@pytest.mark.parametrize("label", long_but(LABELS, *(label for label in LABELS if label not in LIKE_OTHERS)))
def test_the_state_found_by_dry_runs_is_the_one_that_clients_keep(
    label: str, tiny_config: MakeConfig, tmp_path: Path
) -> None:
    """In every round of a run on tasks, from the numbers that the clients report."""
    name, *keys = MORE_STATES.get(label, (label,))
    needed = [f"method.{key}={value}" for key, value in NEEDED.get(name, {}).items()]
    context = open_run(tiny_config(*STREAM, f"method.name={name}", *needed, *keys), tmp_path)
    state = load_state(context)
    for round in range(1, 7):
        state, record = run_round(context, state, round)
        for entry in record.clients:
            assert entry.failure is None
            kept = context.cost_model.kept_state(entry.numbers)
            real = context.fleet.client_state(entry.client)
            # Of other clients' weights only the number is known, not how sparse they are: as sparse as its own.
            assert shapes(kept, "knowledge.") == shapes(real, "knowledge.")
            assert shapes(kept).keys() == shapes(real).keys()
            assert (kept is None) == (real is None)
            if kept is not None and real is not None:
                assert kept.numbers.keys() == real.numbers.keys()
                assert all(tensor.is_meta for tensor in kept.tensors.values())


@pytest.mark.parametrize(
    ("name", "reported", "like"),
    [
        ("gem", {"stored": [3, 3, 3, 3, 3]}, {"stored": [3, 3, 3]}),
        ("gem", {"stored": [-1, "x", 0]}, {}),
        ("gem", {"stored": 3}, {}),
        ("gem", {"stored": [10**30]}, {"stored": [2**31]}),
        ("fedknow", {"known_tasks": [2, 0, -1, 7]}, {"known_tasks": [0, 2]}),
        ("fedknow", {"known_tasks": 3}, {}),
        ("ewc", {"latest_task": 10**9}, {}),
        ("fedweit", {"latest_task": -1, "adaptive_kept": 0}, {}),
        ("fedweit", {"latest_task": 1, "past_tasks": 10**9, "adaptive_kept": 5, "adaptive_received": 0},
         {"latest_task": 1, "past_tasks": 1, "adaptive_kept": 5, "adaptive_received": 0}),
    ],
    ids=str,
)  # fmt: skip
def test_numbers_that_cannot_be_are_limited(name: str, reported: dict[str, Any], like: dict[str, Any]) -> None:
    model = make_cost_model({"name": name})
    assert shapes(model.kept_state(reported)) == shapes(model.kept_state(like))


def test_memory_is_that_of_the_client_that_keeps_most(tiny_config: MakeConfig, tmp_path: Path) -> None:
    context = open_run(tiny_config(*STREAM, "method.name=ewc"), tmp_path)
    new, of_one_task, of_two_tasks = (
        {"latest_task": latest, "penalized": penalized} for latest, penalized in ((-1, 0), (0, 0), (2, 1))
    )

    def peak(*clients: Numbers) -> int:
        peak_bytes: int = context.client_costs(dict(enumerate(clients)))["peak_memory_bytes"]
        return peak_bytes

    assert peak(new) < peak(of_one_task) < peak(of_two_tasks)
    assert peak(new, of_one_task, of_two_tasks, new) == peak(of_two_tasks)


def test_importance_and_anchor_count_each() -> None:
    """EWC keeps three numbers per weight besides the model: importance and anchor, and the latest importance."""
    model = make_cost_model({"name": "ewc"})
    held = model.dry_run(1, 0, np.zeros(4, dtype=np.int64), 2, {"latest_task": 1, "penalized": 1}).held_tensors
    received = model.dry_run(1, 0, np.zeros(4, dtype=np.int64)).held_tensors
    of_model = sum(tensor.nbytes for tensor in model.blank.values())
    distinct = {id(tensor): tensor.nbytes for tensor in held}
    assert sum(distinct.values()) - sum(tensor.nbytes for tensor in received) == 4 * of_model + 4
