"""From a method's name to its class."""

from __future__ import annotations

from typing import Any

from torch import nn

from vitfleet.config.methods import MethodConfig
from vitfleet.methods.base import Method, MethodContext
from vitfleet.methods.eftvit import EftVit
from vitfleet.methods.fedavg import FedAvg
from vitfleet.methods.fedbfpt import FedBfpt
from vitfleet.methods.fedper import FedPer
from vitfleet.methods.fedprox import FedProx
from vitfleet.methods.fedrep import FedRep
from vitfleet.methods.fedvit import FedVit
from vitfleet.methods.gem import AGem, Gem
from vitfleet.methods.peft import FedBias, FedFull, FedHead, FedLora, FedPrompt
from vitfleet.methods.standalone import Standalone
from vitfleet.methods.transfl import TransFL

METHODS: dict[str, type[Method[Any]]] = {
    method.name: method
    for method in (
        Standalone,
        FedAvg,
        FedProx,
        TransFL,
        FedFull,
        FedHead,
        FedBias,
        FedPrompt,
        FedLora,
        FedBfpt,
        EftVit,
        FedPer,
        FedRep,
        Gem,
        AGem,
        FedVit,
    )
}


def adapt(params: MethodConfig, vit: nn.Module) -> None:
    """Add to an architecture what the named method needs in it."""
    METHODS[params.name].adapt_model(params, vit)


def make_method(params: MethodConfig, context: MethodContext) -> Method[Any]:
    """Return the method that a configuration names."""
    return METHODS[params.name](params, context)
