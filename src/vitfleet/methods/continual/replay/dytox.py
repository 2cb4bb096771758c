"""DyTox: Douillard et al., "DyTox: Transformers for Continual Learning with DYnamic TOken eXpansion", 2022.

The model is an encoder of self-attention blocks and one task-attention block, whose query is a task token: the model's
last block (:mod:`vitfleet.models.variants.task_tokens`). Every task has a token and a head of its own; those of earlier
tasks are frozen. With the old classes O and all classes A that the client has met, a step minimises (section 3.3)

    (1 − |O|/|A|) L_clf + |O|/|A| L_kd + 0.1 L_div

over its batch and replayed samples of earlier tasks. L_clf is the binary cross-entropy of each class. L_kd is the
Kullback-Leibler divergence of the old classes' probabilities to those under the model after the previous task. L_div
is the binary cross-entropy of the divergence head, which sees the current token only: each class of the task, and one
class for all samples of earlier tasks. In a client's first task there is L_clf alone.

In the federation: the encoder and the task-attention block are the body and are averaged. Heads and the divergence
head never leave the client. Tokens are local too, or with ``tokens = "shared"`` the token of the task that a client
learns is averaged with those of the clients that learn the same task in that round, and a client begins a task with the
server's token. A learned token stays frozen on its client either way.

Decisions: the teacher is the body of the client's own model after its last round of earlier tasks, and is kept during
the task. Means over samples count batch and replayed samples alike; both L_clf and L_kd are means over classes, as in
the authors' code. Where the task of an image is known, L_clf compares the classes of its task, and L_kd has one softmax
per old task instead of one over all old classes. Stored samples are drawn at random (the paper: herding). The paper's
last epochs on a class-balanced set are left out, because a client does not know which of its rounds is the last of a
task.
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
from vitfleet.message import State, Tensors, add_prefix, with_prefix
from vitfleet.methods.base import ClientRoundInput, Work
from vitfleet.methods.continual.replay.experience_replay import REPLAY, drawn_before, with_draws
from vitfleet.methods.continual.stored_samples import MemoryMethod, StorageParams
from vitfleet.methods.personal.shared_body import ClientTraining
from vitfleet.methods.reported import ClientMetric
from vitfleet.models.parts import Selection
from vitfleet.models.variants.task_tokens import (
    CURRENT,
    DIVERGENCE,
    GROWN,
    NEW_TOKEN,
    PER_TASK,
    TEACHER,
    TOKEN,
    AuxiliaryOutputs,
    add_task_tokens,
    split_auxiliary,
)
from vitfleet.training.local_training import LocalTraining
from vitfleet.training.samples import Outputs, Samples
from vitfleet.training.step import StepView

_COUNTED, _OLD, _OLD_SHARE, _NEW_CLASSES = "counted", "old", "old_share", "new_classes"
_SENT_TOKEN = "task_token."
_EXCLUDED = -1e9  # logit of a class outside a softmax; finite, so that an empty softmax is


class DyToxParams(StorageParams):
    """A token and a head per task on a shared encoder, with distillation and replay (DyTox)."""

    replays: int = Field(1, ge=1, le=1000, description="stored samples drawn per sample of the batch")
    divergence: float = Field(0.1, ge=0, description="weight of the divergence head's loss")
    tokens: Literal["local", "shared"] = Field(
        "local",
        description="local: every client keeps its task tokens; shared: the current task's token is averaged over the "
        "clients that learn the task",
    )


@dataclass(frozen=True)
class DyToxStep:
    """The step; the classes that its loss counts are in the constants."""

    divergence: float  # weight of the divergence head's loss
    replays: int  # replayed samples per sample of the batch; 0 where there are none

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        """Return the gradients to apply."""
        return view.grad(self.loss, batch, *([view.drawn(REPLAY)] if self.replays else []))

    def loss(self, batch: Outputs, replayed: Outputs | None = None) -> Tensor:
        """Return the loss of a step."""
        logits, labels, sample_weight, auxiliary = batch.logits, batch.labels, batch.sample_weight, batch.auxiliary
        constants, is_old = batch.constants, torch.zeros_like(labels)
        if replayed is not None:
            replays = self.replays
            logits, labels = torch.cat([logits, replayed.logits]), torch.cat([labels, replayed.labels])
            sample_weight = torch.cat([sample_weight, replays * replayed.sample_weight]) / (1 + replays)
            is_old = torch.cat([is_old, torch.ones_like(replayed.labels)])
            if auxiliary is not None and replayed.auxiliary is not None:
                auxiliary = torch.cat([auxiliary, replayed.auxiliary])
        classification = torch.dot(class_losses(logits, labels, constants[_COUNTED]), sample_weight)
        if auxiliary is None:
            return classification
        outputs = split_auxiliary(auxiliary, logits.shape[-1])
        distillation = torch.dot(distillation_losses(outputs, constants[_OLD]), sample_weight)
        is_new_class = labels.unsqueeze(-1) == constants[_NEW_CLASSES]
        targets = torch.cat([is_old.unsqueeze(-1), is_new_class], dim=-1).float()
        divergence = F.binary_cross_entropy_with_logits(outputs.divergence, targets, reduction="none").mean(dim=-1)
        share = constants[_OLD_SHARE]
        loss = (1 - share) * classification + share * distillation
        return loss + self.divergence * torch.dot(divergence, sample_weight)


def class_losses(logits: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
    """Return each sample's binary cross-entropy: the mean over the classes that count and are possible.

    ``counted`` is 1 for each class that the client has met, else 0. A logit of −∞ marks an impossible class.
    """
    is_label = labels.unsqueeze(-1) == torch.arange(logits.shape[-1], device=labels.device)
    possible = (counted > 0) & (logits > -torch.inf)
    finite = torch.where(possible, logits.float(), 0.0)
    losses = F.binary_cross_entropy_with_logits(finite, is_label.float(), reduction="none")
    return (losses * possible).sum(dim=-1) / possible.sum(dim=-1)


def distillation_losses(outputs: AuxiliaryOutputs, old: Tensor) -> Tensor:
    """Return each sample's Kullback-Leibler divergence to the teacher: the mean over the old classes.

    ``old``, ``[groups, classes]``, is 1 for the old classes of each group that has a softmax of its own.
    """

    def log_probabilities(logits: Tensor) -> Tensor:
        return torch.where(old > 0, logits.unsqueeze(-2), _EXCLUDED).log_softmax(dim=-1)

    taught, learned = log_probabilities(outputs.teacher_logits), log_probabilities(outputs.logits)
    return (taught.exp() * (taught - learned) * old).sum(dim=(-2, -1)) / old.sum()


@register_method("dytox", DyToxParams, title="DyTox")
class DyTox(MemoryMethod[DyToxParams]):
    """Dynamic token expansion."""

    client_metrics = (
        *MemoryMethod.client_metrics,
        ClientMetric("tokens", "task tokens, client with most", "max", form="count"),
        ClientMetric("distilled", "rounds with a teacher", "sum", form="count", most=1),
    )

    @classmethod
    def adapt_model(cls, params: DyToxParams, vit: nn.Module, class_to_task: Sequence[int]) -> None:
        """Turn the model's last block into the task-attention block, with a token and a head per task."""
        add_task_tokens(vit, class_to_task)

    @classmethod
    def declared_work(cls, params: DyToxParams, config: Config) -> Work:
        """Return the work with samples that are stored and drawn."""
        return with_draws(super().declared_work(params, config), params.replays)

    @property
    def trainable(self) -> Selection:
        """The body, the token and the head of the current task, and the divergence head."""
        new = Selection((*PER_TASK.values(), *DIVERGENCE))
        return self.parts.union(self.parts.body, new)

    # Server

    def initial_state(self, initial_weights: Tensors) -> State:
        """Return the initial body, with shared tokens also each task's initial token."""
        tokens = initial_weights[TOKEN].unbind() if self.params.tokens == "shared" else ()
        sent = {f"{_SENT_TOKEN}{task}": token.clone() for task, token in enumerate(tokens)}
        return State({**super().initial_state(initial_weights).tensors, **sent})

    # Client

    def local_training(self, job: ClientRoundInput, weights: Tensors) -> ClientTraining:
        """Train the body with the token and the head of the current task; store random samples of the task."""
        stored = self.stored_tasks(job)
        # The task that the client's samples belong to; None without samples.
        task = self.context.class_to_task[int(job.shard.labels[0])] if len(job.shard) else None
        begins = job.task_index not in stored
        weights = self.parts.whole.take(weights)
        constants = self.loss_constants(weights[GROWN], task)
        if task is not None:
            weights = self.with_current_task(job, weights, task, begins)
        teacher = add_prefix(TEACHER, self.teacher(job, begins))
        replayed = drawn_before(stored, job.task_index, self.params.replays)
        result = yield LocalTraining(
            {**weights, **teacher},
            self.trainable,
            self.context.train.epochs,
            DyToxStep(self.params.divergence, 0 if replayed is None else self.params.replays),
            constants=constants,
            sets={} if replayed is None else {REPLAY: replayed},
        )
        local = self.with_memory(job, weights, result, self.random_scores(job), {"distilled": int(bool(teacher))})
        trained = local.weights if task is None else committed(local.weights, task)
        sent = {f"{_SENT_TOKEN}{task}": trained[NEW_TOKEN]} if self.params.tokens == "shared" else {}
        numbers = {**local.numbers, "tokens": len(stored) + (begins and task is not None)}
        kept = {**local.extra_state, **teacher}
        return replace(local, weights=trained, numbers=numbers, extra_state=kept, also_sent=sent)

    def teacher(self, job: ClientRoundInput, begins: bool) -> Tensors:
        """Return the body of the client's model after its earlier tasks; empty in its first task.

        In its first round of a task, where the task ``begins``, its body has not been trained on the task yet.
        """
        kept = {} if job.client_state is None else job.client_state.tensors
        if begins:
            return self.parts.body.take(kept) if self.stored_tasks(job) else {}
        return with_prefix(kept, TEACHER)

    def with_current_task(self, job: ClientRoundInput, weights: Tensors, task: int, begins: bool) -> dict[str, Tensor]:
        """Return weights in which a task's token and head are those in training.

        In its first round of a task, where the task ``begins``, the client has a new divergence head.
        """
        changed = {new: weights[of_all][task].clone() for of_all, new in PER_TASK.items()}
        received = job.message.tensors.get(f"{_SENT_TOKEN}{task}")
        if received is not None:
            changed[NEW_TOKEN] = received
        if begins:
            changed |= {name: job.base_weights[name] for name in DIVERGENCE}
        current, grown = torch.zeros_like(weights[CURRENT]), weights[GROWN].clone()
        current[task] = grown[task] = 1
        return {**weights, **changed, CURRENT: current, GROWN: grown}

    def loss_constants(self, grown: Tensor, task: int | None) -> dict[str, Tensor]:
        """Return the constants of the loss.

        ``grown`` is 1 for each task that the client has learned, the current one among them or not.
        """
        class_to_task = torch.tensor(self.context.class_to_task, device=grown.device)
        old_tasks, current = grown.clone(), 0 if task is None else task
        old_tasks[current] = 0
        known_tasks = old_tasks.clone()
        known_tasks[current] = 1
        of_task = (class_to_task == torch.arange(len(grown), device=grown.device).unsqueeze(-1)).float()
        old = old_tasks.unsqueeze(-1) * of_task  # [tasks, classes]
        counted = known_tasks @ of_task
        new_classes = [label for label, of in enumerate(self.context.class_to_task) if of == current]
        return {
            _COUNTED: counted,
            _OLD: old if self.context.config.task_known else old.sum(dim=0, keepdim=True),
            _OLD_SHARE: old.sum() / counted.sum(),
            _NEW_CLASSES: torch.tensor(new_classes, device=grown.device),
        }


def committed(weights: Tensors, task: int) -> dict[str, Tensor]:
    """Return weights in which the token and the head in training are also those of their task."""
    changed = {of_all: weights[of_all].clone() for of_all in PER_TASK}
    for of_all, new in PER_TASK.items():
        changed[of_all][task] = weights[new]
    return {**weights, **changed}
