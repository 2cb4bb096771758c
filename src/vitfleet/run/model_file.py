"""The trained model as one file, with timm's names of the weights."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open

from vitfleet.files import write_atomically
from vitfleet.run.context import RunContext
from vitfleet.run.state import RunState
from vitfleet.wire import safetensors_chunks


def save_model(context: RunContext, state: RunState, path: Path) -> None:
    """Write the global model and what is needed to use it: architecture, classes, input and normalisation."""
    weights = context.method.model_weights(state.server, context.base.tensors, None)
    about = {
        "model": context.config.model.name,
        "classes": context.data.classes,
        "rounds": state.round,
        "sizes": context.config.model.model_dump(exclude={"name", "weights"}),
        "input": {"channels": context.data.train.channels, "side": context.net.image_size},
        "normalisation": {"mean": context.net.mean, "std": context.net.std},
    }
    tensors = {name: weights[name] for name in context.net.anatomy.shapes}
    write_atomically(path, safetensors_chunks(tensors, {"vitfleet": json.dumps(about)}))


def model_round(path: Path) -> int:
    """Return the round after which a model file was written."""
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["vitfleet"])
    return int(about["rounds"])
