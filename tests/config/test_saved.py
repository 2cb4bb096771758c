"""What was saved can be read."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vitfleet.config import load_config, presets, read_config
from vitfleet.config.base import MAX_FLOAT, MAX_INTEGER, MIN_FLOAT
from vitfleet.config.load import validate
from vitfleet.config.registry import METHODS
from vitfleet.config.schema import (
    AugmentConfig,
    Config,
    DataConfig,
    EvalConfig,
    FleetConfig,
    MachineConfig,
    ModelConfig,
    TrainConfig,
)
from vitfleet.data.partitions.partitioners import (
    ClassesPartition,
    DirichletPartition,
    FilePartition,
    IidPartition,
    ShardsPartition,
    SourcePartition,
)
from vitfleet.methods.averaging.fedavg import FedAvgParams
from vitfleet.methods.averaging.fedprox import FedProxParams
from vitfleet.methods.personal.standalone import StandaloneParams


def share(low: float, high: float, *, open_low: bool = False, open_high: bool = False) -> st.SearchStrategy[float]:
    inside = st.floats(max(low, MIN_FLOAT), high, exclude_max=open_high)
    return inside if open_low else st.just(0.0) | inside


counts = st.integers(1, MAX_INTEGER)
up_to_a_million = st.integers(1, 10**6)
positive = st.floats(MIN_FLOAT, MAX_FLOAT)
at_least_zero = st.just(0.0) | positive
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
    st.just(StandaloneParams()),
    st.just(FedAvgParams()),
    st.builds(FedProxParams, mu=at_least_zero),
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
        mlp_ratio=draw(st.floats(0.125, 64)),
        weights=draw(maybe_text),
    )


@st.composite
def fleets(draw: st.DrawFn) -> FleetConfig:
    clients = draw(st.integers(1, 10**6))
    return FleetConfig(clients=clients, per_round=draw(st.integers(1, clients)))


configs = st.builds(
    Config,
    title=texts,
    seed=st.integers(0, 2**63 - 1),
    rounds=up_to_a_million,
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
        epochs=up_to_a_million,
        batch_size=up_to_a_million,
        optimizer=st.sampled_from(["adamw", "sgd"]),
        lr=positive,
        weight_decay=at_least_zero,
        momentum=share(0, 1, open_high=True),
        schedule=st.sampled_from(["cosine", "constant"]),
        warmup_rounds=st.integers(0, 100),
        max_grad_norm=st.none() | positive,
        mask_ratio=share(0, 1, open_high=True),
    ),
    fleet=fleets(),
    eval=st.builds(EvalConfig, every=counts, batch_size=up_to_a_million, clients=st.none() | counts),
    machine=st.builds(
        MachineConfig,
        device=texts,
        precision=st.sampled_from(["auto", "fp32", "bf16"]),
        deterministic=st.booleans(),
        threads=st.none() | st.integers(1, 1024),
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
    assert load_config(str(path), ["method.name=fedavg"]).method == METHODS.make_params("fedavg")


def test_the_defaults_of_every_method_survive() -> None:
    for entry in METHODS:
        tree = {
            "method": entry.params().model_dump(mode="json"),
            "model": {"weights": "digits"},
            "train": {"epochs": 2},
        }
        if entry.target.needs_tasks:
            tree["data"] = {"tasks": {}}
        assert validate(tree).method == entry.params()
