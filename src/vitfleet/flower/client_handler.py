"""What a device answers to a message: of a real one in its worker, of a simulated one in Flower's own process."""

from __future__ import annotations

from functools import cache, lru_cache
from pathlib import Path

import torch
from flwr.app import ConfigRecord, RecordDict

from vitfleet.config import read_config
from vitfleet.config.schema import Config, MachineConfig
from vitfleet.data.assignment import assign_images
from vitfleet.data.client_indices import ClientIndices
from vitfleet.data.images import DataSet
from vitfleet.data.local_dataset import DataSpec, LocalDataset
from vitfleet.data.sources import load
from vitfleet.errors import UserError
from vitfleet.flower.client import FlowerClient
from vitfleet.flower.codec import pack_eval_reply, pack_reply, unpack_eval_request, unpack_train_request
from vitfleet.flower.payloads import RunSpec

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
        return pack_reply(device.train(unpack_train_request(content)))
    return pack_eval_reply(device.evaluate(unpack_eval_request(content)))


@lru_cache(maxsize=1)
def real(data: Path, state: Path, machine: MachineConfig) -> FlowerClient:
    """Return a device with its own folder of images; it stays, with what it works with."""
    own = LocalDataset(data, state / "images")

    def images(config: Config, run_spec: RunSpec) -> DataSet:
        form = DataSpec(
            tuple(run_spec.classes), run_spec.channels, run_spec.side, config.data.test_share, config.data.max_corrupt
        )
        return own.load(form)

    return FlowerClient(images, state, machine)


def simulated(folder: Path, client: int, machine: MachineConfig) -> FlowerClient:
    """Return a device of Flower's simulation: its images are dealt from the run's own set, on the same machine."""
    if not (folder / "config.json").exists():
        raise UserError("a simulation needs --run-config 'folder=\"…\"', the absolute path of the run's folder")

    def images(config: Config, run_spec: RunSpec) -> DataSet:
        data, held = dealt(folder)
        train, test = (torch.from_numpy(deal.for_client(client)) for deal in held)
        return DataSet(data.name, data.classes, data.train.take(train), data.test.take(test))

    return FlowerClient(images, folder / "devices" / str(client), machine)


@cache
def dealt(folder: Path) -> tuple[DataSet, tuple[ClientIndices, ClientIndices]]:
    """Return a run's images and how they are dealt; a simulation's processes stay, so once is enough."""
    config = read_config(folder / "config.json")
    data = load(config.data)
    return data, assign_images(config, data)
