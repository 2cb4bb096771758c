"""What a client and a server tell their owners: lines in a file, which ``vitfleet client`` and ``server`` print.

Both work in processes that Flower starts and whose output is Flower's log. Their own lines are therefore passed on in a
file: a client's in its state folder, a server's in the folder of the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vitfleet.errors import printable

if TYPE_CHECKING:  # a device's first process reads the lines and does without torch
    from vitfleet.fleet.base import Reply
    from vitfleet.flower.transport.payloads import TrainPayload

ACTIVITY_FILE = "activity.log"  # in the folder of a client's files
FLEET_FILE = "fleet.log"  # in the folder of a server's run
MAX_BYTES = 2**20  # a longer file is begun anew
MAX_LINE = 1000  # characters; a server chooses some of them
MAX_RUN_ID = 80  # characters of a run's name, which is shown even if the run is refused for it


@dataclass(frozen=True)
class ActivityLog:
    """The file with the lines."""

    path: Path

    def add(self, text: str) -> None:
        """Append a text as one line, cut if it is long, without what a terminal would interpret."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size > MAX_BYTES:
            self.path.unlink()
        with self.path.open("a", encoding="utf-8") as file:
            file.write(printable(text, MAX_LINE) + "\n")


class ActivityReader:
    """Reads the lines that were added since it was made."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = path.stat().st_size if path.exists() else 0

    def new_lines(self) -> list[str]:
        """Return the complete lines that were added since the last call."""
        try:
            with self.path.open("rb") as file:
                if self._position > file.seek(0, 2):  # the file was begun anew
                    self._position = 0
                file.seek(self._position)
                complete, end, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:  # not written yet, or deleted
            self._position = 0
            return []
        self._position += len(complete) + len(end)
        return complete.decode(errors="replace").split("\n") if end else []


def round_line(payload: TrainPayload, reply: Reply) -> str:
    """Return what happened in a client's round."""
    which = f"run {printable(payload.run_spec.run_id, MAX_RUN_ID)}, round {payload.request.round}"
    if reply.message is None:
        return f"{which}: not trained: {reply.failure}"
    numbers, evaluation = reply.message.numbers, reply.evaluation
    if payload.request.kind != "round":
        return f"{which}: passed {numbers.get('samples', 0)} images through the model, for its head"
    loss = numbers.get("loss")
    parts = [f"{which}: trained on {numbers.get('samples', 0)} images"]
    if isinstance(loss, float):
        parts.append(f"loss {loss:.3f}")
    if evaluation is not None and evaluation.tested:
        parts.append(f"accuracy {evaluation.correct / evaluation.tested:.1%} on {evaluation.tested} own test images")
    return ", ".join(parts)
