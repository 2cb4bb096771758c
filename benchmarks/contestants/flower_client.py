"""What flower.py has each worker do: it trains a client by the same loop as eager.py.

Images stay in a worker from one client to the next, and nobody reads them through a DataLoader: what Flower adds to the
plain loop is its own.
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
def given(folder: str, threads: int) -> tuple[Problem, Vit]:
    """Read the problem, once in each worker."""
    torch.set_num_threads(threads)
    problem = Problem(Path(folder))
    return problem, problem.model()


@app.train()
def work(message: Message, context: Context) -> Message:
    config = message.content["config"]
    problem, model = given(str(config["folder"]), int(config["threads"]))
    model.vit.load_state_dict(message.content["arrays"].to_torch_state_dict())
    samples = train(model, problem, int(config["server-round"]), int(config["client"]))
    content = RecordDict(
        {"arrays": ArrayRecord(model.vit.state_dict()), "metrics": MetricRecord({"num-examples": samples})}
    )
    return Message(content=content, reply_to=message)
