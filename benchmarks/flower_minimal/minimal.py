"""What Flower's documentation shows: FedAvg of a torch state dict; the client returns what it got."""

import json
import time
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

server = ServerApp()
client = ClientApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    words = context.run_config
    model = {f"layer{number}": torch.randn(int(words["floats"]) // 10) for number in range(10)}
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=2)
    while len(list(grid.get_node_ids())) < 2:
        time.sleep(0.5)
    ends: list[float] = []  # of round 0, before the first, and of every round

    def note(round: int, arrays: ArrayRecord) -> None:
        ends.append(time.perf_counter())

    rounds = int(words["rounds"])
    strategy.start(grid=grid, initial_arrays=ArrayRecord(model), num_rounds=rounds, evaluate_fn=note)
    Path(str(words["report"])).write_text(json.dumps({"ends": ends}))


@client.train()
def train(message: Message, context: Context) -> Message:
    weights = message.content["arrays"].to_torch_state_dict()
    content = RecordDict({"arrays": ArrayRecord(weights), "metrics": MetricRecord({"num-examples": 1})})
    return Message(content=content, reply_to=message)
