"""EFTViT's client: records the patch features of a sampling plan during training, in the precision that is sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vitfleet.data.features import quantize
from vitfleet.message import Tensors, label_dtype
from vitfleet.methods.base import MethodContext
from vitfleet.methods.split.median_sampling import SamplingPlan
from vitfleet.training.samples import Outputs, Samples, cross_entropy
from vitfleet.training.step import StepView

FEATURE_DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
}
SIZE_MULTIPLE = 32  # sizes are rounded up to a multiple of this, so that shapes recur from client to client


def recording_buffers(plan: SamplingPlan, feature_dtype: str, context: MethodContext) -> dict[str, Tensor]:
    """Return the observer's initial state: empty rows for the features to record, and the plan's rows.

    At least one additional row receives the features that are not recorded.
    """
    num_rows = _round_up(plan.num_recorded + 1)
    shape = (num_rows, context.num_tokens, context.embed_dim)
    buffers = {"features": torch.zeros(shape, dtype=FEATURE_DTYPES[feature_dtype], device=context.device)}
    if feature_dtype == "int8":
        buffers["scales"] = torch.ones(shape[:2], device=context.device)
    rows = torch.from_numpy(plan.rows)
    return {**buffers, "rows": F.pad(rows, (0, _round_up(rows.shape[1]) - rows.shape[1])).to(context.device)}


def _round_up(size: int) -> int:
    return -(-size // SIZE_MULTIPLE) * SIZE_MULTIPLE


@dataclass(frozen=True)
class FeatureStep:
    """Follows the gradient of the cross-entropy of features that enter the model at the split: the server's step."""

    split: int

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        """Return the gradients to apply."""
        return view.grad(cross_entropy, batch, split=self.split)


@dataclass(frozen=True)
class RecordingStep:
    """Records the features of the sampling plan; follows the gradient of the cross-entropy, if anything trains."""

    split: int
    feature_dtype: str
    trains: bool

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        """Return the gradients to apply."""
        if not self.trains:
            view.keep(view.map(self.record, view.kept, view.features(batch, self.split)))
            return {}
        computed = view.value_and_grad(cross_entropy, batch, split=self.split)
        view.keep(view.map(self.record, view.kept, computed.outputs[0]))
        return computed.gradients

    def record(self, kept: Tensors, outputs: Outputs) -> Tensors:
        """Write the features of one step to their rows, in place."""
        assert outputs.features is not None
        features = outputs.features.detach().float()
        # The last row is never sent; padding is written to it.
        last_row = kept["features"].shape[0] - 1
        # A scalar index would be read by the host; an index tensor with one element is not.
        epoch_rows = kept["rows"].index_select(0, outputs.epoch.reshape(1)).squeeze(0)
        rows = torch.where(outputs.sample_weight > 0, epoch_rows[outputs.positions], last_row)
        if self.feature_dtype == "int8":
            features, scales = quantize(features)
            kept["scales"].index_put_((rows,), scales)
        kept["features"].index_put_((rows,), features.to(FEATURE_DTYPES[self.feature_dtype]))
        return kept


def balanced_features(plan: SamplingPlan, kept: Tensors, num_classes: int) -> dict[str, Tensor]:
    """Return the tensors that are sent, with the same number of samples of every class."""
    if not plan.num_recorded:
        return {}
    sent_rows = torch.from_numpy(plan.sent_rows).to(kept["features"].device)
    tensors = {name: kept[name][sent_rows] for name in ("features", "scales") if name in kept}
    return {**tensors, "labels": torch.from_numpy(plan.sent_labels).to(label_dtype(num_classes))}
