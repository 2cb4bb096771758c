"""The models of a run as files, each with what is needed to use it.

``model.safetensors`` is a whole model: its weights with timm's names, and a description in the header. ``data.json``
describes the data set. ``base.safetensors`` is what every client received once: with it and a checkpoint every model of
a run is complete in its folder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from vitfleet.config.data import EvalSplit
from vitfleet.config.schema import Config
from vitfleet.data.images import DataSet
from vitfleet.data.tasks import assign_classes_to_tasks
from vitfleet.errors import UserError
from vitfleet.files import BASE_FILE, DATA_FILE, MODEL_FILE, parse_json, read_json, write_atomically
from vitfleet.message import Message, State, Tensors
from vitfleet.methods import Method, head_features
from vitfleet.models.net import Net
from vitfleet.wire import read_payload, safetensors_chunks, safetensors_size, write_payload

if TYPE_CHECKING:
    from vitfleet.run.context import RunContext
    from vitfleet.run.state import RunState

METADATA_KEY = "vitfleet"


@dataclass(frozen=True)
class DataInfo:
    """What a trained model must be told of the data it was trained on."""

    name: str
    classes: tuple[str, ...]  # names of the classes, in the order of the labels
    # Colour channels and side in pixels of the stored images
    channels: int
    image_size: int
    eval_split: EvalSplit = "test"  # the images that every accuracy was measured on

    @classmethod
    def of(cls, data: DataSet, eval_split: EvalSplit) -> DataInfo:
        """Return the description of a run's data."""
        return cls(data.name, tuple(data.classes), data.train.channels, data.train.image_size, eval_split)

    @classmethod
    def of_tree(cls, tree: Mapping[str, Any]) -> DataInfo:
        """Return the description that JSON holds; a ``TypeError`` or ``LookupError`` says that it is damaged."""
        classes = tuple(tree["classes"])
        if not all(isinstance(name, str) and name.isprintable() for name in classes):
            raise ValueError("names of its classes have control characters")
        return cls(**{**tree, "classes": classes})


@dataclass(frozen=True)
class ModelInfo:
    """What a model file says of its model."""

    model: Mapping[str, Any]  # the table ``model``, without the file of the initial weights
    method: Mapping[str, Any]  # the table ``method``: a method may add prompts or low-rank factors to the architecture
    data: DataInfo
    rounds: int  # the round after which the model was written
    # The model's input: height and width in pixels, and the normalisation of pixels in 0…1
    input_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    client: int | None = None  # the client whose own model it is; ``None``: the server's
    # Of how many clients the parts that the server does not have are the mean; 0: the server has a whole model
    averaged_clients: int = 0
    class_to_task: tuple[int, ...] | None = None  # the task of each class, −1 for none; ``None`` without tasks
    head: Mapping[str, Any] | None = None  # what the head sees, a ``HeadFeatures``; ``None``: what every head sees


def write_data_info(data: DataSet, eval_split: EvalSplit, folder: Path) -> None:
    """Write the description of a run's data into its folder."""
    write_atomically(folder / DATA_FILE, json.dumps(asdict(DataInfo.of(data, eval_split)), indent=2).encode())


def read_data_info(folder: Path) -> DataInfo:
    """Read the description of a run's data."""
    path = folder / DATA_FILE
    if not path.is_file():
        raise UserError(f"{folder}: has no {DATA_FILE}; the run was never set up: `vitfleet resume {folder}`")
    tree = read_json(path)
    try:
        return DataInfo.of_tree(tree)
    except (TypeError, LookupError, ValueError):
        raise UserError(f"{path}: is damaged; `vitfleet resume {folder}` writes it again") from None


def write_base(base: Message, folder: Path) -> None:
    """Write the initial broadcast of a run into its folder, once: it never changes."""
    if not (folder / BASE_FILE).exists():
        write_payload(folder / BASE_FILE, base)


def read_base(folder: Path) -> Message:
    """Read the initial broadcast of a run."""
    path = folder / BASE_FILE
    if not path.is_file():
        raise UserError(f"{folder}: has no {BASE_FILE}; `vitfleet resume {folder}` writes it, also of a finished run")
    return read_payload(Message, path)


def model_info(
    config: Config, data: DataInfo, net: Net, rounds: int, client: int | None = None, averaged_clients: int = 0
) -> ModelInfo:
    """Return the description of a run's model."""
    tasks, class_to_task, features = config.data.tasks, None, head_features(config.head)
    if tasks is not None:
        class_to_task = tuple(assign_classes_to_tasks(tasks, config.seed, len(data.classes)).tolist())
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
        class_to_task=class_to_task,
        head=None if features.is_default else asdict(features),
    )


