"""LVT: Wang et al., "Continual Learning with Lifelong Vision Transformer", 2022, inside federated averaging.

The attention of every block has a learned external key K and a bias instead of keys of its input
(:mod:`vitfleet.models.variants.external_keys`). With the batch B and samples M of earlier tasks, a step minimises

    L_I(B) + r L_A(B) + α L_A(M) + β L_D(M) + γ L_K

L_I and L_A are the cross-entropies of the injection classifier, which learns the current task, and of the accumulation
classifier, whose logits are the model's. L_D is the Kullback-Leibler divergence, at temperature τ, of its probabilities
to those under the logits that were stored with the samples. The penalty L_K = Σ |∇K' ⊙ (K − K')| slows the drift of the
attention: K' are the keys and biases after the previous task, and ∇K' is the mean gradient of that task's L_I there.
In a client's first task there are L_I and r L_A. The memory keeps the samples of highest confidence, the probability of
the true class under the accumulation classifier, of every class the same fraction.

In the federation: the body is averaged; keys and biases with it, or with ``keys = "local"`` they stay on the client.
Both classifiers are local, or with ``heads = "shared"`` averaged too.

Decisions: the product in L_K is taken weight by weight, so that changes of opposite signs do not cancel out. A client
does not know which of its rounds is its last one of a task. So ∇K' is measured after every round, at the weights that
it has just trained, and K' are the client's own. r is ``accumulation`` · ``accumulation_decay``ᵗ after t learned tasks:
the more old classes there are, the less the current ones count in the accumulation classifier. The text that the
weights were taken from names no values for them, so their defaults are assumptions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from vitfleet.config.registry import register_method
from vitfleet.config.schema import Config
from vitfleet.errors import ConfigError
from vitfleet.message import Message, State, Tensors
from vitfleet.methods.base import ClientRoundInput, MethodContext, Work
from vitfleet.methods.continual.penalties.quadratic_penalty import whole_images
from vitfleet.methods.continual.replay.experience_replay import REPLAY, ReplayParams, drawn_before, with_draws
from vitfleet.methods.continual.stored_samples import MemoryMethod, StoredTasks
from vitfleet.methods.personal.shared_body import ClientTraining
from vitfleet.methods.reported import ClientMetric
from vitfleet.models.parts import Selection
from vitfleet.models.variants.external_keys import INJECTION_BIAS, INJECTION_WEIGHT, add_external_keys, external_keys
from vitfleet.training.local_training import LocalTraining
from vitfleet.training.samples import Outputs, Samples, cross_entropy
from vitfleet.training.step import StepView

_ACCUMULATION = "accumulation"
_KEYS, _GRADIENTS = "previous_keys.", "previous_gradients."  # K' and ∇K' of the previous task
_LATEST = "latest_gradients."  # ∇K of the latest task, at the client's model
_EXCLUDED = -1e9  # logit of a class of another task in a softmax; finite, so that differences are


class LvtParams(ReplayParams):
    """Attention with learned external keys that drift slowly, two classifiers and replay (LVT)."""

    alpha: float = Field(0.5, ge=0, description="weight α of the cross-entropy of replayed samples")
    beta: float = Field(0.5, ge=0, description="weight β of the divergence from the stored logits")
    gamma: float = Field(0.5, ge=0, description="weight γ of the penalty on changes of keys")
    accumulation: float = Field(1.0, ge=0, description="weight r of the batch in the accumulation classifier")
    accumulation_decay: float = Field(0.9, gt=0, le=1, description="factor of r per task that was learned before")
    temperature: float = Field(2.0, gt=0, description="temperature τ of the divergence from the stored logits")
    keys: Literal["shared", "local"] = Field(
        "shared",
        description="shared: external keys and biases are averaged with the body; local: they stay on the client",
    )


@dataclass(frozen=True)
class LvtStep:
    """The step; r, and where there is a previous task its keys and gradients, are in the constants."""

    alpha: float
    beta: float
    gamma: float
    temperature: float
    replays: bool  # whether there are stored samples of earlier tasks

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        """Return the gradients to apply."""
        return view.grad(self.loss, batch, *([view.drawn(REPLAY)] if self.replays else []))

    def loss(self, batch: Outputs, replayed: Outputs | None = None) -> Tensor:
        """Return the loss of a step."""
        constants = batch.constants
        loss = injection_loss(batch) + constants[_ACCUMULATION] * cross_entropy(batch)
        if replayed is not None:
            entropies = F.cross_entropy(replayed.logits.float(), replayed.labels, reduction="none")
            divergences = logit_divergences(replayed.logits, replayed.stored["logits"], self.temperature)
            loss = loss + torch.dot(self.alpha * entropies + self.beta * divergences, replayed.sample_weight)
        previous = [name.removeprefix(_KEYS) for name in constants if name.startswith(_KEYS)]
        for name in previous:
            change = batch.weights[name] - constants[_KEYS + name]
            loss = loss + self.gamma * (constants[_GRADIENTS + name] * change).abs().sum()
        return loss


def injection_loss(outputs: Outputs) -> Tensor:
    """Return the mean cross-entropy of the batch under the injection classifier."""
    assert outputs.auxiliary is not None
    possible = torch.where(outputs.logits > -torch.inf, outputs.auxiliary.float(), -torch.inf)
    return torch.dot(F.cross_entropy(possible, outputs.labels, reduction="none"), outputs.sample_weight)


def logit_divergences(logits: Tensor, stored: Tensor, temperature: float) -> Tensor:
    """Return each sample's Kullback-Leibler divergence from the stored logits, over the classes of its task."""
    possible = logits > -torch.inf

    def log_probabilities(of: Tensor) -> Tensor:
        return torch.where(possible, of.float() / temperature, _EXCLUDED).log_softmax(dim=-1)

    target, learned = log_probabilities(stored), log_probabilities(logits)
    return (target.exp() * (target - learned)).sum(dim=-1)


