"""FedPer: Arivazhagan et al., "Federated Learning with Personalization Layers", 2019.

FedAvg of the body. Body and head are trained together; the head stays local. On tasks it is FedAvg with local heads.
"""

from __future__ import annotations

from vitfleet.config.base import MethodParams
from vitfleet.config.registry import register_method
from vitfleet.methods.personal.shared_body import SharedBody


class FedPerParams(MethodParams):
    """FedAvg of the body; every client keeps its own head (FedPer)."""


@register_method("fedper", FedPerParams, title="FedPer")
class FedPer(SharedBody[FedPerParams]):
    """Federated averaging of the body. Body and head are trained together."""
