"""What is too large or too deep for a configuration is refused with one sentence before it takes memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vitfleet.config import load_config
from vitfleet.config.limits import MAX_DEPTH, MAX_SAVED_TEXT, MAX_TEXT, MAX_VALUES, check_tree
from vitfleet.config.load import read_config
from vitfleet.errors import UserError

TWICE: list[Any] = [0]
for _ in range(15):
    TWICE = [TWICE, TWICE]  # 2^15 values in a few hundred bytes
ITSELF: list[Any] = []
ITSELF.append(ITSELF)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.dim=" + "[" * 900 + "]" * 900, "model.dim"),
        ("model.dim=" + "[" * 30 + "]" * 30, "nested"),
        ("a." * 5000 + "x=1", "no such key"),
        ("a" * 5000 + "=1", "no such key"),
        ("model.dim=" + "9" * 5000, "-o model.dim: 9+… has more than 1000 characters"),
        ("model.dim=" + "9" * 900, "model.dim"),
        ("model.dim=0x" + "f" * 5000, "-o model.dim: 0xf+… has more than 1000 characters"),
        ("model.dim={" + "a." * 5000 + "x = 1}", "-o model.dim: [a.]+… has more than 1000 characters"),
        ("fleet.devices={" + ",".join(f"a{number}=1" for number in range(MAX_VALUES)) + "}", "values"),
        ("model.name=" + "a" * MAX_TEXT, "characters"),
    ],
)
def test_an_override(override: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        load_config("digits", [override])
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(("value", "says"), [(TWICE, "values"), (ITSELF, "nested"), ([[]] * MAX_VALUES, "values")])
def test_a_value(value: object, says: str) -> None:
    with pytest.raises(UserError, match=says):
        load_config("digits", {"model.dim": value})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"data": 3}', "data = 3: is a table"),
        ('{"fleet": "x"}', "fleet = 'x': is a table"),
        ('{"plugins": 3}', "plugins = 3: must be a list"),
        ('{"rounds": ' + "9" * 5000 + "}", "not valid JSON"),
        ('{"rounds": ' + "[" * 5000, "nested too deeply"),
        ('{"rounds": ' + " " * MAX_SAVED_TEXT + "3}", "characters"),
    ],
)
def test_a_file(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(UserError, match=says):
        load_config(str(path))


def test_a_saved_configuration(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"title": "a" * MAX_SAVED_TEXT}))
    with pytest.raises(UserError, match="characters"):
        read_config(path)


def test_what_is_allowed_at_most_is_accepted() -> None:
    deep: Any = 0
    for _ in range(MAX_DEPTH - 2):
        deep = [deep]
    check_tree([deep])
    check_tree([list(range(MAX_VALUES - 1))])
    names = [f"device-{number}" for number in range(4000)]
    config = load_config("digits", {"fleet.kind": "flower", "fleet.clients": 4000, "fleet.names": names})
    assert len(config.fleet.names) == 4000
