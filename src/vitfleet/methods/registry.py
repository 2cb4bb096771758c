"""From a method's name to its class."""

from __future__ import annotations

from typing import Any

from vitfleet.config.methods import MethodConfig
from vitfleet.methods.base import Method, Setting
from vitfleet.methods.fedavg import FedAvg
from vitfleet.methods.fedprox import FedProx
from vitfleet.methods.standalone import Standalone

METHODS: dict[str, type[Method[Any]]] = {method.name: method for method in (Standalone, FedAvg, FedProx)}


def make_method(params: MethodConfig, setting: Setting) -> Method[Any]:
    """Return the method that a configuration names."""
    return METHODS[params.name](params, setting)
