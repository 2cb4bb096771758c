"""Flower's simulation (Ray) with its message API and its FedAvg.

The server selects the clients that the problem prescribes. A message names the client whose images are used.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

os.environ.update(FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1", RAY_USAGE_STATS_ENABLED="0")

from flower_client import app as client_app
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from problem import Problem, Stopwatch, arguments


class PrescribedClients(FedAvg):
    """FedAvg with the clients that the problem prescribes for each round."""

    def __init__(self, problem: Problem, **options: Any) -> None:
        super().__init__(**options)
        self.problem = problem
        self.watch = Stopwatch(problem)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if server_round == 1:
            self.watch.start()
        nodes = sorted(grid.get_node_ids())
        for client in self.problem.round_clients[server_round - 1]:
            client_config = ConfigRecord({**config, "server-round": server_round, "client": client})
            content = RecordDict({"arrays": arrays, "config": client_config})
            yield Message(content=content, message_type=MessageType.TRAIN, dst_node_id=nodes[client])

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        all_replies = list(replies)
        if failures := [reply.error.reason for reply in all_replies if reply.has_error()]:
            raise RuntimeError(failures[0])
        result = super().aggregate_train(server_round, all_replies)
        self.watch.lap()
        return result


def main() -> None:
    folder, processes, threads = arguments()
    problem = Problem(folder)
    server_app = ServerApp()

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = PrescribedClients(problem, fraction_evaluate=0.0, min_available_nodes=problem.spec.clients)
        while len(list(grid.get_node_ids())) < problem.spec.clients:
            time.sleep(0.1)
        result = strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(problem.model().vit.state_dict()),
            train_config=ConfigRecord({"folder": str(folder), "threads": threads}),
            num_rounds=problem.spec.rounds,
        )
        strategy.watch.finish(result.arrays.to_torch_state_dict())

    gpu = problem.device.type == "cuda"
    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=problem.spec.clients,
        backend_config={
            "init_args": {"num_cpus": processes * threads, **({"num_gpus": 1} if gpu else {})},
            "client_resources": {"num_cpus": threads, "num_gpus": 1 / processes if gpu else 0.0},
        },
    )


if __name__ == "__main__":
    main()
