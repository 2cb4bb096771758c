"""FedAvgM: Hsu et al., "Measuring the Effects of Non-Identical Data …", 2019. FedAvg with server momentum."""

from pydantic import Field

from vitfleet.config.base import AggregationParams, MethodParams
from vitfleet.config.registry import register_method
from vitfleet.message import State
from vitfleet.methods.aggregation import WeightedMean
from vitfleet.methods.base import Aggregator
from vitfleet.methods.fedavg import WeightAveraging


class FedAvgMParams(MethodParams):
    """FedAvg with server momentum: v ← βv + Δ, w ← w − v."""

    momentum: float = Field(0.9, ge=0, lt=1, description="momentum β of the server")


@register_method("fedavgm", FedAvgMParams)
class FedAvgM(WeightAveraging[FedAvgMParams]):
    """Clients train as in FedAvg; the server moves along a running mean of its steps."""

    def aggregator(self, server: State, round: int) -> Aggregator:
        """Average the updates, then apply momentum."""
        return MomentumMean(server, self.context.aggregate, self.params.momentum)


class MomentumMean(WeightedMean):
    """The weighted mean, approached with momentum; the velocity v is part of the server state."""

    def __init__(self, server: State, rule: AggregationParams, momentum: float) -> None:
        super().__init__(server, rule)
        self.momentum = momentum

    def finish(self) -> State:
        """Return the server state after one step: Δ = w − mean, v ← βv + Δ, w ← w − v."""
        mean, weights = super().finish(), self.server.tensors
        before = self.server.parts["velocity"].tensors if self.server.parts else {}
        velocity = {name: weight - mean.tensors[name] for name, weight in weights.items()}
        velocity = {
            name: step + self.momentum * before[name].to(step) if before else step for name, step in velocity.items()
        }
        return State({n: w - velocity[n] for n, w in weights.items()}, mean.numbers, {"velocity": State(velocity)})
