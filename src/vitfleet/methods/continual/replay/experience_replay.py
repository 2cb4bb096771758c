"""Experience replay: every step also trains on stored samples of earlier tasks. ER, DER++ and their base class.

Body and head are trained together. At the end of every round the client stores a random fraction ρ of each class of its
current task, the same samples in every round of the task. The papers fill their memory by reservoir sampling, because
their stream does not tell where a task ends; here it does, and every task keeps its share. A step draws from the
samples of earlier tasks only, uniformly and with replacement; they are augmented and masked as the batch is. The body
is shared; heads are local by default.

**ER**: Chaudhry et al., "On Tiny Episodic Memories in Continual Learning", 2019. A step minimises the cross-entropy ℓ
of its batch B and of as many samples B_M drawn from the memory M of earlier tasks (algorithm 1 there): mean over B of ℓ
+ mean over B_M of ℓ. The paper takes the mean over B ∪ B_M, which is half of this sum. Here the terms are added, as in
DER++, so that the batch counts as much as in the first task.

**DER++**: Buzzega et al., "Dark Experience for General Continual Learning: a Strong, Simple Baseline", 2020. The memory
M holds samples x with their labels y and the model's logits z when they were stored. A step minimises (equation 6
there, h_θ are the logits)

    ℓ(y, h_θ(x)) on the batch + α E_{(x', z') ~ M} ‖z' − h_θ(x')‖² + β E_{(x'', y'') ~ M} ℓ(y'', h_θ(x''))

The two terms draw their samples independently, as the paper's algorithm 2 does. β = 0 is DER. Decisions: the squared
distance is the mean over the classes, as in the authors' code, to which the defaults α = 0.1 and β = 0.5 belong (their
choice for CIFAR-10 with 200 samples). Logits are stored at the end of a client's round, under the model that it has
just trained, of the image without augmentation. Those of the current task are replaced in every round; what remains is
from the client's last round in the task. Where the task of an image is known, only the logits of the stored sample's
own task are compared, and the mean is over these.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from vitfleet.config.registry import register_method
from vitfleet.config.schema import Config
from vitfleet.message import Tensors
from vitfleet.methods.base import ClientRoundInput, Work
from vitfleet.methods.continual.stored_samples import MemoryMethod, StorageParams, StoredTasks, merge_tasks
from vitfleet.methods.personal.shared_body import ClientTraining, HeadsParams
from vitfleet.training.local_training import LocalTraining, SampleSet
from vitfleet.training.samples import Outputs, Samples, cross_entropy
from vitfleet.training.step import Step, StepView

REPLAY = "replay"  # the set of stored samples that a step draws from


class ReplayParams(StorageParams, HeadsParams):
    """Parameters of all methods that replay stored samples."""

    replays: int = Field(
        1, ge=1, le=1000, description="stored samples drawn per sample of the batch, for each replay term"
    )

    @property
    def draws(self) -> int:
        """How many stored samples a step draws per sample of its batch."""
        return self.replays


Params = TypeVar("Params", bound=ReplayParams)


def drawn_before(stored: StoredTasks, task_index: int, draws: int) -> SampleSet | None:
    """Return the stored samples of the tasks before ``task_index`` as one set of which steps draw.

    ``draws`` is how many per sample of the batch. ``None``: there are no samples, or none are to be drawn.
    """
    tasks = [stored[index] for index in sorted(stored) if index < task_index]
    if not tasks or not draws:
        return None
    merged = merge_tasks(tasks)
    logits = {} if merged.logits is None else {"logits": merged.logits[None]}
    return SampleSet(merged.images[None], merged.labels.long()[None], (len(merged),), draws, stored=logits)


def with_draws(work: Work, draws: int) -> Work:
    """Return the work of steps that draw so many stored samples per sample of their batch."""
    return replace(work, images_per_step=(1 + draws) * work.images_per_step)


class ReplayMethod(MemoryMethod[Params]):
    """Shared body; a step draws stored samples."""

    @classmethod
    def declared_work(cls, params: Params, config: Config) -> Work:
        """Return the work with samples that are stored and drawn."""
        return with_draws(super().declared_work(params, config), params.draws)

    @property
    @abstractmethod
    def replay_step(self) -> Step:
        """The step of a client that has stored samples of earlier tasks."""

    def local_training(self, job: ClientRoundInput, weights: Tensors) -> ClientTraining:
        """Train body and head with replayed samples; store random samples of the task."""
        training = LocalTraining(weights, self.trainable, self.context.train.epochs, score_samples=self.stores_logits)
        stored = drawn_before(self.stored_tasks(job), job.task_index, self.params.draws)
        if stored is not None:
            training = replace(training, step=self.replay_step, sets={REPLAY: stored})
        result = yield training
        return self.with_memory(job, weights, result, self.random_scores(job), {})


class ErParams(ReplayParams):
    """Every step also trains on stored samples of earlier tasks (experience replay)."""


def er_loss(batch: Outputs, replayed: Outputs) -> Tensor:
    """Return the cross-entropy of the batch, plus that of the replayed samples."""
    return cross_entropy(batch) + cross_entropy(replayed)


def er_step(view: StepView, batch: Samples) -> Tensors:
    """Return the gradients to apply."""
    return view.grad(er_loss, batch, view.drawn(REPLAY))


@register_method("er", ErParams, title="ER")
class ExperienceReplay(ReplayMethod[ErParams]):
    """Experience replay."""

    @property
    def replay_step(self) -> Step:
        """The step with the cross-entropy of batch and replayed samples."""
        return er_step


class DerPlusPlusParams(ReplayParams):
    """Experience replay that also keeps the logits of the stored samples (DER++)."""

    alpha: float = Field(0.1, ge=0, description="weight α of the squared distance to the stored logits")
    beta: float = Field(0.5, ge=0, description="weight β of the cross-entropy of replayed samples; 0: DER")

    @property
    def draws(self) -> int:
        """How many stored samples a step draws per sample of its batch: each term with a weight draws its own."""
        return self.replays * sum(weight > 0 for weight in (self.alpha, self.beta))


@dataclass(frozen=True)
class DarkExperienceStep:
    """The step of DER++. Of each batch sample's replayed samples, the first are for α, the last for β."""

    alpha: float
    beta: float
    replays: int  # samples per sample of the batch that each of the two terms draws

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        """Return the gradients to apply."""
        return view.grad(self.loss, batch, view.drawn(REPLAY))

    def loss(self, batch: Outputs, replayed: Outputs) -> Tensor:
        """Return the loss of a step."""
        loss = cross_entropy(batch)
        # The replayed samples of a batch sample are neighbours, and the terms with a weight share them equally.
        terms = [weight for weight in (self.alpha, self.beta) if weight]
        drawn = len(terms) * self.replays
        place = torch.arange(replayed.labels.shape[0], device=replayed.labels.device) % drawn
        if self.alpha:
            loss = loss + self.alpha * torch.dot(
                logit_distances(replayed), _share(replayed, place < self.replays, terms)
            )
        if self.beta:
            losses = F.cross_entropy(replayed.logits.float(), replayed.labels, reduction="none")
            loss = loss + self.beta * torch.dot(losses, _share(replayed, place >= drawn - self.replays, terms))
        return loss


def logit_distances(replayed: Outputs) -> Tensor:
    """Return the mean squared distance of each sample's logits to the stored ones, over the classes of its task."""
    compared = replayed.logits > -torch.inf
    difference = torch.where(compared, replayed.logits.float() - replayed.stored["logits"], 0.0)
    return difference.square().sum(dim=-1) / compared.sum(dim=-1)


def _share(replayed: Outputs, selected: Tensor, terms: list[float]) -> Tensor:
    """Return the sample weights of one term's samples; they sum to one, as those of all samples do."""
    return replayed.sample_weight * selected * len(terms)


@register_method("der++", DerPlusPlusParams, title="DER++")
class DerPlusPlus(ReplayMethod[DerPlusPlusParams]):
    """Dark experience replay with labels."""

    stores_logits = True

    @property
    def replay_step(self) -> Step:
        """The step with α and β."""
        return DarkExperienceStep(self.params.alpha, self.params.beta, self.params.replays)
