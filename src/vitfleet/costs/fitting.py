"""What would fit into a device whose memory cannot hold a training: a smaller batch, masked images, another method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitfleet.config.fleet import DeviceName
from vitfleet.config.load import validate
from vitfleet.config.schema import Config
from vitfleet.costs.hardware_profiles import HARDWARE_PROFILES, RESERVED_BYTES
from vitfleet.costs.report import CostReport, method_config, training_bytes
from vitfleet.errors import UserError

TRIED_MASK_RATIOS = (0.5, 0.75)


@dataclass(frozen=True)
class Remedy:
    """Changes after which a training fits into a device; each alone is enough."""

    device: DeviceName
    batch_size: int | None  # a ``train.batch_size`` that fits; ``None``: not even one image fits
    mask_ratio: float | None  # the smallest of the tried values of ``train.mask_ratio`` that fits; ``None``: none does
    methods: tuple[str, ...]  # methods of the same cost reports that fit


def find_remedies(config: Config, reports: Sequence[CostReport], devices: Sequence[DeviceName]) -> list[Remedy]:
    """Return what would fit into each of the devices that cannot hold the training of the first report."""
    report, others = reports[0], reports[1:]
    unfit = [device for device in devices if not report.devices[device]["fits_memory"]]
    if not unfit:
        return []
    config = method_config(config, report.method)
    single_image = _bytes_with(config, {"batch_size": 1})
    masked = {
        ratio: size
        for ratio in TRIED_MASK_RATIOS
        if ratio > report.mask_ratio and (size := _bytes_with(config, {"mask_ratio": ratio})) is not None
    }
    return [
        Remedy(
            device,
            largest_batch(single_image, report.peak_memory_bytes, config.train.batch_size, _free_bytes(device)),
            next((ratio for ratio, size in masked.items() if size <= _free_bytes(device)), None),
            tuple(other.method for other in others if other.devices[device]["fits_memory"]),
        )
        for device in unfit
    ]


def largest_batch(single_image: int | None, batch: int, batch_size: int, free: int) -> int | None:
    """Return a batch size whose training fits into so many free bytes; ``None`` if one image does not.

    Every allocation of a step grows linearly with the batch, so the peak, the largest sum of some of them, is a convex
    function of it: on a straight line between two batch sizes lies at least what those between them need. The line is
    that from the bytes of a ``single_image`` to those of a ``batch`` of ``batch_size`` images.
    """
    if single_image is None or single_image > free:
        return None
    per_image = (batch - single_image) / max(1, batch_size - 1)
    return batch_size if batch <= free else 1 + int((free - single_image) / per_image)


def _free_bytes(device: DeviceName) -> int:
    return HARDWARE_PROFILES[device].memory_bytes - RESERVED_BYTES


def _bytes_with(config: Config, train: Mapping[str, Any]) -> int | None:
    """Return the memory of the training with other settings; ``None`` where method or model do not support them."""
    tree = config.model_dump(mode="json")
    tree["train"] |= train
    try:
        return training_bytes(validate(tree))
    except UserError:
        return None