def injection_gradient_step(view: StepView, batch: Samples) -> Tensors:
    """Add up the gradients of the injection loss of all samples; it changes no weight."""
    gradients = view.grad(injection_loss, batch)
    view.keep(view.map(add_weighted, view.kept, gradients, batch.sample_weight))
    return {}


def add_weighted(totals: Tensors, gradients: Tensors, sample_weight: Tensor) -> Tensors:
    """Return the totals, changed in place, with the gradient of a mean added as often as the batch has samples."""
    samples = (sample_weight > 0).sum()
    return {name: total.add_(samples * gradients[name]) for name, total in totals.items()}


@register_method("lvt", LvtParams, title="LVT")
class Lvt(MemoryMethod[LvtParams]):
    """Lifelong vision transformer."""

    stores_logits = True
    client_metrics = (
        *MemoryMethod.client_metrics,
        ClientMetric("penalized", "rounds with a penalty", "sum", form="count", most=1),
    )

    def __init__(self, params: LvtParams, context: MethodContext) -> None:
        super().__init__(params, context)
        self.keys = external_keys(self.parts)

    @classmethod
    def check_config(cls, params: LvtParams, config: Config) -> None:
        """Check that shared heads come with shared keys: the server's model would else be incomplete."""
        super().check_config(params, config)
        if params.heads == "shared" and params.keys == "local":
            raise ConfigError("method.keys", params.keys, 'must be "shared" where method.heads is')

    @classmethod
    def declared_work(cls, params: LvtParams, config: Config) -> Work:
        """Return the work with the epoch that measures the gradients of the keys."""
        work = with_draws(super().declared_work(params, config), params.draws)
        return replace(work, epochs=work.epochs + 1)

    @classmethod
    def adapt_model(cls, params: LvtParams, vit: nn.Module, class_to_task: Sequence[int]) -> None:
        """Give every block external keys, and the model a second classifier."""
        add_external_keys(vit)

    @property
    def shared(self) -> Selection:
        """The body, with shared heads the whole model; with local keys without them."""
        shared = super().shared
        kept = set(self.keys) if self.params.keys == "local" else set()
        return self.parts.select(name for name in shared if name not in kept)

    def with_head(self, server_state: State, head: Tensors, round: int) -> State:
        """Return the server's state with a head for both classifiers: where one is solved, the task begins with it."""
        weight, bias = self.context.net.linear_head
        both = {INJECTION_WEIGHT: head[weight], INJECTION_BIAS: head[bias]}
        return super().with_head(server_state, {**head, **both}, round)

    def initial_broadcast(self, initial_weights: Tensors) -> Message:
        """Return the initial weights of what is local."""
        shared = set(self.shared)
        return Message({name: initial_weights[name] for name in self.parts.whole if name not in shared})

    def local_training(self, job: ClientRoundInput, weights: Tensors) -> ClientTraining:
        """Train body and classifiers; measure the gradients of the keys; store the samples of highest confidence."""
        stored, params = self.stored_tasks(job), self.params
        previous = self.previous_task(job, stored)
        num_learned = sum(index < job.task_index for index in stored)
        rate = params.accumulation * params.accumulation_decay**num_learned
        device = next(iter(weights.values())).device
        replayed = drawn_before(stored, job.task_index, params.replays)
        step = LvtStep(params.alpha, params.beta, params.gamma, params.temperature, replayed is not None)
        result = yield LocalTraining(
            weights,
            self.trainable,
            self.context.train.epochs,
            step,
            constants={_ACCUMULATION: torch.tensor(rate, device=device), **previous},
            sets={} if replayed is None else {REPLAY: replayed},
            score_samples=True,
        )
        trained = {**weights, **result.weights}
        measured = yield LocalTraining(
            trained,
            self.keys,
            1,
            injection_gradient_step,
            kept={name: torch.zeros_like(trained[name]) for name in self.keys},
            train=whole_images(self.context.train, self.context.train.batch_size),
            augment=False,
        )
        kept = {} if job.client_state is None else job.client_state.tensors
        latest = {name: tensor for name, tensor in kept.items() if name.startswith(_LATEST)}
        if measured.samples:
            gradients = measured.kept.items()
            latest = {_LATEST + name: (total / measured.samples).to(device) for name, total in gradients}
        local = self.with_memory(job, weights, result, result.sample_losses, {"penalized": int(bool(previous))})
        return replace(local, extra_state={**local.extra_state, **previous, **latest})

    def previous_task(self, job: ClientRoundInput, stored: StoredTasks) -> dict[str, Tensor]:
        """Return the keys and their gradients after the client's previous task; empty in its first task.

        When a client begins a task, they are those of its last round.
        """
        if job.client_state is None or not stored:
            return {}
        kept = job.client_state.tensors
        if job.task_index not in stored:
            keys = {_KEYS + name: kept[name] for name in self.keys}
            return {**keys, **{_GRADIENTS + name: kept[_LATEST + name] for name in self.keys}}
        return {name: tensor for name, tensor in kept.items() if name.startswith((_KEYS, _GRADIENTS))}
