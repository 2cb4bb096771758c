"""From presets, files and overrides to a configuration."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vitfleet.config import load_config, presets
from vitfleet.config.base import MethodParams
from vitfleet.config.fleet import BufferedSchedule, DeadlineSchedule, OverSelectionSchedule
from vitfleet.config.registry import METHODS, PARTITIONS, method_label, register_method
from vitfleet.config.run_title import run_title
from vitfleet.config.schema import AugmentConfig, Config

FEDPROX = """
title = "a file"
[method]
name = "fedprox"
mu = 0.5
[data.partition]
kind = "dirichlet"
beta = 0.1
min_samples = 3
"""


@pytest.fixture
def fedprox(tmp_path: Path) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(FEDPROX, encoding="utf-8")
    return str(path)


# Presets


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_valid_and_has_a_title(name: str) -> None:
    config = load_config(name)
    assert config.title == presets()[name]
    assert config.title
    assert "\n" not in config.title


def test_the_presets_that_are_promised_are_there() -> None:
    assert {"digits", "transfl-cifar10", "fedavg-cifar100"} <= set(presets())


def test_an_empty_file_is_the_default_run(tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text("")
    assert load_config(str(tmp_path / "empty.toml")) == Config()


# Overrides


def test_values_are_toml() -> None:
    config = load_config(
        "digits",
        [
            "rounds=7",
            "train.lr=2e-4",
            "data.augment.flip=true",
            'title="in quotes"',
            "data.augment={crop=0.1, brightness=0.2}",
            "seed = 12",
        ],
    )
    assert (config.rounds, config.train.lr, config.title, config.seed) == (7, 2e-4, "in quotes", 12)
    assert config.data.augment == AugmentConfig(crop=0.1, brightness=0.2)


@pytest.mark.parametrize("text", ["plain", "two words", "a=b=c", "~/data/x-1", "é漢", "cuda:1", "1.2.3"])
def test_bare_text_is_a_string(text: str) -> None:
    assert load_config("digits", [f"title={text}"]).title == text


@pytest.mark.parametrize("word", ["null", "none", "None"])
def test_null_is_nothing(word: str) -> None:
    assert load_config("digits", ["eval.clients=5"]).eval.clients == 5
    assert load_config("digits", [f"eval.clients={word}"]).eval.clients is None
    assert load_config("digits", ["train.max_grad_norm=1", f"train.max_grad_norm={word}"]).train.max_grad_norm is None


def test_the_last_override_wins() -> None:
    assert load_config("digits", ["rounds=3", "rounds=4"]).rounds == 4


def test_overrides_leave_the_rest_alone() -> None:
    before = load_config("transfl-cifar10")
    after = load_config("transfl-cifar10", ["train.lr=0.5", "data.augment.crop=0.125"])
    expected = before.model_dump()
    expected["train"]["lr"] = 0.5
    expected["data"]["augment"]["crop"] = 0.125
    expected["title"] = ""  # it named the preset's data, which this is no longer
    assert after.model_dump() == expected


def test_values_of_the_command_line_lie_between_the_source_and_the_overrides() -> None:
    base = {"seed": 5, "data.dir": "/data"}
    config = load_config("digits", ["seed=6"], base)
    assert (config.seed, config.data.dir) == (6, "/data")
    assert load_config("digits", [], base).seed == 5


def test_overrides_do_not_leak_into_the_next_load() -> None:
    before = load_config("digits")
    load_config("digits", ["data.partition.kind=iid", "train.lr=9", "method.name=standalone"])
    assert load_config("digits") == before


def test_paths_are_made_absolute_because_a_run_may_be_resumed_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    config = load_config("digits", ["data.path=photos", "model.weights=~/w.safetensors"], {"data.dir": "sets"})
    assert config.data.path == str(tmp_path / "photos")
    assert config.data.dir == str(tmp_path / "sets")
    assert config.model.weights == "/home/somebody/w.safetensors"
    assert load_config("digits", ["model.weights=hub"]).model.weights == "hub"


def test_another_model_starts_from_its_own_sizes() -> None:
    model = load_config("transfl-cifar10", ["model.weights=hub", "model.name=vit_tiny_patch16_224"]).model
    assert (model.name, model.weights) == ("vit_tiny_patch16_224", "hub")
    assert (model.depth, model.patch_size, model.image_size) == (None, None, None)
    assert load_config("transfl-cifar10", ["model.name=vit"]).model.depth == 6


def test_another_family_keeps_the_image_size_of_the_experiment() -> None:
    preset = "fedvit-families-tinyimagenet"  # its images have 64 pixels
    assert load_config(preset).model.image_size == 32
    for family in ("cait", "swin", "t2t"):
        model = load_config(preset, [f"model.name={family}"]).model
        assert (model.name, model.image_size) == (family, 32)
    assert load_config("transfl-cifar10", ["model.name=swin", "model.image_size=64"]).model.image_size == 64
    assert load_config("transfl-cifar10", ["model.name=swin"]).model.depth is None


def test_a_title_is_kept_only_while_it_is_true() -> None:
    title = load_config("digits").title
    assert title
    assert load_config("digits", ["rounds=3", "train.lr=1e-2"]).title == title
    assert load_config("digits", ["method.name=fedprox"]).title == ""
    assert load_config("digits", ["method.name=fedprox", "title=mine"]).title == "mine"
    assert load_config("digits", base={"data.dir": "/data", "seed": 3}).title == title
    assert load_config("digits", base={"fleet.clients": 2, "fleet.per_round": 2}).title == ""


def test_a_run_without_a_title_is_called_by_what_it_is(tmp_path: Path) -> None:
    def title(source: str, *overrides: str) -> str:
        return run_title(load_config(source, overrides).model_dump(mode="json"))

    assert title("digits") == load_config("digits").title
    photos = f"data.path={tmp_path / 'photos'}"
    assert title("eftvit-digits", photos) == "EFTViT on photos: 10 clients, 5 per round"
    assert title("eftvit-cifar10", photos, "data.name=birds").startswith("EFTViT on birds: ")
    assert title("digits", "fleet.clients=1", "fleet.per_round=1") == "FedAvg on digits: 1 client, 1 per round"


def test_methods_are_labelled_by_their_titles() -> None:
    @register_method("mine", MethodParams)
    class Mine:
        """A plug-in without a title of its own."""

    assert [method_label(name) for name in ("fedprox mu=0.1", "der++", "fed-lora")] == [
        "FedProx mu=0.1",
        "DER++",
        "Fed-LoRA",
    ]
    assert method_label("mine") == "mine"
    assert method_label("transfl-digits k=1") == "transfl-digits k=1"  # a preset's name
    assert all(entry.title != entry.name for entry in METHODS if entry.origin.built_in)


# Variants


@pytest.mark.parametrize("name", ["fedavg", "standalone"])
def test_another_method_drops_the_old_ones_keys(fedprox: str, name: str) -> None:
    assert load_config(fedprox).method == METHODS.make_params("fedprox", mu=0.5)
    assert load_config(fedprox, [f"method.name={name}"]).method.model_dump() == {"name": name}


@pytest.mark.parametrize(
    "overrides",
    [["method.name=fedprox", "method.mu=0.25"], ["method.mu=0.25", "method.name=fedprox"]],
    ids=["name first", "name last"],
)
def test_the_order_of_overrides_does_not_matter(fedprox: str, overrides: list[str]) -> None:
    for source in ("digits", fedprox):
        assert load_config(source, overrides).method == METHODS.make_params("fedprox", mu=0.25)


def test_the_same_method_keeps_its_keys(fedprox: str) -> None:
    assert load_config(fedprox, ["method.name=fedprox"]).method == METHODS.make_params("fedprox", mu=0.5)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data.partition.kind=iid"], PARTITIONS.make_params("iid")),
        (["data.partition.kind=shards", "data.partition.per_client=3"], PARTITIONS.make_params("shards", per_client=3)),
        (
            ["data.partition.per_client=3", "data.partition.kind=classes"],
            PARTITIONS.make_params("classes", per_client=3),
        ),
        (["data.partition.kind=source"], PARTITIONS.make_params("source")),
        (["data.partition.path=/runs/a", "data.partition.kind=file"], PARTITIONS.make_params("file", path="/runs/a")),
        (["data.partition.kind=dirichlet"], PARTITIONS.make_params("dirichlet", beta=0.1, min_samples=3)),
        (["data.partition.beta=2"], PARTITIONS.make_params("dirichlet", beta=2, min_samples=3)),
    ],
)
def test_another_partition_drops_the_old_ones_keys(fedprox: str, overrides: list[str], expected: object) -> None:
    assert load_config(fedprox, overrides).data.partition == expected


def test_both_variants_change_at_once(fedprox: str) -> None:
    config = load_config(
        fedprox,
        ["data.partition.imbalance=1", "method.mu=2", "data.partition.kind=iid", "method.name=fedprox"],
    )
    assert config.data.partition == PARTITIONS.make_params("iid", imbalance=1)
    assert config.method == METHODS.make_params("fedprox", mu=2)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("deadline", DeadlineSchedule(seconds=600.0)),
        ("over-selection", OverSelectionSchedule(share=0.3)),
        ("buffered", BufferedSchedule(concurrency=10, staleness=0.5)),
    ],
)
def test_a_schedule_named_alone_has_the_values_that_are_documented(kind: str, expected: object) -> None:
    room_for_all = ["fleet.clients=40", "fleet.devices={nano=1}"]
    assert load_config("digits", [f"fleet.schedule.kind={kind}", *room_for_all]).fleet.schedule == expected


# Speed of the command line


@pytest.mark.parametrize("module", ["vitfleet", "vitfleet.config", "vitfleet.cli", "vitfleet.errors"])
def test_importing_is_cheap(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'timm', 'torchvision') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_presets_are_listed_without_importing_torch() -> None:
    code = "import sys; from vitfleet.config import presets; assert presets(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
