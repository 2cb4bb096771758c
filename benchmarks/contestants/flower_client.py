"""The ClientApp of flower.py: trains a client with the same loop as eager.py.

Images stay in a worker's memory from one client to the next and are not read through a DataLoader, so the difference to
the plain loop is Flower's own overhead.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from problem import Problem, Vit, train

app = ClientApp()


@cache
def load_problem(folder: str, threads: int) -> tuple[Problem, Vit]:
    """Read the problem, once per worker."""
    torch.set_num_threads(threads)
    problem = Problem(Path(folder))
    return problem, problem.model()


@app.train()
def train_client(message: Message, context: Context) -> Message:
    config = message.content["config"]
    problem, model = load_problem(str(config["folder"]), int(config["threads"]))
    model.vit.load_state_dict(message.content["arrays"].to_torch_state_dict())
    samples = train(model, problem, int(config["server-round"]), int(config["client"]))
    content = RecordDict(
        {"arrays": ArrayRecord(model.vit.state_dict()), "metrics": MetricRecord({"num-examples": samples})}
    )
    return Message(content=content, reply_to=message)
