"""FedViT: Zuo et al., "FedViT: Federated continual learning of vision transformer at edge", 2024.

Clients learn one task after the other. The body is federated, the heads are local. A round of a client has three parts:

1. Fine-tuning, for a client that has taken part before: one epoch on the aggregated body. Each step follows the
gradient
   g_b of the body before the aggregation, rotated to an acute angle with the gradient g_a of the aggregated body,
   against negative transfer from other clients.
2. Training of the head with the body frozen.
3. Training of the body with the head frozen. The gradient of each step is integrated with those of the k stored tasks
   that are most dissimilar to it (gradient restorer, gradient integrator), against forgetting.

The knowledge extractor then stores the fraction ρ of the task's samples that have the lowest loss.
"""

from __future__ import annotations

from pydantic import Field

from vitfleet.config.registry import register_method
from vitfleet.config.schema import Config
from vitfleet.message import Numbers, Tensors
from vitfleet.methods.base import ClientJob
from vitfleet.methods.episodic_memory import MemoryParams, replay_memory
from vitfleet.methods.memory_method import MemoryMethod
from vitfleet.methods.param_checks import check_head_epochs
from vitfleet.methods.projection_metrics import projection_counts, projection_metrics
from vitfleet.methods.shared_body import LocalTraining
from vitfleet.training.objective import EpisodicMemory, Fit, Objective
from vitfleet.training.surgery import GradientIntegrator, GradientRotation, MostDissimilar

FINE_TUNING_PREFIX = "tuning_"  # of the numbers that count the steps of the fine-tuning


class FedVitParams(MemoryParams):
    """Knowledge extractor, gradient restorer, gradient integrator (FedViT)."""

    head_epochs: int = Field(1, ge=0, description="of train.epochs, those that train the head; the rest train the body")
    k: int = Field(10, ge=1, description="stored tasks that are integrated: the most dissimilar ones")
    rank_every: int = Field(1, ge=1, description="steps between two rankings of the stored tasks")
    tune_epochs: int = Field(1, ge=0, description="epochs of fine-tuning after an aggregation")


@register_method("fedvit", FedVitParams)
class FedVit(MemoryMethod[FedVitParams]):
    """Knowledge extractor, gradient restorer, gradient integrator."""

    client_metrics = (*projection_metrics(FINE_TUNING_PREFIX, "fine-tuning steps"), *MemoryMethod.client_metrics)

    @classmethod
    def check_config(cls, params: FedVitParams, config: Config) -> None:
        """Check that at least one epoch remains for the body."""
        super().check_config(params, config)
        check_head_epochs(params.head_epochs, config.train.epochs)

    def local_training(self, job: ClientJob, weights: Tensors) -> LocalTraining:
        """Fine-tune after the aggregation, train the head, train the body with integration, extract knowledge."""
        params, anatomy = self.params, self.anatomy
        numbers: Numbers = {}
        if job.client_state is not None and params.tune_epochs:
            rotation = Objective(anatomy.body, transform=GradientRotation(params.check))
            before_aggregation = anatomy.trainable(anatomy.body).take(job.client_state.tensors)
            tuned = yield Fit(weights, rotation, params.tune_epochs, reference_weights=before_aggregation)
            weights = {**weights, **tuned.weights}
            numbers = projection_counts(tuned, FINE_TUNING_PREFIX)
        if params.head_epochs:
            head_result = yield Fit(weights, Objective(anatomy.head), params.head_epochs)
            weights = {**weights, **head_result.weights}
        memory = replay_memory(self.stored_tasks(job), job.task_index)
        result = yield Fit(
            weights,
            self.body_objective(memory),
            self.context.train.epochs - params.head_epochs,
            memory=memory,
            score_samples=True,
        )
        numbers = {**numbers, **projection_counts(result)}
        return self.with_memory(job, weights, result, result.sample_losses, numbers)

    def body_objective(self, memory: EpisodicMemory | None) -> Objective:
        """Return the objective of the body's training: with stored tasks, their gradients are integrated."""
        if memory is None:
            return Objective(self.anatomy.body)
        return Objective(
            self.anatomy.body,
            transform=GradientIntegrator(self.params.check),
            selector=MostDissimilar(self.params.k, self.params.rank_every),
        )
