"""Runs with ``train.cached_views``: the same bytes wherever and whenever views are computed, counted as they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback import LocalClients, defended, export_images
from safetensors.torch import load_file

from conftest import DIGITS_BODY, InterruptAfter, MakeConfig
from vitfleet.config.schema import Config
from vitfleet.costs.report import cost_reports
from vitfleet.data.sources.load import load_dataset
from vitfleet.errors import ConfigError, UserError
from vitfleet.flower.device.checks import check_run
from vitfleet.flower.device.limits import ClientLimits
from vitfleet.flower.server.fleet import fleet_factory, make_run_spec
from vitfleet.message import Tensors
from vitfleet.methods import declared_work
from vitfleet.report.console.costs import views_lines
from vitfleet.run.loop import run_rounds
from vitfleet.run.records import RoundRecord, read_records
from vitfleet.run.setup import open_run
from vitfleet.training.stacking.inputs import ClientTraining
from vitfleet.training.trainer import Trainer
from vitfleet.training.views.cache import RecordViews

METHODS: Mapping[str, tuple[str, ...]] = {
    "fed-head": ("method.name=fed-head", "train.epochs=3"),
    "eftvit, frozen": ("method.name=eftvit", "method.local_layers=1", "method.local_rounds=0", "train.epochs=3"),
    "eftvit, features only": (
        "method.name=eftvit",
        "method.local_layers=1",
        "method.local_rounds=0",
        "method.train_head=false",
        "method.views=2",
        "train.epochs=3",
    ),
    "closed-form": ("method.name=closed-form", *DIGITS_BODY),
    "fed-head, wide": (
        "method.name=fed-head",
        "head.features=both",
        "head.blocks=2",
        "head.start=closed-form",
        "head.solve_every=2",
        *DIGITS_BODY,
    ),
    "fed-head, random features": ("method.name=fed-head", "head.features=both", "head.project=40", *DIGITS_BODY),
}
PLAIN = ("data.augment.crop=0", "data.augment.flip=false", "data.augment.brightness=0", "machine.precision=fp32")
VIEWS = ("data.augment.flip=true", "data.augment.crop=0.125", "train.cached_views=2", "machine.precision=fp32")


@pytest.fixture(autouse=True)
def _without_figures(without_figure_files: None) -> None:
    """Figures take most of the time of a run of a second."""


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list to which the clients are added that compute views."""
    clients: list[int] = []
    train_together = Trainer._train_within_memory

    def spied(self: Trainer, group: Any) -> Any:
        members: list[ClientTraining] = list(group)
        clients.extend(one.rng.client for one in members if isinstance(one.training.step, RecordViews))
        return train_together(self, group)

    monkeypatch.setattr(Trainer, "_train_within_memory", spied)
    return clients


def run(config: Config, folder: Path, **options: Any) -> list[RoundRecord]:
    run_rounds(open_run(config, folder), **options)
    return list(read_records(folder))


