"""Commands for real machines name the extra that they need, where it is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from vitfleet.cli import fleet
from vitfleet.cli.base import app
from vitfleet.errors import UserError


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        (["certs", "keys", "--host", "127.0.0.1", "--names", "a"], "flower"),
        (["server", "digits", "--certs", "keys"], "flower"),
        (["client", "--server", "127.0.0.1", "--name", "a", "--data", ".", "--certs", "keys"], "client"),
    ],
)
def test_a_missing_extra_is_named(
    command: list[str], extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fleet, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, UserError)
    assert f"'.[{extra}]'" in str(result.exception)
    assert not list(tmp_path.iterdir())
