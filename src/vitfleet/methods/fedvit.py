"""FedViT: Zuo et al., "FedViT: Federated continual learning of vision transformer at edge", 2024.

Clients learn one task after the other; the body is federated, the head each client's own. In a round a client that
has taken part before first fine-tunes the aggregated body for an epoch, each step following the gradient of its own
body from before the aggregation, rotated to an acute angle with the aggregated one's (against negative transfer from
others). Then it trains the head with the body frozen, and the body with the head frozen, each step's gradient
integrated with those of the k old tasks that are most dissimilar to it (against forgetting). Knowledge of a task are
those of its samples that the model it trained names best.
"""

from __future__ import annotations

from vitfleet.config.methods import FedVitConfig
from vitfleet.message import Numbers, Tensors
from vitfleet.methods import knowledge
from vitfleet.methods.base import Job
from vitfleet.methods.body import Learned, Learning, SharedBody
from vitfleet.train.objective import Fit, Objective
from vitfleet.train.surgery import TUNING, Integrator, MostDissimilar, Rotation


class FedVit(SharedBody[FedVitConfig]):
    """Knowledge extractor, gradient restorer, gradient integrator."""

    name = "fedvit"

    def learn(self, job: Job, weights: Tensors) -> Learning:
        """Fine-tune after the aggregation, train the head, train the body with integration, extract knowledge."""
        params, anatomy = self.params, self.anatomy
        own: Tensors = {} if job.own is None else job.own.tensors
        known = knowledge.read(own)
        numbers: Numbers = {}
        if own and params.tune_epochs:
            rotation = Objective(anatomy.body, transform=Rotation(params.check))
            before = anatomy.trainable(anatomy.body).take(own)
            tuned = yield Fit(weights, rotation, params.tune_epochs, elsewhere=before)
            weights = {**weights, **tuned.weights}
            numbers = knowledge.counted(tuned, TUNING)
        if params.head_epochs:
            headed = yield Fit(weights, Objective(anatomy.head), params.head_epochs)
            weights = {**weights, **headed.weights}
        memory = knowledge.recall(known, job.stage)
        objective = Objective(anatomy.body)
        if memory:
            chooser = MostDissimilar(params.k, params.rank_every)
            objective = Objective(anatomy.body, transform=Integrator(params.check), chooser=chooser)
        fitted = yield Fit(
            weights, objective, self.setting.train.epochs - params.head_epochs, memory=memory, score=True
        )
        known = knowledge.store(known, job.stage, job.shard, fitted.losses, params, self.setting.stages)
        numbers = {**numbers, **knowledge.counted(fitted), **knowledge.told(known)}
        return Learned({**weights, **fitted.weights}, fitted, numbers, knowledge.write(known))

    def kept(self, said: Numbers, channels: int, side: int) -> Tensors:
        """Return the shapes of the stored samples."""
        return knowledge.imagine(said, channels, side, self.params, self.setting.stages)
