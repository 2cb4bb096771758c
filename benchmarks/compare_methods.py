"""Several methods × seeds on the same shards: accuracy by round as CSV, and a table.

Example, the comparison of docs/results/transfl-cifar10.md::

    python benchmarks/compare_methods.py transfl-cifar10 --methods standalone fedavg transfl \
        --seeds 0 1 2 --parallel 9 --out results -- --data-dir data

Each run is a `vitfleet run` process of its own, so that several can share a GPU; what stands after ``--`` is passed to
every one, what stands after ``--with METHOD`` to that method's alone, as overrides::

    python benchmarks/compare_methods.py eftvit-ucmerced-tiny --methods eftvit fed-full --target 0.85 \
        --with eftvit train.lr=5e-5 --with fed-full train.lr=3e-4 train.mask_ratio=0 --out results -- --data-dir data

Runs that are complete below ``--runs`` are not run again.
`vitfleet compare` is the simpler way where one run after the other will do.
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vitfleet.run.records import read_records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset")
    parser.add_argument("--methods", nargs="+", required=True)
    parser.add_argument(
        "--with",
        dest="overrides",
        action="append",
        nargs="+",
        default=[],
        metavar=("METHOD", "KEY=VALUE"),
        help="overrides for one method; may be repeated",
    )
    parser.add_argument("--target", type=float, help="also count the rounds to this global accuracy, 0…1")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time")
    parser.add_argument("--runs", type=Path, default=Path("runs/compare"), help="where the run folders go")
    parser.add_argument("--out", type=Path, required=True, help="where the CSV and the table go")
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    args, rest = parser.parse_args(words[:cut]), words[cut + 1 :]
    overrides: dict[str, list[str]] = {method: [] for method in args.methods}
    for method, *given in args.overrides:
        if method not in overrides:
            parser.error(f"--with {method}: is none of --methods {' '.join(args.methods)}")
        overrides[method] += [word for override in given for word in ("-o", override)]
    args.out.mkdir(parents=True, exist_ok=True)

    def play(method: str, seed: int) -> Path:
        folder: Path = args.runs / f"{args.preset}-{method}-s{seed}"
        wanted = ["run", args.preset, "-o", f"method.name={method}", "--seed", str(seed), "--out", str(folder)]
        wanted += [*rest, *overrides[method]]
        command = wanted
        if (folder / "config.json").exists():
            begun = json.loads((folder / "about.json").read_text())["command"]
            if begun != shlex.join(["vitfleet", *wanted]):
                raise SystemExit(f"{folder} holds another run ({begun}); choose another --runs")
            if (folder / "summary.json").exists():
                return folder
            command = ["resume", str(folder)]
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "vitfleet", *command], capture_output=True, text=True)
        print(f"{method} seed {seed}: exit {done.returncode}, {time.perf_counter() - started:.0f} s", flush=True)
        if done.returncode:
            print(done.stdout[-2000:], done.stderr[-3000:], flush=True)
        return folder

    pairs = [(method, seed) for seed in args.seeds for method in args.methods]
    with ThreadPoolExecutor(args.parallel) as pool:
        folders = dict(zip(pairs, pool.map(lambda pair: play(*pair), pairs), strict=True))
    write_curves(folders, args.out / "curves.csv")
    table = markdown(folders, args.methods, args.seeds, args.target)
    (args.out / "table.md").write_text(table)
    print(table, flush=True)
    if not all((folder / "summary.json").exists() for folder in folders.values()):
        raise SystemExit("not every run came to its end")


def write_curves(folders: dict[tuple[str, int], Path], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["method", "seed", "round", "global", "local", "train_loss", "up_bytes", "down_bytes"])
        for (method, seed), folder in folders.items():
            for record in read_records(folder):
                if record.accuracy is None:
                    continue
                accuracy = record.accuracy
                row = [method, seed, record.round, f"{accuracy.global_:.5f}", accuracy.local]
                writer.writerow([*row, record.loss, record.total_up_bytes, record.total_down_bytes])


def markdown(folders: dict[tuple[str, int], Path], methods: list[str], seeds: list[int], target: float | None) -> str:
    heads = ["method", "local accuracy, %", "global accuracy, %", "best, %"]
    heads += [] if target is None else [f"rounds to {100 * target:g} %: each seed", "mean of those that reached it"]
    heads += ["message up, MiB", "message down, MiB", "run, s"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for method in methods:
        done = [path for seed in seeds if (path := folders[method, seed] / "summary.json").exists()]
        if not done:
            continue
        sums = [json.loads(path.read_text()) for path in done]
        cells = [method]
        cells += [_spread([100 * one["accuracy"][kind] for one in sums]) for kind in ("local", "global", "best")]
        if target is not None:
            each = [rounds_to(target, path.parent) for path in done]
            reached = [rounds for rounds in each if rounds is not None]
            cells += [", ".join("not reached" if rounds is None else str(rounds) for rounds in each)]
            cells += [f"{statistics.mean(reached):.1f}" if reached else "not reached"]
        cells += [
            f"{statistics.mean(one['message'][way] for one in sums) / 2**20:.4f}" for way in ("up_bytes", "down_bytes")
        ]
        cells += [f"{statistics.mean(one['total']['seconds'] for one in sums):.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def rounds_to(target: float, folder: Path) -> int | None:
    """Return the first evaluated round with this global accuracy."""
    for record in read_records(folder):
        if record.accuracy is not None and record.accuracy.global_ >= target:
            return record.round
    return None


def _spread(values: list[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.2f} ± {deviation:.2f}"


if __name__ == "__main__":
    main()
