"""EFTViT's server: the store of the features that clients sent, one part of the server's state per client."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from vitfleet.data.features import Features
from vitfleet.message import Message, State, Tensors, label_dtype, to_device
from vitfleet.methods.aggregation.limits import check_rms
from vitfleet.methods.aggregation.weighted_mean import WeightedMean, norm_outliers
from vitfleet.methods.base import Aggregator, MethodContext
from vitfleet.methods.reported import RejectedUpdateError

FEATURE_NAMES = ("features", "labels", "scales")


class FeatureStoreUpdate(Aggregator):
    """Replaces the stored features of each client by those it sent.

    Parameters
    ----------
    dtype
        Data type in which features are sent and stored.
    keep_previous
        Whether the latest features of all clients are stored (section 3.6), or only those of this round (section 3.5).
    device
        Where the features are stored.
    local_modules
        Aggregates the local modules that clients send with their features; ``None``: they send none.
    """

    def __init__(
        self,
        server_state: State,
        context: MethodContext,
        round: int,
        dtype: torch.dtype,
        keep_previous: bool = True,
        device: torch.device | None = None,
        local_modules: WeightedMean | None = None,
    ) -> None:
        self.server_state = server_state
        self.context = context
        self.round = round
        self.local_modules = local_modules
        self.dtype = dtype
        self.device = device or torch.device("cpu")
        self.previous_parts = dict(server_state.parts) if keep_previous else {}
        self.parts = dict(self.previous_parts)
        self.sizes: dict[int, float] = {}

    def add(self, client: int, message: Message) -> None:
        """Store a client's features in place of its previous ones."""
        if not message.tensors:
            return
        features = {name: tensor for name, tensor in message.tensors.items() if name in FEATURE_NAMES}
        others = {name: tensor for name, tensor in message.tensors.items() if name not in FEATURE_NAMES}
        check_features(features, self.context, self.dtype)
        rms = self._checked_rms(features)
        if self.local_modules is not None:
            self.local_modules.earlier_sizes = ()  # those of the round before are of features
            self.local_modules.add(client, replace(message, tensors=others))
        elif others:
            raise RejectedUpdateError(f"its message has an unknown tensor {min(others)!r}")
        part = State(to_device(features, self.device), {"round": self.round})
        self.parts[part_name(client)] = part
        self.sizes[client] = rms

    def _checked_rms(self, features: Tensors) -> float:
        """Return the root mean square of a client's features, if they are within the limits."""
        config, rms = self.context.aggregation, features_of(State(features)).rms()
        if not math.isfinite(rms):
            raise RejectedUpdateError("its features are not finite")
        if config.max_change is not None and rms > config.max_change:  # as of a weight that starts at zero
            raise RejectedUpdateError(
                f"its features have the size {rms:.3g}; aggregate.max_change = {config.max_change:g}"
            )
        check_rms(rms, [*self.earlier_sizes, *self.sizes.values()], config, floor=0.0)
        return rms

    def finish(self) -> State:
        """Return the server's state with the new features. Features that are outliers replace no previous ones."""
        self.rejected = norm_outliers(self.sizes, self.context.aggregation.norm_factor)
        tensors = self.server_state.tensors
        if self.local_modules is not None:
            tensors = self.local_modules.finish().tensors
            self.rejected = {**self.local_modules.rejected, **self.rejected}
        for name in map(part_name, self.rejected):
            if name in self.previous_parts:
                self.parts[name] = self.previous_parts[name]
            else:
                del self.parts[name]
        return replace(self.server_state, tensors=tensors, parts=self.parts)


def check_features(tensors: Tensors, context: MethodContext, dtype: torch.dtype) -> None:
    """Reject features that cannot be trained on.

    Raises
    ------
    RejectedUpdateError
        The reason.
    """
    features, labels, scales = (tensors.get(name) for name in FEATURE_NAMES)
    if features is None or labels is None:
        raise RejectedUpdateError("its message has no features and labels")
    is_quantized = dtype == torch.int8
    if scales is not None and not is_quantized:
        raise RejectedUpdateError("its message has an unknown tensor 'scales'")
    if labels.dim() != 1 or labels.dtype != label_dtype(context.num_classes):
        raise RejectedUpdateError(
            f"its labels are {labels.dtype} {tuple(labels.shape)}; expected: a vector of "
            f"{label_dtype(context.num_classes)}"
        )
    shape = (len(labels), context.num_tokens, context.embed_dim)
    if tuple(features.shape) != shape:
        raise RejectedUpdateError(f"its features have the shape {tuple(features.shape)}; expected: {shape}")
    if features.dtype != dtype:
        raise RejectedUpdateError(f"its features are {features.dtype}; expected: {dtype}")
    if is_quantized and (scales is None or tuple(scales.shape) != shape[:2]):
        raise RejectedUpdateError("its features have no scales, or not one per token")
    if len(labels) and (int(labels.min()) < 0 or int(labels.max()) >= context.num_classes):
        raise RejectedUpdateError(f"its labels are not all between 0 and {context.num_classes - 1}")


def part_name(client: int) -> str:
    """Return the name of a client's part of the server's state."""
    return f"features-{client:06d}"


def stored_in(part: State) -> int:
    """Return the round in which a part of the server's state was sent."""
    round = part.numbers["round"]
    assert isinstance(round, int)
    return round


def features_of(part: State) -> Features:
    """Return the features in a part of the server's state."""
    return Features(part.tensors["features"], part.tensors["labels"], part.tensors.get("scales"))
