"""FedAvgM: Hsu et al., "Measuring the Effects of Non-Identical Data …", 2019. FedAvg with server momentum."""

from pydantic import Field

from vitfleet import register_method
from vitfleet.config.base import MethodParams
from vitfleet.message import State
from vitfleet.methods.aggregation import WeightedMean
from vitfleet.methods.averaging.fedavg import WeightAveraging


class FedAvgMParams(MethodParams):
    """FedAvg with server momentum: v ← βv + Δ, w ← w − v."""

    momentum: float = Field(0.9, ge=0, lt=1, description="momentum β of the server")


class MomentumMean(WeightedMean):
    """The weighted mean, approached with momentum; the velocity v is part of the server state."""

    momentum = 0.0

    def finish(self) -> State:
        """Return the server state after one step: Δ = w − mean, v ← βv + Δ, w ← w − v."""
        mean, weights = super().finish(), self.server_state.tensors
        velocity = {name: weight - mean.tensors[name] for name, weight in weights.items()}
        if before := self.server_state.parts.get("velocity"):
            velocity = {name: v + self.momentum * before.tensors[name].to(v) for name, v in velocity.items()}
        return State({k: w - velocity[k] for k, w in weights.items()}, mean.numbers, {"velocity": State(velocity)})


@register_method("fedavgm", FedAvgMParams)
class FedAvgM(WeightAveraging[FedAvgMParams]):
    """Clients train as in FedAvg; the server moves along a running mean of its steps."""

    def aggregator(self, server_state: State, round: int) -> MomentumMean:
        """Average the updates, then apply momentum."""
        mean = MomentumMean(server_state, self.context.aggregation)
        mean.momentum = self.params.momentum
        return mean
