"""FedExP: Jhunjhunwala et al., "FedExP: Speeding Up Federated Averaging via Extrapolation", ICLR 2023."""

from dataclasses import replace

from pydantic import Field

from vitfleet import register_method
from vitfleet.config.base import MethodParams
from vitfleet.message import State
from vitfleet.methods.aggregation.weighted_mean import WeightedMean, update_norm
from vitfleet.methods.averaging.fedavg import WeightAveraging


class FedExPParams(MethodParams):
    """FedAvg that goes further where clients disagree: w + ηΔ, η = max(1, mean ‖Δᵢ‖² / 2(‖Δ‖² + ε))."""

    epsilon: float = Field(1e-3, gt=0, description="ε: the larger, the nearer to FedAvg")


@register_method("fedexp", FedExPParams, title="FedExP")
class FedExP(WeightAveraging[FedExPParams]):
    """Clients train as in FedAvg; the server goes beyond the mean Δ of their changes Δᵢ."""

    def aggregator(self, server_state: State, round: int) -> WeightedMean:
        """Average the updates, then extrapolate: weights only, not the running statistics of batch norms."""
        epsilon, parameters = self.params.epsilon, self.parts.parameters

        class Extrapolation(WeightedMean):
            def finish(self) -> State:
                mean, weights = super().finish(), self.server_state.tensors
                squares = [rms**2 for client, rms in self.sizes.items() if client not in self.rejected]
                squared_norm = sum(squares) / max(1, len(squares)) * sum(w.numel() for w in weights.values())
                rate = squared_norm / (2 * (update_norm(mean.tensors, weights) ** 2 + epsilon))
                moved = {k: w + rate * (mean.tensors[k] - w) for k, w in weights.items() if k in parameters}
                return replace(mean, tensors={**mean.tensors, **moved}) if rate > 1 else mean

        return Extrapolation(server_state, self.context.aggregation)
