"""The parameters of every method; ``method.name`` says which table is meant."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vitfleet.config.base import Table


class StandaloneConfig(Table):
    """Every client trains alone; nothing travels."""

    name: Literal["standalone"] = "standalone"


class FedAvgConfig(Table):
    """Federated averaging, weighted by samples (McMahan et al., 2017)."""

    name: Literal["fedavg"] = "fedavg"


class FedProxConfig(Table):
    """FedAvg with a proximal term μ/2·‖w − w_t‖² on the client (Li et al., 2020)."""

    name: Literal["fedprox"] = "fedprox"
    mu: float = Field(0.01, ge=0, description="weight μ of the proximal term")


MethodConfig = Annotated[StandaloneConfig | FedAvgConfig | FedProxConfig, Field(discriminator="name")]
