"""The demo: a local page on which models of a run predict dropped images side by side."""

from __future__ import annotations

from collections.abc import Sequence

from vitfleet.api.models import ModelSource, load_model, open_source
from vitfleet.api.run import Run
from vitfleet.config.registry import method_label
from vitfleet.demo.predictions import NamedModel
from vitfleet.demo.server import DemoServer
from vitfleet.run.checkpoints.store import StoredStates

SHOWN_CLIENTS = 2


def demo_server(
    source: ModelSource,
    clients: Sequence[int] | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    device: str = "auto",
) -> DemoServer:
    """Return a server of the demo page, which ``serve_forever()`` runs.

    Parameters
    ----------
    source
        A run, its folder, or a model file.
    clients
        Clients whose own models are shown beside the server's. ``None``: the first two that have one.
    host, port
        Address to listen at: this machine only by default. Port 0: any free one.
    """
    opened = open_source(source)
    models = [NamedModel("server's model", load_model(opened, None, device))]
    if isinstance(opened, Run):
        chosen = _with_own_models(opened) if clients is None else clients
        models += [NamedModel(f"client {client}'s model", load_model(opened, client, device)) for client in chosen]
        method, data = method_label(opened.config.method.name), models[0].model.info.data.name
        title = f"{method} on {data}: {opened.path.resolve().name}"
    else:
        info = models[0].model.info
        models = [NamedModel("model", models[0].model)]
        title = f"{info.method['name']} on {info.data.name}"
    return DemoServer(host, port, title, models)


def _with_own_models(run: Run) -> list[int]:
    """Return the first clients that have a state, and so a model, of their own."""
    return sorted(StoredStates.of_run(run.path).manifest.clients)[:SHOWN_CLIENTS]
