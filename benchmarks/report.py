"""Measure time and size of a large report: 12 methods × 3 seeds × 100 rounds on 100 clients, from invented records.

Example::

    python benchmarks/report.py
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np

from vitfleet.config.load import validate
from vitfleet.files import CONFIG_FILE, DEVICES_FILE, PARTITION_FILE, RECORDS_FILE
from vitfleet.report.html.page import FIGURES, write_report
from vitfleet.run.output.summary import write_summary
from vitfleet.run.records import Accuracy, ClientRecord, RoundRecord

METHODS = (
    "standalone",
    "fedavg",
    "fedprox",
    "transfl",
    "fed-full",
    "fed-head",
    "fed-bias",
    "fed-prompt",
    "fed-lora",
    "fedbfpt",
    "eftvit",
)
CLIENTS, CLASSES, PER_ROUND, LAYERS, HEADS = 100, 100, 10, 12, 12


def make_run(folder: Path, method: str, seed: int, rounds: int) -> None:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    final_accuracy = 0.4 + 0.05 * METHODS.index(method)
    fleet = {"clients": CLIENTS, "per_round": PER_ROUND}
    config = validate({"method": {"name": method}, "seed": seed, "rounds": rounds, "fleet": fleet})
    (folder / CONFIG_FILE).write_text(config.model_dump_json())
    counts = rng.integers(0, 30, (CLIENTS, CLASSES)).tolist()
    partition = {"sha256": str(seed), "classes": [str(i) for i in range(CLASSES)], "counts": counts}
    (folder / PARTITION_FILE).write_text(json.dumps(partition))
    (folder / DEVICES_FILE).write_text(json.dumps({"clients": ["nano"] * CLIENTS}))
    with (folder / RECORDS_FILE).open("w") as file:
        for round in range(1, rounds + 1):
            clients = []
            for client in rng.choice(CLIENTS, PER_ROUND, replace=False).tolist():
                numbers = {"samples": 500, "loss": float(rng.random())}
                if method == "transfl":
                    numbers |= {"layers": [0, 5, 11], "gradients": rng.random(LAYERS).tolist()}
                    numbers |= {"head_gradients": rng.random(LAYERS * HEADS).tolist()}
                began = 600.0 * round
                ended = began + 600 * float(rng.random())
                clients.append(ClientRecord(client, 10**6, 10**6, numbers, 5, 10, began=began, ended=ended))
            accuracy = Accuracy(
                final_accuracy * float(1 - 1 / round + rng.random() / 50), 1 / round, 1, float(rng.random())
            )
            traffic = 10**7 * round
            record = RoundRecord(
                round, 1e-3, 1 / round, accuracy, clients, traffic, traffic, virtual_seconds=600.0 * round
            )
            file.write(record.line() + "\n")
    costs = {"params": 10**6, "trainable_params": 10**6, "forward_gflops": 1.0, "train_gflops": 3.0}
    write_summary(folder, config, costs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", type=int, default=12, help="how many; of twelve, one is there twice")
    parser.add_argument("--out", type=Path, help="keep the runs and the report here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.out or Path(temporary)
        runs = []
        for number in range(args.methods):
            for seed in range(args.seeds):
                runs.append(folder / f"run-{number}-s{seed}")
                make_run(runs[-1], METHODS[number % len(METHODS)], seed, args.rounds + number // len(METHODS))
        started = time.perf_counter()
        page = write_report(runs, folder / "report")
        seconds = time.perf_counter() - started
        size, count = page.stat().st_size / 2**20, sum(1 for _ in (page.parent / FIGURES).glob("*"))
        print(f"{len(runs)} runs: {seconds:.1f} s, page {size:.2f} MiB, {count} figure files")


if __name__ == "__main__":
    main()
