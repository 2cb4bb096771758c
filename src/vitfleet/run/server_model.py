"""The server's model at the end of a run: its own, or completed with the mean of what only clients have."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitfleet.message import State, Tensors
from vitfleet.methods import Method
from vitfleet.run.context import RunContext
from vitfleet.run.data_info import describe_data
from vitfleet.run.model_file import MODEL_FILE, model_info, write_model
from vitfleet.run.state import RunState


class ServerModel(NamedTuple):
    """A whole model, and the number of clients of whose parts it contains the mean (0: the server has a whole one)."""

    weights: Tensors
    averaged_clients: int


def server_model(
    method: Method[Any], server: State, base_weights: Tensors, client_states: Iterable[State]
) -> ServerModel:
    """Return the server's model.

    Where the server has only a part of the model (EFTViT's global module, the body of methods with local heads), the
    rest is the unweighted mean over the clients that have trained. Where none has, it is the initial one.

    Parameters
    ----------
    client_states
        The states of all clients that have one; not used if the method has a global model.
    """
    weights = dict(method.model_weights(server, base_weights, None))
    if method.has_global_model:
        return ServerModel(weights, 0)
    missing = [name for name in method.anatomy.shapes if name not in server.tensors]
    sums: dict[str, Tensor] = {}
    count = 0
    for state in client_states:
        model = method.model_weights(server, base_weights, state)
        for name in missing:
            value = model[name].double()
            sums[name] = sums[name] + value if name in sums else value
        count += 1
    mean = {name: (total / count).to(weights[name].dtype) for name, total in sums.items()}
    return ServerModel({**weights, **mean, **_own(method, server)}, count)


def _own(method: Method[Any], server: State) -> Tensors:
    return {name: tensor for name, tensor in server.tensors.items() if name in method.anatomy.shapes}


def save_server_model(context: RunContext, state: RunState) -> dict[str, Any]:
    """Write a finished run's ``model.safetensors`` and return what the summary says of it.

    Its accuracy is measured here where records do not have it: where a part of the model is a mean over clients.
    Remote clients keep their parts: without a global model, the server of a real fleet has no model to write.
    """
    method = context.method
    if context.has_remote_clients and not method.has_global_model:
        return {}
    model = server_model(method, state.server, context.base.tensors, _client_states(context))
    data = describe_data(context.data, context.config.data.eval_split)
    info = model_info(context.config, data, context.net, state.round, averaged_clients=model.averaged_clients)
    write_model(context.folder / MODEL_FILE, context.net, model.weights, info)
    if method.has_global_model or context.config.data.tasks is not None:
        return {}
    ((accuracy, loss),) = context.evaluator.evaluate(model.weights).means()
    return {
        "server_model": {
            "accuracy": accuracy,
            "loss": loss if math.isfinite(loss) else None,
            "averaged_clients": model.averaged_clients,
        }
    }


def _client_states(context: RunContext) -> Iterator[State]:
    """Yield the states of all clients that have one, from the last checkpoint, one at a time."""
    for client in context.checkpoints.clients():
        state = context.checkpoints.client(client)
        if state is not None:
            yield state.to(torch.device(context.machine.device))
