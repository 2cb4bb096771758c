"""vitfleet: the rounds of `vitfleet run`, without records and checkpoints, which no other contestant writes.

Under torchrun the processes share a round's clients.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from problem import Problem, ProblemSpec, Stopwatch, arguments

from vitfleet.config.schema import Config
from vitfleet.fleet.distributed import join_process_group
from vitfleet.run.context import load_state
from vitfleet.run.round import run_round
from vitfleet.run.setup import open_run


def make_config(spec: ProblemSpec, machine: dict[str, object]) -> Config:
    """Return the configuration of a problem."""
    return Config.model_validate(
        {
            "seed": spec.seed,
            "rounds": spec.rounds + 1,  # the last one, which is always evaluated, is not run
            "data": {
                "name": "cifar10",
                "dir": spec.data_dir,
                "limit": spec.images,
                "partition": {"kind": "dirichlet", "beta": spec.beta, "min_samples": 1},
            },
            "model": {"name": "vit", "dim": 256, "depth": 6, "heads": 8, "patch_size": 4},
            "method": {"name": "fedavg"},
            "fleet": {"clients": spec.clients, "per_round": spec.per_round},
            "train": {
                "epochs": spec.epochs,
                "batch_size": spec.batch,
                "lr": spec.lr,
                "weight_decay": spec.weight_decay,
                "schedule": "constant",
            },
            "eval": {"every": spec.rounds + 1},
            "machine": machine,
        }
    )


def main() -> None:
    folder, _, threads = arguments()
    problem = Problem(folder)
    spec = problem.spec
    machine: dict[str, object] = {
        "device": spec.device,
        "threads": threads,
        "precision": "bf16" if spec.bf16 else "fp32",
        **json.loads(os.environ.get("VITFLEET_MACHINE", "{}")),
    }
    with join_process_group() as processes:
        # Every call needs a new folder: an existing one would be resumed.
        new_folder = tempfile.mkdtemp(dir=folder) if processes.is_first else ""
        run = Path(processes.broadcast(new_folder.encode()).decode())
        context = open_run(make_config(spec, machine), run, processes=processes)
        state = load_state(context)
        watch = Stopwatch(problem)
        watch.start()
        for round in range(1, spec.rounds + 1):
            state, record = run_round(context, state, round)
            assert [entry.client for entry in record.clients] == problem.round_clients[round - 1]
            watch.lap()
        if processes.is_first:
            watch.finish(dict(context.method.model_weights(state.server, context.base.tensors, None)))


if __name__ == "__main__":
    main()
