"""FedViT: Zuo et al., "FedViT: Federated continual learning of vision transformer at edge", 2024.

Clients learn one task after the other; the body is federated, the head each client's own. In a round a client that
has taken part before first fine-tunes the aggregated body for an epoch, each step following the gradient of its own
body from before the aggregation, rotated to an acute angle with the aggregated one's (against negative transfer from
others). Then it trains the head with the body frozen, and the body with the head frozen, each step's gradient
integrated with those of the k old tasks that are most dissimilar to it (against forgetting). Knowledge of a task are
those of its samples that the model it trained names best.
"""

from __future__ import annotations

from pydantic import Field

from vitfleet.config.registry import register_method
from vitfleet.config.schema import Config
from vitfleet.message import Numbers, Tensors
from vitfleet.methods import episodic_memory
from vitfleet.methods.base import ClientJob
from vitfleet.methods.episodic_memory import MemoryParams
from vitfleet.methods.memory_method import MemoryMethod
from vitfleet.methods.projection_metrics import projection_counts, projection_metrics
from vitfleet.methods.shared_body import LocalGenerator, LocalResult, check_head_epochs
from vitfleet.training.objective import Fit, Objective
from vitfleet.training.surgery import GradientIntegrator, GradientRotation, MostDissimilar

FINE_TUNING_PREFIX = "tuning_"  # of the numbers that count the steps of the fine-tuning


class FedVitParams(MemoryParams):
    """Knowledge extractor, gradient restorer, gradient integrator (FedViT)."""

    head_epochs: int = Field(1, ge=0, description="of train.epochs, those that train the head; the rest train the body")
    k: int = Field(10, ge=1, description="stored tasks that are integrated: the most dissimilar ones")
    rank_every: int = Field(1, ge=1, description="steps that a ranking of the stored tasks serves")
    tune_epochs: int = Field(1, ge=0, description="epochs of fine tuning after an aggregation")


@register_method("fedvit", FedVitParams)
class FedVit(MemoryMethod[FedVitParams]):
    """Knowledge extractor, gradient restorer, gradient integrator."""

    client_metrics = (*projection_metrics(FINE_TUNING_PREFIX, "fine-tuning steps"), *MemoryMethod.client_metrics)

    @classmethod
    def check_config(cls, params: FedVitParams, config: Config) -> None:
        """Check that some epochs are left for the body."""
        super().check_config(params, config)
        check_head_epochs(params.head_epochs, config.train.epochs)

    def learn(self, job: ClientJob, weights: Tensors) -> LocalGenerator:
        """Fine-tune after the aggregation, train the head, train the body with integration, extract knowledge."""
        params, anatomy = self.params, self.anatomy
        own: Tensors = {} if job.client_state is None else job.client_state.tensors
        known = episodic_memory.read(own)
        numbers: Numbers = {}
        if own and params.tune_epochs:
            rotation = Objective(anatomy.body, transform=GradientRotation(params.check))
            before = anatomy.trainable(anatomy.body).take(own)
            tuned = yield Fit(weights, rotation, params.tune_epochs, reference_weights=before)
            weights = {**weights, **tuned.weights}
            numbers = projection_counts(tuned, FINE_TUNING_PREFIX)
        if params.head_epochs:
            headed = yield Fit(weights, Objective(anatomy.head), params.head_epochs)
            weights = {**weights, **headed.weights}
        memory = episodic_memory.recall(known, job.task_index)
        objective = Objective(anatomy.body)
        if memory:
            selector = MostDissimilar(params.k, params.rank_every)
            objective = Objective(anatomy.body, transform=GradientIntegrator(params.check), selector=selector)
        fitted = yield Fit(
            weights, objective, self.context.train.epochs - params.head_epochs, memory=memory, score_samples=True
        )
        known = episodic_memory.store(
            known, job.task_index, job.shard, fitted.sample_losses, params, self.context.num_tasks
        )
        numbers = {**numbers, **projection_counts(fitted), **episodic_memory.told(known)}
        return LocalResult({**weights, **fitted.weights}, fitted, numbers, episodic_memory.write(known))
