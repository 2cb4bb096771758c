"""Every complaint about a configuration is one helpful line."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from vitfleet.config import load_config
from vitfleet.errors import ConfigError, UserError


def complaint(source: str, *overrides: str) -> str:
    """Load what cannot be loaded and return the one line that is said about it."""
    with pytest.raises(UserError) as caught:
        load_config(source, overrides)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert "pydantic" not in text
    assert "Traceback" not in text
    return text


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
        ("train.epochs=1.5", ["train.epochs = 1.5", "whole number"]),
        ("rounds=1e3", ["rounds = 1000.0", "without a point or an exponent"]),
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
        ("a.b.c=1", "the top level has the keys"),
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


@pytest.mark.parametrize(
    "override", ["rounds=true", "train.lr=true", 'rounds="5"', 'data.augment.flip="yes"', "rounds=2.5"]
)
def test_a_value_of_another_type_is_not_taken_for_what_it_is_not(override: str) -> None:
    with pytest.raises(UserError, match=override.split("=")[0]):
        load_config("digits", [override])


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
