"""From presets, files and overrides to a configuration; every complaint is one helpful line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from vitfleet.config import load_config, presets, read_config
from vitfleet.config.methods import FedAvgConfig, FedProxConfig, StandaloneConfig
from vitfleet.config.schema import (
    AugmentConfig,
    ClassesPartition,
    Config,
    DataConfig,
    DirichletPartition,
    EvalConfig,
    FilePartition,
    FleetConfig,
    IidPartition,
    MachineConfig,
    ModelConfig,
    ShardsPartition,
    SourcePartition,
    TasksConfig,
    TrainConfig,
)
from vitfleet.errors import ConfigError, UserError

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


def complaint(source: str, *overrides: str) -> str:
    """Load what cannot be loaded and return the one line that is said about it."""
    with pytest.raises(UserError) as caught:
        load_config(source, overrides)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert "pydantic" not in text
    assert "Traceback" not in text
    return text


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
    assert load_config("digits", ["train.clip=1", f"train.clip={word}"]).train.clip is None


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


# Variants


@pytest.mark.parametrize("name", ["fedavg", "standalone"])
def test_another_method_drops_the_old_ones_keys(fedprox: str, name: str) -> None:
    assert load_config(fedprox).method == FedProxConfig(mu=0.5)
    assert load_config(fedprox, [f"method.name={name}"]).method.model_dump() == {"name": name}


@pytest.mark.parametrize(
    "overrides",
    [["method.name=fedprox", "method.mu=0.25"], ["method.mu=0.25", "method.name=fedprox"]],
    ids=["name first", "name last"],
)
def test_the_order_of_overrides_does_not_matter(fedprox: str, overrides: list[str]) -> None:
    for source in ("digits", fedprox):
        assert load_config(source, overrides).method == FedProxConfig(mu=0.25)


def test_the_same_method_keeps_its_keys(fedprox: str) -> None:
    assert load_config(fedprox, ["method.name=fedprox"]).method == FedProxConfig(mu=0.5)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data.partition.kind=iid"], IidPartition()),
        (["data.partition.kind=shards", "data.partition.per_client=3"], ShardsPartition(per_client=3)),
        (["data.partition.per_client=3", "data.partition.kind=classes"], ClassesPartition(per_client=3)),
        (["data.partition.kind=source"], SourcePartition()),
        (["data.partition.path=/runs/a", "data.partition.kind=file"], FilePartition(path="/runs/a")),
        (["data.partition.kind=dirichlet"], DirichletPartition(beta=0.1, min_samples=3)),
        (["data.partition.beta=2"], DirichletPartition(beta=2, min_samples=3)),
    ],
)
def test_another_partition_drops_the_old_ones_keys(fedprox: str, overrides: list[str], expected: object) -> None:
    assert load_config(fedprox, overrides).data.partition == expected


def test_both_variants_change_at_once(fedprox: str) -> None:
    config = load_config(
        fedprox,
        ["data.partition.imbalance=1", "method.mu=2", "data.partition.kind=iid", "method.name=fedprox"],
    )
    assert config.data.partition == IidPartition(imbalance=1)
    assert config.method == FedProxConfig(mu=2)


# Complaints


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("data.partition.beta=0", ["data.partition.beta = 0", "greater than 0"]),
        ("data.partition.beta=-1.5", ["data.partition.beta = -1.5", "greater than 0"]),
        ("train.mask_ratio=1", ["train.mask_ratio = 1", "less than 1"]),
        ("train.mask_ratio=-0.1", ["train.mask_ratio = -0.1", "greater than or equal to 0"]),
        ("fleet.per_round=11", ["fleet.per_round = 11", "between 1 and fleet.clients = 10"]),
        ("fleet.per_round=0", ["fleet.per_round = 0", "greater than or equal to 1"]),
        ("model.heads=5", ["model.heads = 5", "must divide model.dim = 32"]),
        ("train.epochs=many", ["train.epochs = 'many'", "valid integer"]),
        ("train.epochs=1.5", ["train.epochs = 1.5", "valid integer"]),
        ("train.lr=nan", ["train.lr = nan", "finite"]),
        ("train.lr=[1]", ["train.lr = [1]", "valid number"]),
        ("train.optimizer=adam", ["train.optimizer = 'adam'", "'adamw' or 'sgd'"]),
        ("data.augment.flip=maybe", ["data.augment.flip = 'maybe'", "valid boolean"]),
        ("title=3", ["title = 3", "valid string"]),
        ("rounds=null", ["rounds = None", "valid integer"]),
        ("seed=-1", ["seed = -1", "greater than or equal to 0"]),
        ("train=3", ["train = 3"]),
        ("train.lr.deeper=3", ["train.lr = 0.003", "train.lr.deeper"]),
        ("data.partition.kind=iidd", ["data.partition.kind = 'iidd'", "iid", "dirichlet", "shards"]),
        ("method.name=fedporx", ["method.name = 'fedporx'", "fedavg", "fedprox", "standalone"]),
        ("data.partition.kind=file", ["data.partition.path", "missing"]),
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_range(override: str, parts: list[str]) -> None:
    text = complaint("digits", override)
    for part in parts:
        assert part in text


def test_the_error_knows_its_key() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("digits", ["data.partition.beta=0"])
    assert caught.value.key == "data.partition.beta"


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("train.lrr=1", "did you mean train.lr?"),
        ("trian.lr=1", "did you mean train?"),
        ("rouns=1", "did you mean rounds?"),
        ("data.augment.flipp=true", "did you mean data.augment.flip?"),
        ("data.partition.betta=1", "did you mean data.partition.beta?"),
        ("train.zzzzzz=1", "batch_size"),
        ("a.b.c=1", "the top level knows"),
    ],
)
def test_an_unknown_key_gets_a_suggestion(override: str, suggestion: str) -> None:
    text = complaint("digits", override)
    assert "no such key" in text
    assert suggestion in text
    known = {*override.partition("=")[0].split(".")}
    assert known & set(text.partition(":")[0].split("."))


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["method.name=fedavg", "method.mu=1"], "method.mu"),
        (["data.partition.kind=iid", "data.partition.beta=1"], "data.partition.beta"),
    ],
)
def test_a_key_of_another_variant_is_not_suggested_back(overrides: list[str], key: str) -> None:
    """`method.mu: no such key; did you mean method.mu?` helps nobody: it belongs to another method."""
    text = complaint("digits", *overrides)
    assert text.startswith(key)
    assert f"did you mean {key}?" not in text


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("digit", ["'digit'", "did you mean 'digits'?"]),
        ("zzzzzz", ["'zzzzzz'", "vitfleet presets"]),
        ("nowhere.toml", ["nowhere.toml", "no such file"]),
        ("nowhere.json", ["nowhere.json", "no such file"]),
    ],
)
def test_a_source_that_is_not_there(source: str, parts: list[str]) -> None:
    text = complaint(source)
    for part in parts:
        assert part in text


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    (tmp_path / "folder.toml").mkdir()
    assert "no such file" in complaint(str(tmp_path / "folder.toml"))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("broken.toml", b"[train\nlr = 1", "not valid TOML"),
        ("broken.toml", b"lr = ", "not valid TOML"),
        ("twice.toml", b"seed = 1\nseed = 2", "not valid TOML"),
        ("broken.json", b'{"seed": 1', "not valid JSON"),
        ("empty.json", b"", "not valid JSON"),
        ("list.json", b"[1, 2]", "table of keys"),
        ("latin.toml", 'title = "\xe9"'.encode("latin-1"), "not valid TOML"),
        ("latin.json", '{"title": "\xe9"}'.encode("latin-1"), "not valid JSON"),
        ("image.toml", b"\x89PNG\r\n\x1a\n\xff\xfe", "not valid TOML"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    text = complaint(str(tmp_path / name))
    assert name in text
    assert says in text


@pytest.mark.parametrize("override", ["nonsense", "=3", " = 3", "", "train.lr"])
def test_an_override_must_be_key_and_value(override: str) -> None:
    text = complaint("digits", override)
    assert text.startswith(f"-o {override}")
    assert "key=value" in text


def test_a_variant_without_its_deciding_key_says_so(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[method]\nmu = 1.0\n")
    assert "method.name" in complaint(str(tmp_path / "mine.toml"))


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load_config("digits").rounds = 3  # type: ignore[misc]


# What was saved can be read


def share(low: float, high: float, *, open_low: bool = False, open_high: bool = False) -> st.SearchStrategy[float]:
    return st.floats(low, high, exclude_min=open_low, exclude_max=open_high)


counts = st.integers(1, 10**9)
positive = st.floats(0, exclude_min=True, allow_nan=False, allow_infinity=False)
at_least_zero = st.floats(0, allow_nan=False, allow_infinity=False)
texts = st.text(max_size=20)
maybe_text = st.none() | texts

partitions = st.one_of(
    st.builds(IidPartition, imbalance=share(0, 5)),
    st.builds(DirichletPartition, beta=positive, min_samples=st.integers(0, 100)),
    st.builds(ClassesPartition, per_client=counts),
    st.builds(ShardsPartition, per_client=counts),
    st.just(SourcePartition()),
    st.builds(FilePartition, path=texts),
)
methods = st.one_of(
    st.just(StandaloneConfig()),
    st.just(FedAvgConfig()),
    st.builds(FedProxConfig, mu=at_least_zero),
)


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    heads = draw(st.integers(1, 64))
    return ModelConfig(
        name=draw(st.just("vit") | texts),
        image_size=draw(st.none() | st.integers(4, 1024)),
        patch_size=draw(st.none() | st.integers(1, 64)),
        dim=heads * draw(st.integers(8, 100)),
        depth=draw(st.none() | st.integers(1, 64)),
        heads=heads,
        mlp_ratio=draw(positive),
        weights=draw(maybe_text),
    )


@st.composite
def fleets(draw: st.DrawFn) -> FleetConfig:
    clients = draw(st.integers(1, 10**6))
    return FleetConfig(clients=clients, per_round=draw(st.integers(1, clients)))


configs = st.builds(
    Config,
    title=texts,
    seed=st.integers(0, 2**70),
    rounds=counts,
    data=st.builds(
        DataConfig,
        name=texts,
        path=maybe_text,
        dir=maybe_text,
        test_share=share(0, 1, open_low=True, open_high=True),
        max_corrupt=share(0, 1),
        limit=st.none() | counts,
        partition=partitions,
        augment=st.builds(
            AugmentConfig, crop=share(0, 0.5), flip=st.booleans(), brightness=share(0, 1, open_high=True)
        ),
    ),
    model=models(),
    method=methods,
    train=st.builds(
        TrainConfig,
        epochs=counts,
        batch_size=counts,
        optimizer=st.sampled_from(["adamw", "sgd"]),
        lr=positive,
        weight_decay=at_least_zero,
        momentum=share(0, 1, open_high=True),
        schedule=st.sampled_from(["cosine", "constant"]),
        warmup_rounds=st.integers(0, 100),
        clip=st.none() | positive,
        mask_ratio=share(0, 1, open_high=True),
    ),
    fleet=fleets(),
    eval=st.builds(EvalConfig, every=counts, batch_size=counts, clients=st.none() | counts),
    machine=st.builds(
        MachineConfig,
        device=texts,
        precision=st.sampled_from(["auto", "fp32", "bf16"]),
        deterministic=st.booleans(),
        threads=st.none() | counts,
        checkpoint_every=counts,
    ),
)


@given(config=configs)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_configuration_survives_its_file(config: Config, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(config.model_dump_json(indent=2), encoding="utf-8")
    assert read_config(path) == config
    settled = load_config(str(path))  # as a run saves it: paths are absolute
    path.write_text(settled.model_dump_json(indent=2), encoding="utf-8")
    assert load_config(str(path)) == settled


@pytest.mark.parametrize("name", presets())
def test_a_resolved_preset_can_be_run_again(name: str, tmp_path: Path) -> None:
    config = load_config(name, ["seed=3", "eval.clients=null"])
    path = tmp_path / "config.json"
    path.write_text(config.model_dump_json(), encoding="utf-8")
    settled = load_config(str(path))  # as a run saves it: paths are absolute
    path.write_text(settled.model_dump_json(indent=2), encoding="utf-8")
    assert load_config(str(path)) == settled
    # and overridden: the resolved file names every key of its method, which must not stand in the way
    assert load_config(str(path), ["method.name=standalone"]).method == StandaloneConfig()


def test_the_defaults_of_every_method_survive() -> None:
    for method in get_args(Config.model_fields["method"].annotation):
        if any(field.is_required() for field in method.model_fields.values()):
            continue
        # Some train the head for a few epochs first, some want tasks.
        config = Config(method=method(), train=TrainConfig(epochs=3), data=DataConfig(tasks=TasksConfig()))
        assert Config.model_validate(json.loads(config.model_dump_json())) == config


# Speed of the command line


@pytest.mark.parametrize("module", ["vitfleet", "vitfleet.config", "vitfleet.cli", "vitfleet.errors"])
def test_importing_is_cheap(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'timm', 'torchvision') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_listing_and_loading_need_no_torch() -> None:
    code = (
        "import sys; from vitfleet.config import load_config, presets; "
        "[load_config(name) for name in presets()]; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


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


@pytest.mark.parametrize(
    "override", ["rounds=true", "train.lr=true", 'rounds="5"', 'data.augment.flip="yes"', "rounds=2.5"]
)
def test_a_value_of_another_type_is_not_taken_for_what_it_is_not(override: str) -> None:
    with pytest.raises(UserError, match=override.split("=")[0]):
        load_config("digits", [override])


def test_another_model_starts_from_its_own_sizes() -> None:
    model = load_config("transfl-cifar10", ["model.weights=hub", "model.name=vit_tiny_patch16_224"]).model
    assert (model.name, model.weights) == ("vit_tiny_patch16_224", "hub")
    assert (model.depth, model.patch_size, model.image_size) == (None, None, None)
    assert load_config("transfl-cifar10", ["model.name=vit"]).model.depth == 6


def test_a_title_is_kept_only_while_it_is_true() -> None:
    title = load_config("digits").title
    assert title
    assert load_config("digits", ["rounds=3", "train.lr=1e-2"]).title == title
    assert load_config("digits", ["method.name=fedprox"]).title == ""
    assert load_config("digits", ["method.name=fedprox", "title=mine"]).title == "mine"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("method=fedprox", "did you mean method.name=fedprox?"),
        ("data.partition=iid", "did you mean data.partition.kind=iid?"),
        ("method.name=fedavgg", "did you mean fedavg?"),
        ("train=3", "is a table of keys, not a value"),
    ],
)
def test_near_misses_are_met_halfway(override: str, words: str) -> None:
    with pytest.raises(UserError) as complaint:
        load_config("digits", [override])
    assert words in str(complaint.value)