def weights_of(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def assert_same_model(first: Path, second: Path) -> None:
    weights, others = weights_of(first), weights_of(second)
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def without_costs(records: list[RoundRecord]) -> list[Any]:
    return [
        (record.loss, record.accuracy, [(entry.client, entry.numbers, entry.correct) for entry in record.clients])
        for record in records
    ]


@pytest.mark.parametrize("name", METHODS)
def test_one_view_of_unchanged_images_is_today_s_run(name: str, tiny_config: MakeConfig, tmp_path: Path) -> None:
    """The same bytes of weights, losses and features, of which only the operations differ."""
    plain = run(tiny_config(*METHODS[name], *PLAIN), tmp_path / "plain")
    cached = run(tiny_config(*METHODS[name], *PLAIN, "train.cached_views=1"), tmp_path / "cached")
    assert without_costs(plain) == without_costs(cached)
    assert_same_model(tmp_path / "plain", tmp_path / "cached")


@pytest.mark.parametrize("name", METHODS)
def test_an_interrupted_run_computes_its_views_again(name: str, tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config(*METHODS[name], *VIEWS, "fleet.per_round=6")
    whole = run(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "resumed", callbacks=[InterruptAfter(2)])
    assert run(config, tmp_path / "resumed") == whole
    assert_same_model(tmp_path / "whole", tmp_path / "resumed")


def test_every_client_computes_its_views_once(tiny_config: MakeConfig, tmp_path: Path, computed: list[int]) -> None:
    config = tiny_config(*METHODS["fed-head"], *VIEWS, "rounds=6")
    records = run(config, tmp_path / "run")
    assert sorted(computed) == sorted({entry.client for record in records for entry in record.clients})


def test_the_number_of_workers_changes_nothing(tiny_config: MakeConfig, tmp_path: Path, computed: list[int]) -> None:
    config = tiny_config(*METHODS["fed-head"], *VIEWS, "machine.workers=3", "machine.threads=3")
    threads = run(config, tmp_path / "threads")
    assert len(computed) == len(set(computed))
    assert threads == run(tiny_config(*METHODS["fed-head"], *VIEWS), tmp_path / "one")


# Devices


def flower(config: Config) -> Config:
    return config.model_copy(update={"fleet": config.fleet.model_copy(update={"kind": "flower", "join_s": 0.0})})


@pytest.mark.parametrize("name", ["fed-head", "eftvit, features only"])
def test_devices_keep_views_in_their_storage(
    name: str, tiny_config: MakeConfig, tmp_path: Path, computed: list[int]
) -> None:
    """A device of this fleet starts anew with every request, and has its views in a file."""
    # A device sends features of half of an image's patches at most, every view counted, unless its owner allows more.
    config = tiny_config(*METHODS[name], *VIEWS, "rounds=4", "eval.clients=0", "train.mask_ratio=0.75")
    run(defended(config), tmp_path / "simulation")
    computed.clear()
    export_images(config, tmp_path / "data")
    clients = LocalClients(flower(config), tmp_path / "data", tmp_path / "state")
    run_rounds(open_run(flower(config), tmp_path / "flower", make_fleet=fleet_factory(clients.grid())))
    assert_same_model(tmp_path / "simulation", tmp_path / "flower")
    assert len(computed) == len(set(computed)) == len(list((tmp_path / "state").glob("*/*/views-*")))


def test_a_device_computes_views_of_another_body_and_of_other_images_anew(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitfleet.data.images import ImageSet, Shard
    from vitfleet.flower.device.storage import ClientStorage, StoredViews

    storage = ClientStorage.of_run(tmp_path, "run")
    storage.folder.mkdir(parents=True)
    views, images = torch.rand(6, 4), torch.randint(0, 256, (3, 1, 8, 8), dtype=torch.uint8)
    shard = Shard(ImageSet(images, torch.zeros(3, dtype=torch.long)), torch.arange(3))
    store, again = (StoredViews(storage, 1, torch.device("cpu"), 1e9) for _ in range(2))
    store.save("one", shard, views)
    assert torch.equal(again.load("one"), views)  # type: ignore[arg-type]
    assert again.load("another") is None
    store.save("another", shard, views)
    assert [path.name for path in storage.folder.iterdir()] == ["views-another.safetensors"]
    same = Shard(ImageSet(images.clone(), shard.images.labels), torch.arange(3))
    other = Shard(ImageSet(images + 1, shard.images.labels), torch.arange(3))
    assert store.images_version(shard) == store.images_version(same) != store.images_version(other)
    with pytest.raises(UserError, match="its owner allows 1 "):
        store.save("large", shard, torch.rand(1000, 300))


def test_views_beyond_a_device_s_limit_are_refused_with_the_reason(
    tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(*METHODS["fed-head"], *VIEWS, "eval.clients=0")
    spec = make_run_spec(flower(config), load_dataset(config.data), "run")
    sent = Config.model_validate_json(spec.config)
    check_run(sent, spec, ClientLimits.parse(["cached_views=2", "epochs=5"]))
    for limit, problem in (("cached_views=1", "cached_views = 2"), ("epochs=4", "epochs = 5")):
        with pytest.raises(UserError, match=f"the server asks for {problem}"):
            check_run(sent, spec, ClientLimits.parse([limit]))


# Costs


def test_operations_are_those_that_are_computed(tiny_config: MakeConfig, tmp_path: Path) -> None:
    """In a client's first round K passes through the frozen layers, then those of the head alone."""
    keys = (*METHODS["fed-head"], *VIEWS, "fleet.per_round=6", "fleet.devices.nano=1")
    context = open_run(tiny_config(*keys), tmp_path / "run")
    run_rounds(context)
    first, *later = read_records(tmp_path / "run")
    width, classes, epochs = context.net.head_width, 10, 3
    body = context.cost_model.counter.evaluation - 2 * width * classes
    for entry, after in zip(first.clients, later[0].clients, strict=True):
        samples = entry.numbers["samples"]
        assert isinstance(samples, int)
        head = epochs * samples * 4 * width * classes  # a product forward, one backward
        assert round(1e9 * (after.gflops or 0)) == head
        assert round(1e9 * (entry.gflops or 0)) == head + 2 * samples * body
    assert first.virtual_seconds is not None
    assert later[0].virtual_seconds is not None
    assert first.virtual_seconds > 1.5 * (later[0].virtual_seconds - first.virtual_seconds)


def test_the_costs_name_what_is_computed_once_and_what_is_kept(tiny_config: MakeConfig) -> None:
    config = tiny_config(*METHODS["fed-head"], *VIEWS)
    (report,) = cost_reports(config, ["fed-head"])
    (plain,) = cost_reports(tiny_config(*METHODS["fed-head"]), ["fed-head"])
    assert report.views is not None
    assert plain.views is None
    assert report.views.kept_bytes == 2 * report.samples * config.model.dim * 4
    assert report.views.gflops + report.round_gflops < plain.round_gflops
    assert report.round_gflops < plain.round_gflops / 100
    assert report.memory["weights"] >= plain.memory["weights"] + report.views.kept_bytes
    assert report.epochs == plain.epochs + 2 == declared_work(config).epochs
    assert declared_work(config).cached_views == 2
    (line,) = views_lines([report, plain])
    assert line.startswith("fed-head: in its first round a client computes 2 views of its images once, ")


def test_features_that_have_not_changed_cost_nothing(tiny_config: MakeConfig, tmp_path: Path) -> None:
    """EFTViT's clients that train nothing pass an image as often as it has views, in their first round."""
    keys = (*METHODS["eftvit, features only"], *VIEWS, "fleet.per_round=6", "train.mask_ratio=0.5")
    first, *later = run(tiny_config(*keys), tmp_path / "run")
    plain = run(tiny_config(*keys, "train.cached_views=0"), tmp_path / "plain")
    assert [entry.gflops for record in later for entry in record.clients] == [0.0] * 12
    assert [3 * (entry.gflops or 0) for entry in first.clients] == pytest.approx(
        [2 * (entry.gflops or 0) for entry in plain[0].clients]
    )


# Refusals


@pytest.mark.parametrize(
    "name", ["fedavg", "fed-full", "fed-bias", "fed-lora", "fed-prompt", "fedrep", "standalone", "eftvit"]
)
def test_a_method_that_trains_the_first_layers_keeps_no_views(
    name: str, tiny_config: MakeConfig, tmp_path: Path
) -> None:
    layers = ("method.local_layers=1",) if name == "eftvit" else ()
    keys = f"method.name={name}", "train.epochs=2", "train.cached_views=3"
    with pytest.raises(ConfigError) as refused:
        open_run(tiny_config(*keys, *layers), tmp_path / "run")
    assert str(refused.value) == (
        "train.cached_views = 3: must be 0: clients train or receive every layer of the model in each round with "
        f"{name} as configured; with fed-head only the head changes"
    )


def test_views_are_refused_with_tasks(tiny_config: MakeConfig) -> None:
    tasks = "data.tasks={count=3, classes=2, per_client=[1, 2]}", "rounds=30"
    with pytest.raises(UserError, match=r"train.cached_views = 1: is for runs without data.tasks"):
        tiny_config("method.name=fed-head", "train.cached_views=1", *tasks)
