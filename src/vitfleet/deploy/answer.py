"""What a device answers to a message: of a real one in its worker, of a simulated one in Flower's own process."""

from __future__ import annotations

from functools import cache, lru_cache
from pathlib import Path

import torch
from flwr.app import ConfigRecord, RecordDict

from vitfleet.config import read_config
from vitfleet.config.schema import Config, MachineConfig
from vitfleet.data.holdings import holdings
from vitfleet.data.images import DataSet
from vitfleet.data.manifest import Deal
from vitfleet.data.own import Form, OwnImages
from vitfleet.data.sources import load
from vitfleet.errors import UserError
from vitfleet.fleet.device import Device
from vitfleet.fleet.envelope import Terms, pack_marks, pack_reply, unpack_exam, unpack_order

KIND = "kind"  # of a message
TRAIN, EXAM = "train", "exam"


def answer(words: ConfigRecord, content: RecordDict) -> RecordDict:
    """Return a device's answer to the content of a message.

    Parameters
    ----------
    words
        The message's kind, and what the device says of itself: either where its images are and where it keeps things,
        or, of a simulated one, its number and the run's folder. And what it computes on.
    """
    given = {key: words[key] for key in ("device", "precision", "threads", "deterministic") if key in words}
    machine = MachineConfig.model_validate(given)
    if "folder" in words:
        device = simulated(Path(str(words["folder"])), int(str(words["client"])), machine)
    else:
        device = real(Path(str(words["data"])), Path(str(words["state"])), machine)
    if words[KIND] == TRAIN:
        return pack_reply(device.answer(unpack_order(content)))
    return pack_marks(device.sit(unpack_exam(content)))


@lru_cache(maxsize=1)
def real(data: Path, state: Path, machine: MachineConfig) -> Device:
    """Return a device with its own folder of images; it stays, with what it works with."""
    own = OwnImages(data, state / "images")

    def images(config: Config, terms: Terms) -> DataSet:
        form = Form(tuple(terms.classes), terms.channels, terms.side, config.data.test_share, config.data.max_corrupt)
        return own.load(form)

    return Device(images, state, machine)


def simulated(folder: Path, client: int, machine: MachineConfig) -> Device:
    """Return a device of Flower's simulation: its images are dealt from the run's own set, on the same machine."""
    if not (folder / "config.json").exists():
        raise UserError("a simulation needs --run-config 'folder=\"…\"', the absolute path of the run's folder")

    def images(config: Config, terms: Terms) -> DataSet:
        data, held = dealt(folder)
        train, test = (torch.from_numpy(deal.of(client)) for deal in held)
        return DataSet(data.name, data.classes, data.train.take(train), data.test.take(test))

    return Device(images, folder / "devices" / str(client), machine)


@cache
def dealt(folder: Path) -> tuple[DataSet, tuple[Deal, Deal]]:
    """Return a run's images and how they are dealt; a simulation's processes stay, so once is enough."""
    config = read_config(folder / "config.json")
    data = load(config.data)
    return data, holdings(config, data)
