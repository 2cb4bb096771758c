"""What a run is called in one line: the title of its configuration, or one that says what it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitfleet.config.registry import method_label

DEFAULT_DATA = "digits"


def run_title(tree: Mapping[str, Any]) -> str:
    """Return a title for a complete configuration as a tree of plain values.

    Its own title if it has one; else one such as ``EFTViT on photos: 4 clients, 2 per round``.
    """
    if tree["title"]:
        return str(tree["title"])
    fleet = tree["fleet"]
    clients = f"{fleet['clients']} client{'s' if fleet['clients'] > 1 else ''}"
    about = f"{method_label(tree['method']['name'])} on {data_label(tree['data'])}"
    return f"{about}: {clients}, {fleet['per_round']} per round"


def data_label(data: Mapping[str, Any]) -> str:
    """Return the name of the data: that of the images' folder, where a path is given without a name."""
    if data.get("path") and data.get("name", DEFAULT_DATA) == DEFAULT_DATA:
        return Path(data["path"]).resolve().stem
    return str(data["name"])


def titled_parts(tree: Mapping[str, Any]) -> list[Any]:
    """Return what a title is about: if an override changes any of it, the title is no longer true."""
    # The tree is not validated yet: these may be no tables.
    data, fleet = (table if isinstance(table := tree.get(name), dict) else {} for name in ("data", "fleet"))
    data = {key: value for key, value in data.items() if key not in ("dir", "test_only")}
    return [data, tree.get("model"), tree.get("method"), fleet.get("clients"), fleet.get("per_round")]
