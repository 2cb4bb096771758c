"""The client's step of DP-SGD: Abadi et al., "Deep Learning with Differential Privacy", CCS 2016 (Algorithm 1).

FedAvg whose clients follow a noisy mean of clipped gradients of single images. For a batch L_t of a client,

    ḡ(x_i) = g(x_i) / max(1, ‖g(x_i)‖/C),    g̃ = 1/|L_t| (Σ_i ḡ(x_i) + N(0, σ²C² I)).

The gradient of an image is that of the image in the batch: augmented and masked as there. The noise is drawn from the
client's own random address, so it does not depend on which clients train together, or where, and a run resumes with the
same bits. It is reproducible from the seed: who wants privacy keeps the seed secret.

Decisions and limits:

- Batches are cut from a permutation of the client's images, as everywhere here. An accountant that assumes Poisson
  sampling, as the paper's does, states an ε that is not proved for them. No ε is computed here.
- |L_t| is the size of the batch itself; the last one of an epoch may be smaller.
- The reported loss and the number of images are exact: they are not private.
- AdamW and momentum see g̃ only; what follows from it costs no more privacy.

    vitfleet run digits --plugin dp_sgd.py -o method.name=dp-sgd -o method.clip=1 -o method.noise=0.5
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
from pydantic import Field

from vitfleet import register_method
from vitfleet.config.base import MethodParams
from vitfleet.config.schema import Config
from vitfleet.errors import ConfigError
from vitfleet.message import Message, Tensors
from vitfleet.methods.averaging.fedavg import WeightAveraging
from vitfleet.methods.base import ClientGenerator, ClientRoundInput, ClientUpdate, train_metrics
from vitfleet.training.local_training import LocalTraining
from vitfleet.training.samples import Samples, cross_entropy
from vitfleet.training.step import StepView

NOISE = "dp-noise"  # the purpose of the random numbers


class DpSgdParams(MethodParams):
    """FedAvg with clipped and noisy gradients of single images on the client (Abadi et al., 2016)."""

    clip: float | None = Field(1.0, gt=0, description="largest norm C of the gradient of an image; null: any")
    noise: float = Field(1.0, ge=0, description="noise multiplier σ: the noise's deviation is σC / images of the batch")


@register_method("dp-sgd", DpSgdParams, title="DP-SGD")
class DpSgd(WeightAveraging[DpSgdParams]):
    """FedAvg with another step, which draws random numbers."""

    @classmethod
    def check_config(cls, params: DpSgdParams, config: Config) -> None:
        """Check that the noise has a scale."""
        super().check_config(params, config)
        if params.clip is None and params.noise:
            raise ConfigError("method.noise", params.noise, "must be 0 without method.clip, to which it is relative")

    def client_update(self, job: ClientRoundInput) -> ClientGenerator:
        """Train the received weights and send them back."""
        received = {**job.base_weights, **job.message.tensors}
        step = PrivateStep(self.params.clip or inf, self.params.noise)
        result = yield LocalTraining(received, self.trainable, self.context.train.epochs, step, random=(NOISE,))
        sent = result.weights if result.samples else {}
        return ClientUpdate(Message(sent, train_metrics(result)), {**received, **result.weights})


@dataclass(frozen=True)
class PrivateStep:
    """Follows g̃, the noisy mean of the clipped gradients of the batch's images."""

    clip: float
    noise: float

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        """Return g̃."""
        if self.clip == inf:
            # The mean of the gradients of all images is the gradient of the batch: one pass, and FedAvg's very bits.
            return view.grad(cross_entropy, batch)
        each = view.per_sample_grad(cross_entropy, batch)
        return view.map(self.noisy_mean, each, batch, view.normal(NOISE, like=view.weights))

    def noisy_mean(self, each: Tensors, batch: Samples, normal: Tensors) -> Tensors:
        """Return g̃ of one client; the gradients ``[batch, …]`` of padding are zero."""
        norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in each.values()]).norm(dim=0)
        scale = 1 / (norms / self.clip).clamp(min=1)
        size = (batch.sample_weight > 0).sum().clamp(min=1)  # a client without this step has nothing but padding
        sums = {name: torch.tensordot(scale, gradient, dims=1) for name, gradient in each.items()}
        return {name: (total + self.noise * self.clip * normal[name]) / size for name, total in sums.items()}
