"""One file, one algorithm; each reads beside its paper."""

from vitfleet.methods.base import Aggregator, ClientGenerator, ClientJob, ClientUpdate, Method, MethodContext
from vitfleet.methods.registry import adapt, make_method

__all__ = [
    "Aggregator",
    "ClientGenerator",
    "ClientJob",
    "ClientUpdate",
    "Method",
    "MethodContext",
    "adapt",
    "make_method",
]
