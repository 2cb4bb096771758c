"""SCAFFOLD: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020.

FedAvg whose clients correct their drift. The server has a control variate c, and each client i one of its own, c_i: its
gradients of late; c is their mean. All are zero at first. On every batch (Algorithm 1)

    y_i ← y_i − η_l (g_i(y_i) − c_i + c),

and after K of them c_i⁺ = c_i − c + (x − y_i)/(K η_l) (option II). With the clients S of the round, of N in all,

    x ← x + 1/|S| Σ (y_i − x),    c ← c + 1/N Σ (c_i⁺ − c_i).

Decisions:

- With plain SGD, option II is the mean of g_i(y_i) over the K steps: put these into x − y_i. That mean is what is
  computed here. AdamW and momentum do not step by the gradient: there (x − y_i)/(K η_l) has another unit than the
  gradient that it is to correct.
- AdamW gets the corrected gradient in place of the gradient, and divides it by its size. The paper's theory is of
  ``-o train.optimizer=sgd -o train.momentum=0 -o train.weight_decay=0``.
- Both means over S weigh clients by their images, as FedAvg does; the paper's are equal. c stays the weighted mean of
  all c_i if all clients take part, or have the same number of images; else it does on average.
- η_g is the table ``[server]`` (``-o server.lr=…``). It does not apply to c.
- The running statistics of batch norms, which have no gradient, have no variate.

    vitfleet run digits --plugin scaffold.py -o method.name=scaffold -o train.optimizer=sgd -o train.momentum=0
"""

from __future__ import annotations

import torch

from vitfleet import register_method
from vitfleet.config.base import AggregationParams, MethodParams
from vitfleet.message import Message, State, Tensors, add_prefix, with_prefix
from vitfleet.methods.aggregation.weighted_mean import WeightedMean
from vitfleet.methods.averaging.fedavg import WeightAveraging
from vitfleet.methods.base import Aggregator, ClientGenerator, ClientRoundInput, ClientUpdate, train_metrics
from vitfleet.training.local_training import LocalTraining
from vitfleet.training.samples import Samples, cross_entropy
from vitfleet.training.step import StepView

C = "c/"  # before the names of the server's control variate, in its state and in messages


class ScaffoldParams(MethodParams):
    """FedAvg with control variates against client drift (Karimireddy et al., 2020)."""


@register_method("scaffold", ScaffoldParams, title="SCAFFOLD")
class Scaffold(WeightAveraging[ScaffoldParams]):
    """FedAvg with a state beside the weights on the server, c, and on each client, c_i."""

    def initial_state(self, initial_weights: Tensors) -> State:
        """Return x, and c = 0."""
        x = super().initial_state(initial_weights).tensors
        return State({**x, **add_prefix(C, zeros(self.parts.trainable(self.trainable).take(x)))})

    def aggregator(self, server_state: State, round: int) -> Aggregator:
        """Return what averages x and moves c."""
        return ControlledMean(server_state, self.context.aggregation, self.context.config.fleet.clients)

    def client_update(self, job: ClientRoundInput) -> ClientGenerator:
        """Train with the correction c − c_i; send y_i and c + c_i⁺ − c_i, keep c_i⁺."""
        received = {**job.base_weights, **self.trainable.take(job.message.tensors)}
        c = with_prefix(job.message.tensors, C)
        own = zeros(c) if job.client_state is None else job.client_state.tensors
        correction = {name: tensor - own[name] for name, tensor in c.items()}
        epochs = self.context.train.epochs
        result = yield LocalTraining(
            received, self.trainable, epochs, corrected_step, constants=correction, kept=zeros(c)
        )
        if not result.samples:
            return ClientUpdate(Message(numbers=train_metrics(result)), received, State(own))
        # In a dry run the sums are on the CPU, and all other tensors have no values.
        new = {name: (total / result.steps).to(c[name].device) for name, total in result.kept.items()}
        proposed = {name: tensor + (new[name] - own[name]) for name, tensor in c.items()}
        message = Message({**result.weights, **add_prefix(C, proposed)}, train_metrics(result))
        return ClientUpdate(message, {**received, **result.weights}, State(new))

    def model_weights(self, server_state: State, base_weights: Tensors, client_state: State | None) -> Tensors:
        """Return x, without c."""
        return {**base_weights, **self.trainable.take(server_state.tensors)}


def corrected_step(view: StepView, batch: Samples) -> Tensors:
    """Return g_i(y_i) − c_i + c, and add g_i(y_i) to the sum of the steps."""
    gradient = view.grad(cross_entropy, batch)
    view.count(gradient)
    return view.map(add, gradient, view.constants)


def add(gradient: Tensors, correction: Tensors) -> Tensors:
    """Return the corrected gradient of one client."""
    return {name: tensor + correction[name] for name, tensor in gradient.items()}


def zeros(like: Tensors) -> Tensors:
    """Return a control variate that is zero."""
    return {name: torch.zeros_like(tensor) for name, tensor in like.items()}


class ControlledMean(WeightedMean):
    """The mean of x, and c moved by the share |S|/N towards the mean of what the clients propose."""

    def __init__(self, server_state: State, config: AggregationParams, clients: int) -> None:
        super().__init__(server_state, config)
        self.clients = clients

    def finish(self) -> State:
        """Return the new x and c."""
        before, mean = self.server_state.tensors, super().finish().tensors
        share = len(self.sizes.keys() - self.rejected.keys()) / self.clients
        names = [name for name in self.updated_names if name.startswith(C)]
        return State({**mean, **{name: before[name].lerp(mean[name], share) for name in names}})
