"""The list of keys is complete, and the documentation shows it as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from vitfleet.config import load_config
from vitfleet.config.keys import every_key, markdown
from vitfleet.config.schema import TasksConfig
from vitfleet.errors import UserError

DOCS = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_every_listed_key_exists_and_every_key_says_what_it_means() -> None:
    for key in every_key():
        assert key.meaning, key.name
        if key.default in {"required", "", "null"} or key.variant:
            continue
        if key.name.startswith("data.tasks."):  # with this table the rounds are others
            assert key.name.removeprefix("data.tasks.") in TasksConfig.model_fields
            continue
        held_out = ["fleet.held_out=0.2"] if key.name.startswith("metrics.held_out_clients.") else []
        load_config("digits", [f"{key.name}={key.default}", *held_out])


def test_the_documentation_is_up_to_date() -> None:
    assert markdown() in DOCS.read_text(encoding="utf-8"), "run: vitfleet keys --markdown"


def test_a_variants_key_under_another_variant_says_whose_it_is() -> None:
    with pytest.raises(UserError, match=r"method\.mu: no such key; it belongs to method\.name = fedprox"):
        load_config("digits", ["method.mu=1"])
