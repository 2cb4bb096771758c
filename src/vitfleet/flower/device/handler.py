"""Handles one Flower message on a client: in a real client's worker, or in a process of Flower's simulation."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, lru_cache
from pathlib import Path

import torch
from flwr.app import ConfigRecord, RecordDict
from flwr.common import MessageType

from vitfleet.config import read_config
from vitfleet.config.plugins import load_plugins
from vitfleet.config.schema import Config, MachineConfig
from vitfleet.data.images import DataSet
from vitfleet.data.partitions.assign import assign_images
from vitfleet.data.partitions.client_indices import ClientIndices
from vitfleet.data.sources.load import load_dataset
from vitfleet.data.sources.local import DataSpec, LocalDataset
from vitfleet.errors import UserError
from vitfleet.files import CONFIG_FILE
from vitfleet.flower.activity import ACTIVITY_FILE, ActivityLog, round_line
from vitfleet.flower.device.client import FlowerClient
from vitfleet.flower.device.limits import MEGABYTE, ClientLimits
from vitfleet.flower.device.storage import IMAGES_FOLDER, free_bytes
from vitfleet.flower.transport.codec import pack_eval_reply, pack_reply, unpack_eval_request, unpack_train_request
from vitfleet.flower.transport.payloads import RunSpec
from vitfleet.system import limited_memory

MACHINE_KEYS = ("device", "precision", "threads", "deterministic")


@contextmanager
def hard_limits(settings: ConfigRecord) -> Iterator[None]:
    """End what takes more than the owner of a real client allows: estimates err, and a server may look for where.

    Memory that does not fit is an error. A round that takes twice its time ends this process; the next message starts
    another one.
    """
    limits = ClientLimits.parse(json.loads(str(settings.get("limits", "[]"))))
    timer = threading.Timer(2 * limits.seconds_per_round, os._exit, [1])
    timer.daemon = True
    timer.start()
    # On a GPU the libraries reserve more than they use.
    on_cpu = settings.get("device", "auto") == "cpu" or not torch.cuda.is_available()
    try:
        with limited_memory(limits.memory_mb * MEGABYTE) if on_cpu else nullcontext():
            yield
    finally:
        timer.cancel()


def handle_message(settings: ConfigRecord, content: RecordDict) -> RecordDict:
    """Return the content of a client's reply to a message.

    The settings are ``message_type``; of a real client, ``data`` (its images) and ``state`` (folder of its files); of a
    simulated client, ``client`` (its number) and ``folder`` (of the run); and optionally keys of the table ``machine``,
    and ``plugins`` and ``limits``, the files and the ``NAME=VALUE`` texts that the client's owner gave, as JSON, and
    ``pretrained``, the owner's file of published weights.
    """
    load_plugins(json.loads(str(settings.get("plugins", "[]"))))
    machine = MachineConfig.model_validate({key: settings[key] for key in MACHINE_KEYS if key in settings})
    if "folder" in settings:
        client = simulated_client(Path(str(settings["folder"])), int(str(settings["client"])), machine)
    else:
        limits = ClientLimits.parse(json.loads(str(settings.get("limits", "[]"))))
        pretrained = Path(str(settings["pretrained"])) if "pretrained" in settings else None
        client = local_client(Path(str(settings["data"])), Path(str(settings["state"])), machine, limits, pretrained)
    if settings["message_type"] == MessageType.TRAIN:
        payload = unpack_train_request(content)
        reply = client.train(payload)
        if client.activity is not None:
            client.activity.add(round_line(payload, reply))
        return pack_reply(reply, payload.request.round)
    return pack_eval_reply(client.evaluate(unpack_eval_request(content)))


@lru_cache(maxsize=1)
def local_client(
    data: Path, state: Path, machine: MachineConfig, limits: ClientLimits, pretrained: Path | None = None
) -> FlowerClient:
    """Return a client with images on this machine. It is cached, with its model and images."""
    dataset = LocalDataset(data, state / IMAGES_FOLDER, lambda: free_bytes(state, limits.disk_mb))

    def load_images(config: Config, run_spec: RunSpec) -> DataSet:
        classes, keys = tuple(run_spec.classes), config.data
        return dataset.load(
            DataSpec(classes, run_spec.channels, run_spec.image_size, keys.test_share, keys.max_corrupt)
        )

    return FlowerClient(load_images, state, machine, limits, ActivityLog(state / ACTIVITY_FILE), pretrained)


def simulated_client(folder: Path, client: int, machine: MachineConfig) -> FlowerClient:
    """Return a client of Flower's simulation. Its images are its part of the run's own data set."""
    if not (folder / CONFIG_FILE).exists():
        raise UserError("a simulation needs --run-config 'folder=\"…\"', the absolute path of the run's folder")

    def load_images(config: Config, run_spec: RunSpec) -> DataSet:
        data, (train, test) = _assigned_images(folder)
        train_index, test_index = (torch.from_numpy(indices.for_client(client)) for indices in (train, test))
        return DataSet(data.name, data.classes, data.train.take(train_index), data.test.take(test_index))

    return FlowerClient(load_images, folder / "clients" / str(client), machine)


@cache
def _assigned_images(folder: Path) -> tuple[DataSet, tuple[ClientIndices, ClientIndices]]:
    """Return a run's images and each client's indices. Cached: the processes of a simulation persist."""
    config = read_config(folder / CONFIG_FILE)
    data = load_dataset(config.data)
    return data, assign_images(config, data)
