"""The results of a finished training, one per client."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from vitfleet.message import Tensors
from vitfleet.packing import pack_tensors
from vitfleet.training.local_training import LocalResult
from vitfleet.training.samples import Samples
from vitfleet.training.stacking.client_stack import ClientStack
from vitfleet.training.stacking.inputs import ClientTraining
from vitfleet.training.stacking.stack import unpad

SCORING_BATCH = 256  # images per client in one forward pass
SCORING_MULTIPLE = 64  # a compiled model is compiled for each number of images: it is rounded up, so that few occur


def local_results(
    stack: ClientStack, group: Sequence[ClientTraining], num_steps: Sequence[int], tensors_reused: bool
) -> list[LocalResult]:
    """Return the result of each client of a group, in tensors of its own, given the number of steps that each took.

    With ``tensors_reused`` the stack's tensors will be used for another training, and results are copies.
    """
    scores = _score_samples(stack, group) if group[0].training.score_samples else None

    def split(tensors: Tensors) -> list[dict[str, Tensor]]:
        """Return the tensors of each client, packed in one block of memory that can be kept and moved whole."""
        tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        if not stack.stacked:
            return [pack_tensors(tensors) if tensors_reused else tensors]
        rows = {name: tensor.unbind() for name, tensor in tensors.items()}
        return [pack_tensors({name: row[client] for name, row in rows.items()}) for client in range(stack.num_clients)]

    weights = split({name: stack.weights[name] for name in stack.training.trainable})
    kept = split(stack.inputs.kept.tensors)
    loss_sums = stack.loss_sum.clone().reshape(stack.num_clients)
    finite_steps = stack.finite_steps.clone().reshape(stack.num_clients)
    results: list[LocalResult] = []
    for client, (training, samples) in enumerate((member.training, len(member)) for member in group):
        loss = loss_sums[client] / max(1, samples * training.epochs)
        losses, logits = (loss.new_empty(0), loss.new_empty(0, 0)) if scores is None else scores[client]
        results.append(
            LocalResult(
                weights[client],
                loss,
                samples,
                num_steps[client],
                {name: unpad(kept[client][name], like) for name, like in training.kept.items()},
                losses,
                finite_steps[client],
                logits,
            )
        )
    return results


@torch.no_grad()
def _score_samples(stack: ClientStack, group: Sequence[ClientTraining]) -> list[tuple[Tensor, Tensor]]:
    """Return the loss and the logits of every sample under the trained weights, for each client."""
    engine, images = stack.engine, stack.images
    padded = torch.nn.utils.rnn.pad_sequence([client.shard.index for client in group], batch_first=True)
    if engine.compiled:
        padded = F.pad(padded, (0, -padded.shape[1] % SCORING_MULTIPLE))
    indices = padded if stack.stacked else padded[0]
    chunks: list[tuple[Tensor, Tensor]] = []
    # A client without samples has no chunk; torch.split would return an empty one.
    for chunk in torch.split(indices, SCORING_BATCH, dim=-1) if indices.shape[-1] else ():
        samples = Samples(images.labels[chunk], chunk, chunk, images.images[chunk])
        logits = engine.forward(stack.weights, samples).logits
        chunks.append((engine.sample_losses(logits, samples.labels), logits.float()))
    if not chunks:
        return [(stack.loss_sum.new_empty(0), stack.loss_sum.new_empty(0, 0)) for _ in group]
    losses = torch.cat([chunk_losses for chunk_losses, _ in chunks], dim=-1)
    all_logits = torch.cat([chunk_logits for _, chunk_logits in chunks], dim=-2)
    rows = zip(losses, all_logits, strict=True) if stack.stacked else [(losses, all_logits)]
    return [
        (row[: len(client.shard)].clone(), row_logits[: len(client.shard)].clone())
        for (row, row_logits), client in zip(rows, group, strict=True)
    ]
