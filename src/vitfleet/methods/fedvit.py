"""FedViT: Zuo et al., "FedViT: Federated continual learning of vision transformer at edge", 2024.

Clients learn one task after the other. The body is federated, the heads are local. A round of a client has three parts:

1. Fine-tuning, for a client that has taken part before: one epoch on the aggregated body. Each step follows the
   gradient g_b of the body before the aggregation, rotated to an acute angle with the gradient g_a of the aggregated
   body, against negative transfer from other clients.
2. Training of the head with the body frozen.
3. Training of the body with the head frozen. The gradient of each step is integrated with those of the k stored tasks
   that are most dissimilar to it (gradient restorer, gradient integrator), against forgetting.

The knowledge extractor then stores the fraction ρ of the task's samples that have the lowest loss.

The defaults are the paper's text. Keys that leave it: ``margin``, ``integrate``, ``chooser``, ``tune_first_round``,
``tune_integrated`` and ``heads``. The parameters under "Ours" combine FedViT with the other systems; by default they
are off. With ``send_layers`` a client sends only the layers of the body with the largest gradients, as in TransFL. With
``body_mask_ratio`` the body is trained on masked images, as in EFTViT.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

from pydantic import Field

from vitfleet.config.registry import register_method
from vitfleet.config.schema import Config, TrainConfig
from vitfleet.errors import ConfigError
from vitfleet.message import Message, Numbers, State, Tensors
from vitfleet.methods.base import Aggregator, ClientJob
from vitfleet.methods.context import MethodContext
from vitfleet.methods.episodic_memory import ReferenceGradientParams, replay_memory, with_reference_settings
from vitfleet.methods.layer_sharing import LAYER_FIGURES, LAYER_METRICS, LayerSharing, LayerwiseMean
from vitfleet.methods.memory_method import MemoryMethod
from vitfleet.methods.param_checks import check_head_epochs, check_layers
from vitfleet.methods.projection_metrics import projection_counts, projection_metrics
from vitfleet.methods.shared_body import LocalTraining
from vitfleet.training.memories import EpisodicMemory
from vitfleet.training.objective import Fit, Objective, ReferenceSelector
from vitfleet.training.surgery import GradientIntegrator, GradientRotation, LargestAngle, MostDissimilar

FINE_TUNING_PREFIX = "tuning_"  # of the numbers that count the steps of the fine-tuning


SELECTORS: Mapping[str, Callable[[int, int], ReferenceSelector]] = {
    "wasserstein": MostDissimilar,
    "angle": LargestAngle,
}


class FedVitParams(ReferenceGradientParams):
    """Knowledge extractor, gradient restorer, gradient integrator (FedViT)."""

    head_epochs: int = Field(
        1, ge=0, description="of train.epochs, those that train the head alone, first; the rest are integrated"
    )
    integrate: Literal["body", "all"] = Field(
        "body", description="what the integrated epochs train: the body, as in the paper, or head and body together"
    )
    k: int = Field(10, ge=1, description="stored tasks that are integrated: the most dissimilar ones")
    chooser: Literal["wasserstein", "angle"] = Field(
        "wasserstein", description="how the k tasks are chosen: largest Wasserstein distance or largest included angle"
    )
    rank_every: int = Field(1, ge=1, description="steps between two rankings of the stored tasks")
    margin: float = Field(
        0.0, ge=0, description="least multiplier of each stored task once one is violated (the paper: 0; GEM: 0.5)"
    )
    tune_epochs: int = Field(1, ge=0, description="epochs of fine-tuning after an aggregation")
    tune_first_round: bool = Field(
        True, description="fine-tune also in a client's first round of a task, when its head is not trained on it yet"
    )
    tune_integrated: bool = Field(
        False, description="in fine-tuning, allow no obtuse angle to the gradients of stored tasks either"
    )
    # Ours
    send_layers: int | None = Field(
        None, ge=1, description="layers of the body sent: those with the largest mean absolute gradient; default: all"
    )
    body_mask_ratio: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="fraction of the patches, of stored samples too, dropped where the body trains; "
        "default: train.mask_ratio, and stored samples are whole",
    )


@register_method("fedvit", FedVitParams, title="FedViT")
class FedVit(MemoryMethod[FedVitParams]):
    """Knowledge extractor, gradient restorer, gradient integrator."""

    figures = LAYER_FIGURES
    client_metrics = (
        *projection_metrics(FINE_TUNING_PREFIX, "fine-tuning steps"),
        *projection_metrics(),
        *MemoryMethod.client_metrics,
        *LAYER_METRICS,
    )

    @classmethod
    def check_config(cls, params: FedVitParams, config: Config) -> None:
        """Check the epochs that remain for the body, and the layers sent against the model and the evaluation."""
        super().check_config(params, config)
        check_head_epochs(params.head_epochs, config.train.epochs)
        if params.send_layers is None:
            return
        check_layers("send_layers", params.send_layers, config.model.depth)
        if config.eval.body == "aggregated":
            remedy = "must be own with method.send_layers: the server never has some clients' layers"
            raise ConfigError("eval.body", config.eval.body, remedy)

    def __init__(self, params: FedVitParams, context: MethodContext) -> None:
        super().__init__(params, context)
        self.sharing: LayerSharing | None = None
        if params.send_layers is not None:
            check_layers("send_layers", params.send_layers, self.parts.depth)
            layers = set(self.parts.union(*self.parts.blocks))
            others = self.parts.select(name for name in self.shared if name not in layers)
            self.sharing = LayerSharing(self.parts, params.send_layers, others)

    # Server, where only some layers are sent

    def initial_state(self, initial_weights: Tensors) -> State:
        """Return the initial weights that are shared."""
        state = super().initial_state(initial_weights)
        return state if self.sharing is None else replace(state, numbers=self.sharing.initial_numbers())

    def client_message(self, server_state: State, round: int, client: int, last_round: int | None) -> Message:
        """Return the body; where only some layers are sent, what of it has changed since the client's last round."""
        if self.sharing is None:
            return super().client_message(server_state, round, client, last_round)
        return self.sharing.client_message(server_state, last_round)

    def aggregator(self, server_state: State, round: int) -> Aggregator:
        """Return the mean of the bodies; where only some layers are sent, of each over the clients that sent it."""
        if self.sharing is None:
            return super().aggregator(server_state, round)
        return LayerwiseMean(server_state, self.context.aggregation, self.parts, round)

    # Client

    def local_training(self, job: ClientJob, weights: Tensors) -> LocalTraining:
        """Fine-tune after the aggregation, train the head, train with integration, extract knowledge."""
        params, parts = self.params, self.parts
        memory = replay_memory(self.stored_tasks(job), job.task_index)
        numbers: Numbers = {}
        if self.tunes(job):
            tuned = yield self.fine_tuning(job, weights, memory if params.tune_integrated else None)
            weights = {**weights, **tuned.weights}
            numbers = projection_counts(tuned, FINE_TUNING_PREFIX)
        if params.head_epochs:
            head_result = yield Fit(weights, Objective(parts.head), params.head_epochs)
            weights = {**weights, **head_result.weights}
        result = yield Fit(
            weights,
            self.integrated_objective(memory),
            self.context.train.epochs - params.head_epochs,
            observer_state={} if self.sharing is None else self.sharing.observer.initial_state(self.context.device),
            memory=memory,
            score_samples=True,
            train=self.body_training(),
        )
        numbers = {**numbers, **projection_counts(result)}
        sent = None
        if self.sharing is not None and result.samples:
            sent, layer_numbers = self.sharing.select(result)
            numbers = {**numbers, **layer_numbers}
        return self.with_memory(job, weights, result, result.sample_losses, numbers, sent)

    def body_training(self) -> TrainConfig | None:
        """Return the settings of the trainings of the body, where they differ from the table ``[train]``."""
        ratio = self.params.body_mask_ratio
        return None if ratio is None else self.context.train.model_copy(update={"mask_ratio": ratio})

    def tunes(self, job: ClientJob) -> bool:
        """Return whether the client's round begins with fine-tuning: it has taken part before, in this task if need be.

        A client that has taken part in a task has stored samples of it.
        """
        has_body = job.client_state is not None and self.params.tune_epochs > 0
        return has_body and (self.params.tune_first_round or job.task_index in self.stored_tasks(job))

    def fine_tuning(self, job: ClientJob, weights: Tensors, memory: EpisodicMemory | None) -> Fit:
        """Return the fine-tuning of the aggregated body, with or without the stored tasks as constraints."""
        assert job.client_state is not None
        body = self.parts.body
        objective = Objective(
            body,
            transform=GradientRotation(self.params.check, self.params.margin if memory else 0.0),
            selector=self.selector() if memory else None,
        )
        return Fit(
            weights,
            self.with_references(objective) if memory else objective,
            self.params.tune_epochs,
            memory=memory,
            reference_weights=self.parts.trainable(body).take(job.client_state.tensors),
            train=self.body_training(),
        )

    def integrated_objective(self, memory: EpisodicMemory | None) -> Objective:
        """Return the objective of the last epochs: with stored tasks, their gradients are integrated."""
        trained = self.parts.body if self.params.integrate == "body" else self.parts.whole
        objective = Objective(trained, observer=None if self.sharing is None else self.sharing.observer)
        if memory is None:
            return objective
        transform = GradientIntegrator(self.params.check, self.params.margin)
        return self.with_references(replace(objective, transform=transform, selector=self.selector()))

    def with_references(self, objective: Objective) -> Objective:
        """Return an objective with the settings of the stored tasks' gradients."""
        masked = self.params.body_mask_ratio is not None
        return replace(with_reference_settings(objective, self.params), mask_memory=masked)

    def selector(self) -> ReferenceSelector:
        """Return the gradient restorer's choice of k stored tasks."""
        return SELECTORS[self.params.chooser](self.params.k, self.params.rank_every)
