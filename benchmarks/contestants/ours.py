"""vitfleet: a session and its rounds, as `vitfleet run` plays them, without the records and checkpoints.

Nobody else writes any. Run by torchrun, the cohort is shared out among the processes.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from problem import Problem, Stopwatch, Terms, arguments

from vitfleet.config.schema import Config
from vitfleet.fleet.ranks import joined
from vitfleet.run.conduct import play_round
from vitfleet.run.session import open_session


def config_of(terms: Terms, machine: dict[str, object]) -> Config:
    """Return the configuration of a problem."""
    return Config.model_validate(
        {
            "seed": terms.seed,
            "rounds": terms.rounds + 1,  # the last one, which is always evaluated, is not played
            "data": {
                "name": "cifar10",
                "dir": terms.data_dir,
                "limit": terms.images,
                "partition": {"kind": "dirichlet", "beta": terms.beta, "min_samples": 1},
            },
            "model": {"name": "vit", "dim": 256, "depth": 6, "heads": 8, "patch_size": 4},
            "method": {"name": "fedavg"},
            "fleet": {"clients": terms.clients, "per_round": terms.per_round},
            "train": {
                "epochs": terms.epochs,
                "batch_size": terms.batch,
                "lr": terms.lr,
                "weight_decay": terms.weight_decay,
                "schedule": "constant",
            },
            "eval": {"every": terms.rounds + 1},
            "machine": machine,
        }
    )


def main() -> None:
    folder, _, threads = arguments()
    problem = Problem(folder)
    terms = problem.terms
    machine: dict[str, object] = {
        "device": terms.device,
        "threads": threads,
        "precision": "bf16" if terms.bf16 else "fp32",
        **json.loads(os.environ.get("VITFLEET_MACHINE", "{}")),
    }
    with joined() as ranks:
        # A run that was begun is not begun again: each turn has a folder of its own.
        made = tempfile.mkdtemp(dir=folder) if ranks.first else ""
        run = Path(ranks.tell(made.encode()).decode())
        session = open_session(config_of(terms, machine), run, ranks=ranks)
        watch = Stopwatch(problem)
        watch.start()
        for round in range(1, terms.rounds + 1):
            record = play_round(session, round)
            assert [entry.client for entry in record.clients] == problem.chosen[round - 1]
            watch.lap()
        if ranks.first:
            watch.finish(dict(session.method.model(session.server, session.base.tensors, None)))


if __name__ == "__main__":
    main()
