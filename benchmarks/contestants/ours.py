"""vitfleet: a session and its rounds, as `vitfleet run` plays them, without the records and checkpoints.

Nobody else writes any. Run by torchrun, the cohort is shared out among the processes.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from problem import Problem, RunSpec, Stopwatch, arguments

from vitfleet.config.schema import Config
from vitfleet.fleet.distributed import join_process_group
from vitfleet.run.context import load_state
from vitfleet.run.round import run_round
from vitfleet.run.setup import open_run


def config_of(run_spec: RunSpec, machine: dict[str, object]) -> Config:
    """Return the configuration of a problem."""
    return Config.model_validate(
        {
            "seed": run_spec.seed,
            "rounds": run_spec.rounds + 1,  # the last one, which is always evaluated, is not played
            "data": {
                "name": "cifar10",
                "dir": run_spec.data_dir,
                "limit": run_spec.images,
                "partition": {"kind": "dirichlet", "beta": run_spec.beta, "min_samples": 1},
            },
            "model": {"name": "vit", "dim": 256, "depth": 6, "heads": 8, "patch_size": 4},
            "method": {"name": "fedavg"},
            "fleet": {"clients": run_spec.clients, "per_round": run_spec.per_round},
            "train": {
                "epochs": run_spec.epochs,
                "batch_size": run_spec.batch,
                "lr": run_spec.lr,
                "weight_decay": run_spec.weight_decay,
                "schedule": "constant",
            },
            "eval": {"every": run_spec.rounds + 1},
            "machine": machine,
        }
    )


def main() -> None:
    folder, _, threads = arguments()
    problem = Problem(folder)
    run_spec = problem.run_spec
    machine: dict[str, object] = {
        "device": run_spec.device,
        "threads": threads,
        "precision": "bf16" if run_spec.bf16 else "fp32",
        **json.loads(os.environ.get("VITFLEET_MACHINE", "{}")),
    }
    with join_process_group() as processes:
        # A run that was begun is not begun again: each turn has a folder of its own.
        made = tempfile.mkdtemp(dir=folder) if processes.is_first else ""
        run = Path(processes.broadcast(made.encode()).decode())
        context = open_run(config_of(run_spec, machine), run, processes=processes)
        state = load_state(context)
        watch = Stopwatch(problem)
        watch.start()
        for round in range(1, run_spec.rounds + 1):
            state, record = run_round(context, state, round)
            assert [entry.client for entry in record.clients] == problem.chosen[round - 1]
            watch.lap()
        if processes.is_first:
            watch.finish(dict(context.method.model_weights(state.server, context.base.tensors, None)))


if __name__ == "__main__":
    main()
