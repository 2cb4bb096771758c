"""A trained model as one file: its weights with timm's names, and in the header what is needed to use it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from vitfleet.config.schema import Config
from vitfleet.data.tasks import assign_classes_to_tasks
from vitfleet.errors import UserError
from vitfleet.files import parse_json, write_atomically
from vitfleet.message import Tensors
from vitfleet.models.net import Net
from vitfleet.run.data_info import DataInfo
from vitfleet.wire import safetensors_chunks, safetensors_size

MODEL_FILE = "model.safetensors"
METADATA_KEY = "vitfleet"


@dataclass(frozen=True)
class ModelInfo:
    """What a model file says of its model.

    Attributes
    ----------
    model
        The table ``model``, without the file of the initial weights.
    method
        The table ``method``: a method may add prompts or low-rank factors to the architecture.
    data
        Names of the classes and form of the images.
    rounds
        The round after which the model was written.
    input_size, mean, std
        The model's input: height and width in pixels, and the normalisation of pixels in 0…1.
    client
        The client whose own model it is; ``None``: the server's.
    averaged_clients
        Of how many clients the parts that the server does not have are the mean; 0: the server has a whole model.
    task_of_class
        The task of each class, −1 for none; ``None`` without tasks.
    """

    model: Mapping[str, Any]
    method: Mapping[str, Any]
    data: DataInfo
    rounds: int
    input_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    client: int | None = None
    averaged_clients: int = 0
    task_of_class: tuple[int, ...] | None = None


def model_info(
    config: Config, data: DataInfo, net: Net, rounds: int, client: int | None = None, averaged_clients: int = 0
) -> ModelInfo:
    """Return the description of a run's model."""
    tasks = config.data.tasks
    task_of_class = None if tasks is None else assign_classes_to_tasks(tasks, config.seed, len(data.classes)).tolist()
    return ModelInfo(
        model=config.model.model_dump(mode="json", exclude={"weights"}),
        method=config.method.model_dump(mode="json"),
        data=data,
        rounds=rounds,
        input_size=net.image_size,
        mean=net.mean,
        std=net.std,
        client=client,
        averaged_clients=averaged_clients,
        task_of_class=None if task_of_class is None else tuple(task_of_class),
    )


def write_model(path: Path, net: Net, weights: Tensors, info: ModelInfo) -> None:
    """Write a whole model."""
    write_atomically(path, safetensors_chunks(*_contents(net, weights, info)))


def model_size(net: Net, weights: Tensors, info: ModelInfo) -> int:
    """Return the bytes of the file that :func:`write_model` writes."""
    return safetensors_size(*_contents(net, weights, info))


def _contents(net: Net, weights: Tensors, info: ModelInfo) -> tuple[Tensors, dict[str, str]]:
    """Return the tensors and the metadata of a model file."""
    return {name: weights[name] for name in net.parts.shapes}, {METADATA_KEY: json.dumps(asdict(info))}


def read_model(path: Path) -> tuple[ModelInfo, Tensors]:
    """Read a model file.

    Raises
    ------
    UserError
        The file does not exist, or is not a model that vitfleet wrote.
    """
    return _read_info(path), load_file(path)


def model_round(path: Path) -> int:
    """Return the round after which a model file was written."""
    return _read_info(path).rounds


def _read_info(path: Path) -> ModelInfo:
    try:
        with safe_open(path, "pt") as file:
            tree = parse_json((file.metadata() or {})[METADATA_KEY])
        lists = {key: tuple(tree[key]) for key in ("mean", "std", "task_of_class") if tree[key] is not None}
        data = DataInfo(**{**tree["data"], "classes": tuple(tree["data"]["classes"])})
        return ModelInfo(**{**tree, **lists, "data": data})
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise UserError(f"{path}: is not a model file of vitfleet ({type(error).__name__}: {error})") from None
