"""The results of a finished training, one per client."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from vitfleet.message import Tensors
from vitfleet.packing import pack_tensors
from vitfleet.training.cohort import Cohort
from vitfleet.training.cohort_inputs import ClientFit
from vitfleet.training.objective import FitResult
from vitfleet.training.stack import unpad

SCORING_BATCH = 256  # images per client in one forward pass
SCORING_MULTIPLE = 64  # a compiled model is compiled for each number of images: it is rounded up, so that few occur


def fit_results(
    cohort: Cohort, group: Sequence[ClientFit], num_steps: Sequence[int], tensors_reused: bool
) -> list[FitResult]:
    """Return the result of each client of a group, in tensors of its own.

    Parameters
    ----------
    num_steps
        How many steps each client took.
    tensors_reused
        Whether the cohort's tensors will be used for another training, so that results have to be copied.
    """
    scores = _score_samples(cohort, group) if group[0].fit.score_samples else None

    def split(tensors: Tensors) -> list[dict[str, Tensor]]:
        """Return the tensors of each client, packed in one block of memory that can be kept and moved whole."""
        tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        if not cohort.stacked:
            return [pack_tensors(tensors) if tensors_reused else tensors]
        rows = {name: tensor.unbind() for name, tensor in tensors.items()}
        return [pack_tensors({name: row[client] for name, row in rows.items()}) for client in range(cohort.num_clients)]

    weights = split({name: cohort.weights[name] for name in cohort.objective.trainable})
    companions = split(cohort.inputs.companion_weights.tensors)
    observer_states, counts = split(cohort.inputs.observer_state.tensors), split(cohort.counts)
    loss_sums = cohort.loss_sum.clone().reshape(cohort.num_clients)
    finite_steps = cohort.finite_steps.clone().reshape(cohort.num_clients)
    results: list[FitResult] = []
    for client, client_fit in enumerate(group):
        fit, samples, state = client_fit.fit, len(client_fit), observer_states[client]
        observed = {name: unpad(state[name], like) for name, like in fit.observer_state.items()}
        loss = loss_sums[client] / max(1, samples * fit.epochs)
        losses, logits = (loss.new_empty(0), loss.new_empty(0, 0)) if scores is None else scores[client]
        results.append(
            FitResult(
                weights[client],
                loss,
                samples,
                num_steps[client],
                observed | counts[client],
                losses,
                finite_steps[client],
                logits,
                companions[client],
            )
        )
    return results


@torch.no_grad()
def _score_samples(cohort: Cohort, group: Sequence[ClientFit]) -> list[tuple[Tensor, Tensor]]:
    """Return the loss and the logits of every sample under the trained weights, for each client."""
    engine, images = cohort.engine, cohort.images
    weights = cohort.model_weights(cohort.weights, cohort.leaves)
    padded = torch.nn.utils.rnn.pad_sequence([client_fit.shard.index for client_fit in group], batch_first=True)
    if engine.compiled:
        padded = F.pad(padded, (0, -padded.shape[1] % SCORING_MULTIPLE))
    indices = padded if cohort.stacked else padded[0]
    chunks: list[tuple[Tensor, Tensor]] = []
    # A client without samples has no chunk; torch.split would return an empty one.
    for chunk in torch.split(indices, SCORING_BATCH, dim=-1) if indices.shape[-1] else ():
        outputs, _ = engine.forward(weights, images.images[chunk], None, None, cohort.objective.depth)
        logits, _ = engine.net.split_outputs(outputs)
        chunks.append((engine.sample_losses(logits, images.labels[chunk]), logits.float()))
    if not chunks:
        return [(cohort.loss_sum.new_empty(0), cohort.loss_sum.new_empty(0, 0)) for _ in group]
    losses = torch.cat([chunk_losses for chunk_losses, _ in chunks], dim=-1)
    all_logits = torch.cat([chunk_logits for _, chunk_logits in chunks], dim=-2)
    rows = zip(losses, all_logits, strict=True) if cohort.stacked else [(losses, all_logits)]
    return [
        (row[: len(client_fit.shard)].clone(), row_logits[: len(client_fit.shard)].clone())
        for (row, row_logits), client_fit in zip(rows, group, strict=True)
    ]