def write_model(path: Path, net: Net, weights: Tensors, info: ModelInfo) -> None:
    """Write a whole model."""
    write_atomically(path, safetensors_chunks(*_contents(net, weights, info)))


def model_size(net: Net, weights: Tensors, info: ModelInfo) -> int:
    """Return the bytes of the file that :func:`write_model` writes."""
    return safetensors_size(*_contents(net, weights, info))


def _contents(net: Net, weights: Tensors, info: ModelInfo) -> tuple[Tensors, dict[str, str]]:
    """Return the tensors and the metadata of a model file."""
    described = {key: value for key, value in asdict(info).items() if key != "head" or value is not None}
    return {name: weights[name] for name in net.parts.shapes}, {METADATA_KEY: json.dumps(described)}


def read_model(path: Path) -> tuple[ModelInfo, Tensors]:
    """Read a model file."""
    return _read_info(path), load_file(path)


def model_round(path: Path) -> int:
    """Return the round after which a model file was written."""
    return _read_info(path).rounds


def _read_info(path: Path) -> ModelInfo:
    try:
        with safe_open(path, "pt") as file:
            tree = parse_json((file.metadata() or {})[METADATA_KEY])
        lists = {key: tuple(tree[key]) for key in ("mean", "std", "class_to_task") if tree[key] is not None}
        return ModelInfo(**{**tree, **lists, "data": DataInfo.of_tree(tree["data"])})
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise UserError(f"{path}: is not a model file of vitfleet ({type(error).__name__}: {error})") from None


def write_run_model(path: Path, context: RunContext, weights: Tensors, rounds: int, averaged_clients: int = 0) -> None:
    """Write a model of a run after so many rounds."""
    data = DataInfo.of(context.data, context.config.data.eval_split)
    info = model_info(context.config, data, context.net, rounds, averaged_clients=averaged_clients)
    write_model(path, context.net, weights, info)


def server_model(
    method: Method[Any], server: State, base_weights: Tensors, client_states: Iterable[State]
) -> tuple[Tensors, int]:
    """Return the server's model, and of how many clients' parts it contains the mean (0: the server has a whole one).

    Where the server has only a part of the model (EFTViT's global module, the body of methods with local heads), the
    rest is the unweighted mean over the clients that have a state. Where none has, it is the initial one.
    """
    weights = dict(method.model_weights(server, base_weights, None))
    if method.has_global_model:
        return weights, 0
    missing = [name for name in method.parts.shapes if name not in server.tensors]
    sums: dict[str, Tensor] = {}
    count = 0
    for state in client_states:
        count += 1
        model = method.model_weights(server, base_weights, state)
        for name in missing:
            value = model[name].double()
            sums[name] = sums[name] + value if name in sums else value
    means = {name: (total / count).to(weights[name].dtype) for name, total in sums.items()}
    own = {name: tensor for name, tensor in server.tensors.items() if name in method.parts.shapes}
    return {**weights, **means, **own}, count


def save_server_model(context: RunContext, state: RunState) -> dict[str, Any]:
    """Write a finished run's ``model.safetensors`` and return what the summary says of it.

    Its accuracy is measured here where records do not have it: where a part of the model is a mean over clients.
    Remote clients keep their parts: without a global model, the server of a real fleet has no model to write.
    """
    context, state = context.at_the_end(state)
    method = context.method
    if context.has_remote_clients and not method.has_global_model:
        return {}
    weights, averaged_clients = server_model(method, state.server, context.base.tensors, _client_states(context))
    write_run_model(context.folder / MODEL_FILE, context, weights, state.round, averaged_clients)
    if method.has_global_model or context.config.data.tasks is not None:
        return {}
    ((accuracy, loss),) = context.evaluator.evaluate(weights).means()
    return {
        "server_model": {
            "accuracy": accuracy,
            "loss": loss if math.isfinite(loss) else None,
            "averaged_clients": averaged_clients,
        }
    }


def _client_states(context: RunContext) -> Iterator[State]:
    """Yield the states of all clients that have one, from the last checkpoint, one at a time."""
    for client in context.checkpoints.clients():
        state = context.checkpoints.client(client)
        if state is not None:
            yield state.to(torch.device(context.machine.device))
