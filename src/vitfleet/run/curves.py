"""TensorBoard scalars, where TensorBoard is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vitfleet.run.records import RoundRecord


class Curves:
    """Writes a run's curves; on resume the steps after the checkpoint are taken back."""

    def __init__(self, folder: Path, next_round: int) -> None:
        self._writer: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:  # an extra: the records hold everything the curves do
            return
        purge = next_round if next_round > 1 else None
        self._writer = SummaryWriter(folder / "tensorboard", purge_step=purge)

    def add(self, record: RoundRecord) -> None:
        """Write a round's scalars."""
        scalars = {
            "train/loss": record.loss,
            "train/lr": record.lr,
            "bytes/up_total": record.total_up_bytes,
            "bytes/down_total": record.total_down_bytes,
        }
        if record.accuracy is not None:
            scalars["accuracy/global"] = record.accuracy.global_
            scalars["accuracy/local"] = record.accuracy.local
            scalars["test/loss"] = record.accuracy.loss
        if record.learned is not None:
            scalars["continual/average_accuracy"] = record.learned.average_accuracy
            scalars["continual/forgetting"] = record.learned.forgetting
        if self._writer is None:
            return
        for name, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(name, value, record.round)

    def close(self) -> None:
        """Flush and close."""
        if self._writer is not None:
            self._writer.close()
