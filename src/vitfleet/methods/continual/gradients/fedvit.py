"""FedViT: Zuo et al., "FedViT: Federated continual learning of vision transformer at edge", 2024.

Clients learn one task after the other. The body is federated, the heads are local. A round of a client has three parts:

1. Fine-tuning, for a client that has taken part before: one epoch on the aggregated body. Each step follows the
   gradient g_b of the body before the aggregation, rotated to an acute angle with the gradient g_a of the aggregated
   body, against negative transfer from other clients.
2. Training of the head with the body frozen.
3. Training of the body with the head frozen. The gradient of each step is integrated with those of the k stored tasks
   that are most dissimilar to it (gradient restorer, gradient integrator), against forgetting.

The knowledge extractor then stores the fraction ρ of the task's samples that have the lowest loss.

The defaults are the paper's text. Keys that leave it: ``margin``, ``integrate``, ``task_ranking``,
``tune_first_round``, ``tune_integrated`` and ``heads``. The parameters under "Ours" combine FedViT with the other
systems; by default they are off. With ``send_layers`` a client sends only the layers of the body with the largest
gradients, as in TransFL. With ``body_mask_ratio`` the body is trained on masked images, as in EFTViT.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from vitfleet.config.registry import register_method
from vitfleet.config.schema import Config, TrainConfig
from vitfleet.errors import ConfigError
from vitfleet.message import Message, Numbers, State, Tensors, add_prefix
from vitfleet.methods.averaging.layer_sharing import (
    LAYER_FIGURES,
    LAYER_METRICS,
    LayerSharing,
    LayerwiseMean,
    MeasuredStep,
)
from vitfleet.methods.base import Aggregator, ClientRoundInput, MethodContext, Work
from vitfleet.methods.continual.gradients.projection import References, projection_counts, zero_counts
from vitfleet.methods.continual.gradients.restorer import (
    BEFORE,
    INTEGRATION_METRICS,
    IntegratedStep,
    Ranking,
    Restorer,
    RestorerParams,
    RotatedStep,
    fine_tuning_counts,
)
from vitfleet.methods.continual.stored_samples import MEMORY, MemoryMethod, StorageParams, parts_before
from vitfleet.methods.params import check_head_epochs, check_layers
from vitfleet.methods.personal.shared_body import ClientTraining, HeadsParams
from vitfleet.randomness import Address, Purpose
from vitfleet.training.local_training import LocalTraining, SampleSet
from vitfleet.training.samples import Samples, cross_entropy
from vitfleet.training.step import StepView, cross_entropy_step


class FedVitParams(RestorerParams, StorageParams, HeadsParams):
    """Knowledge extractor, gradient restorer, gradient integrator (FedViT)."""

    head_epochs: int = Field(
        1, ge=0, description="of train.epochs, those that train the head alone, first; the rest are integrated"
    )
    integrate: Literal["body", "all"] = Field(
        "body", description="what the integrated epochs train: the body, as in the paper, or head and body together"
    )
    task_ranking: Ranking = Field(
        "wasserstein", description="how the k tasks are chosen: largest Wasserstein distance or largest included angle"
    )
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
    client_metrics = (*INTEGRATION_METRICS, *MemoryMethod.client_metrics, *LAYER_METRICS)

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

    @classmethod
    def declared_work(cls, params: FedVitParams, config: Config) -> Work:
        """Return the work with the fine-tuning, whose steps compute two gradients of the batch."""
        work = super().declared_work(params, config)
        return replace(work, epochs=params.tune_epochs + work.epochs, passes=2 if params.tune_epochs else 1)

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

    def message_to_client(self, server_state: State, round: int, client: int, last_round: int | None) -> Message:
        """Return the body; where only some layers are sent, what of it has changed since the client's last round."""
        if self.sharing is None:
            return super().message_to_client(server_state, round, client, last_round)
        return self.sharing.message_to_client(server_state, last_round)

    def aggregator(self, server_state: State, round: int) -> Aggregator:
        """Return the mean of the bodies; where only some layers are sent, of each over the clients that sent it."""
        if self.sharing is None:
            return super().aggregator(server_state, round)
        return LayerwiseMean(server_state, self.context.aggregation, self.parts, round)

    def check_update(self, expected: Message, update: Message) -> None:
        """Reject an update that is not the body; where only some layers are sent, that is not the layers it names."""
        if self.sharing is None:
            super().check_update(expected, update)
        else:
            self.sharing.check_update(update)

    # Client

    def local_training(self, job: ClientRoundInput, weights: Tensors) -> ClientTraining:
        """Fine-tune after the aggregation, train the head, train with integration, extract knowledge."""
        params, model_parts = self.params, self.parts
        memory = self.memory(job)
        numbers: Numbers = {}
        if self.tunes(job):
            tuned = yield self.fine_tuning(job, weights, memory if params.tune_integrated else None)
            weights = {**weights, **tuned.weights}
            numbers = fine_tuning_counts(tuned)
        if params.head_epochs:
            head_result = yield LocalTraining(weights, model_parts.head, params.head_epochs)
            weights = {**weights, **head_result.weights}
        result = yield self.integrated_training(weights, memory)
        numbers = {**numbers, **projection_counts(result)}
        sent = None
        if self.sharing is not None and result.samples:
            sent, layer_numbers = self.sharing.select(result)
            numbers = {**numbers, **layer_numbers}
        return replace(self.with_memory(job, weights, result, result.sample_losses, numbers), sent=sent)

    def memory(self, job: ClientRoundInput) -> SampleSet | None:
        """Return the stored samples of earlier tasks; where the body trains on masked images, masked for this round."""
        memory = parts_before(self.stored_tasks(job), job.task_index)
        train = self.body_training()
        if memory is None or train is None:
            return memory
        net = self.context.net
        kept = net.num_kept_patches(train.mask_ratio)
        if kept == net.num_patches:
            return memory
        rng = Address(self.context.seed, Purpose.MEMORY_MASK, job.round, job.client).generator()
        noise = rng.random((*memory.labels.shape, net.num_patches), dtype=np.float32)
        keep = torch.from_numpy(noise.argsort(axis=-1, kind="stable")[..., :kept].copy())
        return replace(memory, keep=keep.to(memory.labels.device))

    def body_training(self) -> TrainConfig | None:
        """Return the settings of the trainings of the body, where they differ from the table ``[train]``."""
        ratio = self.params.body_mask_ratio
        return None if ratio is None else self.context.train.model_copy(update={"mask_ratio": ratio})

    def tunes(self, job: ClientRoundInput) -> bool:
        """Return whether the client's round begins with fine-tuning: it has taken part before, in this task if need be.

        A client that has taken part in a task has stored samples of it.
        """
        has_body = job.client_state is not None and self.params.tune_epochs > 0
        return has_body and (self.params.tune_first_round or job.task_index in self.stored_tasks(job))

    def fine_tuning(self, job: ClientRoundInput, weights: Tensors, memory: SampleSet | None) -> LocalTraining:
        """Return the fine-tuning of the aggregated body, with or without the stored tasks as constraints."""
        assert job.client_state is not None
        body = self.parts.trainable(self.parts.body)
        training = LocalTraining(
            weights,
            self.parts.body,
            self.params.tune_epochs,
            RotatedStep(),
            constants=add_prefix(BEFORE, body.take(job.client_state.tensors)),
            kept=zero_counts(self.context.device),
            train=self.body_training(),
        )
        if memory is None:
            return training
        restorer = Restorer.of_params(self.params, len(memory), self.params.task_ranking)
        return replace(
            training,
            step=RotatedStep(restorer, StoredGradients(restorer.dtype), self.params.margin),
            scratch=restorer.scratch(body.take(weights)),
            sets={MEMORY: memory},
        )

    def integrated_training(self, weights: Tensors, memory: SampleSet | None) -> LocalTraining:
        """Return the last epochs: with stored tasks, their gradients are integrated."""
        trained = self.parts.body if self.params.integrate == "body" else self.parts.whole
        measure = None if self.sharing is None else self.sharing.magnitude
        kept = {} if measure is None else measure.zeros(self.context.device)
        training = LocalTraining(
            weights,
            trained,
            self.context.train.epochs - self.params.head_epochs,
            cross_entropy_step if measure is None else MeasuredStep(measure),
            kept=kept,
            train=self.body_training(),
            score_samples=True,
        )
        if memory is None:
            return training
        restorer = Restorer.of_params(self.params, len(memory), self.params.task_ranking)
        return replace(
            training,
            step=IntegratedStep(restorer, StoredGradients(restorer.dtype), self.params.margin, measure),
            kept={**kept, **zero_counts(self.context.device)},
            scratch=restorer.scratch(self.parts.trainable(trained).take(weights)),
            sets={MEMORY: memory},
        )


@dataclass(frozen=True)
class StoredGradients:
    """The gradients of stored samples, one per task, held in ``dtype``."""

    dtype: torch.dtype | None

    def __call__(self, view: StepView, batch: Samples, selected: Tensor | None) -> References:
        """Return the gradients of all tasks, or of those with these indices."""
        parts = view.parts(MEMORY, selected)
        return References(view.part_grads(cross_entropy, parts, self.dtype), parts.present)
