"""FedKNOW: Luopan et al., "FedKNOW: Federated Continual Learning with Signature Task Knowledge Integration at Edge".

FedViT's predecessor (2023, arXiv 2212.01738). The knowledge of a task is weights, not samples:

1. The knowledge extractor keeps, of the model that a client has trained on a task, the fraction ρ of the weights with
   the largest absolute values. All others are zero. Values and positions stay on the client.
2. The gradient restorer computes the gradient g_i of an old task i without its images: that of the distillation, at the
   temperature T, of the kept model's predictions for the images of the *current* batch. The k gradients that are most
   dissimilar to the step's gradient (largest Wasserstein distance) are the signature tasks'.
3. The gradient integrator finds the gradient nearest to the step's that has no obtuse angle with any of these, against
   forgetting. After an aggregation it does the same with the gradients before and after it, in one epoch of
   fine-tuning, against negative transfer from other clients.

Integrator and fine-tuning are FedViT's (:mod:`vitfleet.training.surgery`).

Decisions, where the papers leave it open:

- Body and head are trained together, all epochs integrated. (That FedViT freezes parts is told as its difference.)
- The weights are ranked over the whole model, body and head, biases and norms included. Public code keeps all biases
  and the head.
- Distillation compares the classes among which the old task was learned: those of its task where the task of an image
  is known, else all. The loss is the cross-entropy at temperature T without a factor T².
- The end of a task is not known in advance: knowledge is extracted after every round, from the model that the client
  has just trained, and replaces that of its previous round in the task.
- Fine-tuning trains what was aggregated: the body, with ``heads = "shared"`` the whole model.
"""

from __future__ import annotations

import torch
from pydantic import Field

from vitfleet.config.registry import register_method
from vitfleet.message import Numbers, Tensors
from vitfleet.methods.base import ClientJob
from vitfleet.methods.client_metrics import ClientMetric
from vitfleet.methods.episodic_memory import ReferenceParams, with_reference_settings
from vitfleet.methods.projection_metrics import projection_counts, projection_metrics
from vitfleet.methods.shared_body import LocalTraining, LocalTrainingResult, SharedBody
from vitfleet.methods.task_knowledge import (
    KnownTasks,
    TaskKnowledge,
    extract_knowledge,
    knowledge_tensors,
    make_teachers,
    num_kept_weights,
    read_knowledge,
)
from vitfleet.models.parts import Selection
from vitfleet.training.memories import Teachers
from vitfleet.training.objective import Fit, Objective
from vitfleet.training.surgery import GradientIntegrator, GradientRotation, MostDissimilar

FINE_TUNING_PREFIX = "tuning_"  # of the numbers that count the steps of the fine-tuning


class FedKnowParams(ReferenceParams):
    """Knowledge of old tasks as sparse models, distilled into reference gradients (FedKNOW)."""

    rho: float = Field(0.1, gt=0, le=1, description="fraction ρ of a task's model, its largest weights, that is kept")
    temperature: float = Field(2.0, ge=0.01, le=1000, description="temperature T of the distillation")
    k: int = Field(10, ge=1, description="old tasks that are integrated: the most dissimilar ones")
    rank_every: int = Field(1, ge=1, description="steps between two rankings of the old tasks")
    margin: float = Field(
        0.0, ge=0, description="least multiplier of each old task once one is violated (the paper: 0; GEM: 0.5)"
    )
    tune_epochs: int = Field(1, ge=0, description="epochs of fine-tuning after an aggregation")


@register_method("fedknow", FedKnowParams, title="FedKNOW")
class FedKnow(SharedBody[FedKnowParams]):
    """Knowledge extractor, gradient restorer and gradient integrator on weights."""

    needs_tasks = True
    client_metrics = (
        *projection_metrics(FINE_TUNING_PREFIX, "fine-tuning steps"),
        *projection_metrics(),
        ClientMetric("knowledge_bytes", "bytes of kept weights, largest client", "max"),
        ClientMetric("known_tasks", "indices of the tasks whose knowledge is kept"),
    )

    @property
    def parameters(self) -> Selection:
        """The weights that are ranked: all parameters of the model."""
        return self.parts.trainable(self.parts.whole)

    def known_tasks(self, job: ClientJob) -> KnownTasks:
        """Return what the client has kept so far."""
        return {} if job.client_state is None else read_knowledge(job.client_state.tensors)

    def local_training(self, job: ClientJob, weights: Tensors) -> LocalTraining:
        """Fine-tune after the aggregation, train with integration, extract knowledge."""
        known = self.known_tasks(job)
        teachers = make_teachers(known, job.task_index, self.params.temperature)
        numbers: Numbers = {}
        if job.client_state is not None and self.params.tune_epochs:
            tuned = yield self.fine_tuning(weights, job.client_state.tensors)
            weights = {**weights, **tuned.weights}
            numbers = projection_counts(tuned, FINE_TUNING_PREFIX)
        objective = self.integrated_objective(teachers)
        result = yield Fit(weights, objective, self.context.train.epochs, memory=teachers)
        trained = {**weights, **result.weights}
        if result.samples:
            label = job.shard.labels[0].to(self.context.device)
            extracted = extract_knowledge(trained, self.parameters, self.params.rho, label)
            known = {**known, job.task_index: extracted}
        numbers = {**numbers, **projection_counts(result), **knowledge_numbers(known)}
        return LocalTrainingResult(trained, result, numbers, knowledge_tensors(known))

    def fine_tuning(self, weights: Tensors, previous: Tensors) -> Fit:
        """Return the fine-tuning of the aggregated weights.

        Parameters
        ----------
        previous
            The client's weights before the aggregation.
        """
        objective = Objective(self.shared, transform=GradientRotation(self.params.check))
        before = self.parts.trainable(self.shared).take(previous)
        return Fit(weights, objective, self.params.tune_epochs, reference_weights=before)

    def integrated_objective(self, teachers: Teachers | None) -> Objective:
        """Return the objective of the training: with teachers, their gradients are integrated."""
        objective = Objective(self.trainable)
        if teachers is None:
            return objective
        objective = Objective(
            self.trainable,
            transform=GradientIntegrator(self.params.check, self.params.margin),
            selector=MostDissimilar(self.params.k, self.params.rank_every),
        )
        return with_reference_settings(objective, self.params)

    # Costs

    def client_state_shapes(self, reported: Numbers, channels: int, image_size: int) -> Tensors:
        """Return the shapes of the kept weights."""
        count = num_kept_weights(self.parts.count_parameters(self.parameters), self.params.rho)
        kept = TaskKnowledge(
            torch.empty(count, device="meta"),
            torch.empty(count, dtype=torch.int32, device="meta"),
            torch.empty((), dtype=torch.int16, device="meta"),
        )
        return knowledge_tensors({index: kept for index in self.reported_tasks(reported)})

    def num_stored_samples(self, reported: Numbers) -> int:
        """Return of how many tasks a client has knowledge: it needs memory as stored samples do."""
        return len(self.reported_tasks(reported))

    def reported_tasks(self, reported: Numbers) -> list[int]:
        """Return the tasks of which a client has knowledge, as it reported them; an invalid index does not count."""
        tasks = reported.get("known_tasks")
        indices = tasks if isinstance(tasks, list) else []
        return sorted({index for index in indices if isinstance(index, int) and 0 <= index < self.context.num_tasks})


def knowledge_numbers(known: KnownTasks) -> Numbers:
    """Return the numbers that a client reports of its knowledge: its bytes, and the tasks."""
    return {"knowledge_bytes": sum(task.num_bytes for task in known.values()), "known_tasks": sorted(known)}
