"""No key takes a number at the edge of floats: a fuzzer that draws keys and values at random rarely meets one."""

from __future__ import annotations

import pytest
from generated_values import keys_by_variant

from vitfleet.config import load_config
from vitfleet.errors import UserError

KEYS = [pair for pair in keys_by_variant() if "number" in pair[0].allowed]


@pytest.mark.parametrize("value", ["1.7e308", "-1.7e308", "5e-324", f"1{31 * '0'}"])
def test_every_key_rejects_it_by_name(value: str) -> None:
    assert len(KEYS) > 100
    for key, selection in KEYS:
        text = f"[{value}]" if "list" in key.allowed else value
        with pytest.raises(UserError) as rejected:
            load_config("digits", [*([selection] if selection else []), f"{key.name}={text}"])
        assert str(rejected.value).startswith(f"{key.name}"), rejected.value
