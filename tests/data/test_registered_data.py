"""Data sets and partitions that a user's file registers, used in a whole run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vitfleet
from vitfleet.config import load_config
from vitfleet.data.partitions.assign import partition_dataset
from vitfleet.data.partitions.saved import load_partition
from vitfleet.data.sources.load import load_dataset
from vitfleet.errors import ConfigError, UserError

PLUGIN = '''
import numpy as np
from pydantic import Field

from vitfleet import register_dataset, register_partition
from vitfleet.config.base import PartitionParams, Table
from vitfleet.data.sources.from_objects import from_tensors


class BarsParams(Table):
    """Horizontal and vertical bars."""

    count: int = Field(80, ge=8, description="training images")


@register_dataset("bars", BarsParams)
def bars(params, request):
    labels = np.arange(params.count) % 2
    images = np.zeros((params.count, 8, 8), np.uint8)
    for i, label in enumerate(labels):
        row = images[i] if label else images[i].T
        row[i % 8] = 255
    return from_tensors(images, labels, class_names=["vertical", "horizontal"], name="bars")


class BlocksParams(PartitionParams):
    """Consecutive images, and the last client gets what is left."""

    size: int = Field(10, ge=1, description="images of every client but the last")


@register_partition("blocks", BlocksParams)
def blocks(params, data):
    return np.minimum(np.arange(len(data.labels)) // params.size, data.clients - 1)
'''
SMALL: dict[str, Any] = {"fleet.clients": 4, "fleet.per_round": 2, "rounds": 2, "model.dim": 16, "model.depth": 1}


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    return path


def test_run_with_a_registered_data_set_and_partition(plugin: Path, tmp_path: Path) -> None:
    keys = {"data.name": "bars", "data.params.count": 100, "data.partition": {"kind": "blocks", "size": 15}}
    run = vitfleet.train("digits", overrides={**SMALL, **keys}, plugins=[plugin], out=tmp_path / "run")
    partition = load_partition(tmp_path / "run")[0]
    assert partition.train.sizes().tolist() == [15, 15, 15, 35]
    assert partition.train.for_client(1).tolist() == list(range(15, 30))
    assert partition.test.num_samples == 20
    assert run.summary["accuracy"]["global"] is not None
    summary = json.loads((tmp_path / "run" / "partition.json").read_text())
    assert summary["classes"] == ["vertical", "horizontal"]
    assert summary["partition"] == {"kind": "blocks", "size": 15}


def test_parameters_of_a_registered_data_set_are_validated(plugin: Path) -> None:
    with pytest.raises(UserError, match=r"data\.params\.cuont.*no such key; 'bars' has the parameters count"):
        load_config("digits", {"data.name": "bars", "data.params.cuont": 9}, plugins=[plugin])
    with pytest.raises(UserError, match="count"):
        load_config("digits", {"data.name": "bars", "data.params.count": 7}, plugins=[plugin])


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("np.zeros(3, np.int64)", r"data\.partition\.kind = 'blocks': returned \(3,\) clients for .* images"),
        ("np.full(len(data.labels), data.clients)", r"returned clients outside 0 … 3"),
        ("np.full(len(data.labels), -1)", r"returned clients outside 0 … 3"),
    ],
)
def test_partition_function_that_returns_wrong_owners_is_rejected(plugin: Path, returned: str, message: str) -> None:
    source = PLUGIN.replace("np.minimum(np.arange(len(data.labels)) // params.size, data.clients - 1)", returned)
    assert source != PLUGIN
    plugin.write_text(source)
    config = load_config("digits", {**SMALL, "data.partition.kind": "blocks"}, plugins=[plugin])
    with pytest.raises(ConfigError, match=message):
        partition_dataset(config.data.partition, 4, 0, load_dataset(config.data))


def test_registered_data_set_is_suggested_for_a_similar_name(plugin: Path) -> None:
    config = load_config("digits", {"data.name": "barss"}, plugins=[plugin])
    with pytest.raises(ConfigError, match=r"did you mean bars\?"):
        load_dataset(config.data)


def test_partition_function_draws_from_the_seed_only(plugin: Path) -> None:
    source = PLUGIN.replace(
        "np.minimum(np.arange(len(data.labels)) // params.size, data.clients - 1)",
        "data.rng.integers(0, data.clients, len(data.labels))",
    )
    plugin.write_text(source)
    config = load_config("digits", {**SMALL, "data.name": "bars", "data.partition.kind": "blocks"}, plugins=[plugin])
    data = load_dataset(config.data)
    first, again, other = (partition_dataset(config.data.partition, 4, seed, data) for seed in (1, 1, 2))
    assert np.array_equal(first.train.offsets, again.train.offsets)
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()
