"""vitfleet side by side with pfl-research, Flower's simulation and a plain eager loop: same problem, same machine.

Example, on two CPU cores in about ten minutes::

    .venv-peers/bin/python benchmarks/peers.py --data-dir data --images 3200 --per-round 10 --batch 32 --threads 2

The problem is the six-layer ViT of TransFL on CIFAR-10 with FedAvg and AdamW. All are given the same shards, clients of
each round, order of a client's images, initial weights and precision, so the final models shall agree: the table says
how each does on the test images before it says how fast it was. A way to run is ``NAME[-PROCESSES][:KEY=VALUE,…]``,
where the keys are ours, of the machine table: ``ours:precision=auto``. The threads are shared among the processes.

Each way runs in processes of its own, in turns, ``--repeats`` times. The first round, which warms up, and the start are
told apart. Ratios are taken within a turn. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch
from torch.nn import functional as F

CONTESTANTS = Path(__file__).parent / "contestants"
sys.path.insert(0, str(CONTESTANTS))

from ours import make_config  # noqa: E402
from problem import Problem, ProblemSpec, save_problem  # noqa: E402

from vitfleet.data.batches import draw_epoch  # noqa: E402
from vitfleet.data.partitions.assign import partition_dataset  # noqa: E402
from vitfleet.data.sources.load import load_dataset  # noqa: E402
from vitfleet.models.zoo import build_model  # noqa: E402
from vitfleet.run.output.folder import processor_name  # noqa: E402
from vitfleet.run.round_plan import choose_clients  # noqa: E402

SCRIPTS = {"ours": "ours.py", "eager": "eager.py", "pfl": "pfl_research.py", "flower": "flower.py"}
WAYS = ["ours", "ours-2", "eager", "pfl-1", "pfl-2", "flower-1", "flower-2"]
PACKAGES = ("vitfleet", "torch", "timm", "pfl", "flwr", "ray", "numpy")
MIB = 2**20


@dataclass(frozen=True)
class Way:
    """A contestant, how many processes it has, and what it is told besides."""

    text: str

    @property
    def name(self) -> str:
        return self.text.partition(":")[0].partition("-")[0]

    @property
    def processes(self) -> int:
        return int(self.text.partition(":")[0].partition("-")[2] or 1)

    @property
    def machine(self) -> dict[str, object]:
        pairs = [pair.partition("=") for pair in self.text.partition(":")[2].split(",") if pair]
        return {key: json.loads(value) if value[0].isdigit() else value for key, _, value in pairs}


@dataclass(frozen=True)
class Outcome:
    """What one run of one way came to: seconds of each round, CPU seconds of a round after the first, bytes."""

    start: float
    seconds: list[float]
    cpu: float
    resident: int
    gpu: int
    accuracy: float
    loss: float


def prepare(spec: ProblemSpec, folder: Path) -> None:
    """Write a problem down, as vitfleet would deal it."""
    config = make_config(spec, {})
    data = load_dataset(config.data)
    deal = partition_dataset(config.data.partition, spec.clients, spec.seed, data).train
    chosen = [choose_clients(config, round) for round in range(1, spec.rounds + 1)]
    tensors = {
        "images": data.train.images,
        "labels": data.train.labels,
        "test_images": data.test.images,
        "test_labels": data.test.labels,
    }
    for round, clients in enumerate(chosen, start=1):
        for client in clients:
            own = torch.from_numpy(deal.for_client(client))
            epochs = [
                draw_epoch(spec.seed, round, client, epoch, len(own), 32, config.data.augment, 0, 0).order
                for epoch in range(spec.epochs)
            ]
            tensors[f"order-{round}-{client}"] = torch.stack([own[torch.from_numpy(order)] for order in epochs])
    save_problem(folder, spec, chosen, tensors, build_model(config.model, 10, 3, 32, spec.seed).initial_weights())


def play(way: Way, folder: Path, threads: int, limit: float) -> Outcome:
    """Run one way on a problem."""
    for name in ("started", "result.json", "result.safetensors"):
        (folder / name).unlink(missing_ok=True)
    each = max(1, threads // way.processes)
    launcher = []
    if way.processes > 1 and way.name in ("ours", "pfl"):
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(way.processes)]
    words = [str(CONTESTANTS / SCRIPTS[way.name]), str(folder), str(way.processes), str(each)]
    paths = [str(CONTESTANTS), os.environ.get("PYTHONPATH", "")]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": str(each),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "VITFLEET_MACHINE": json.dumps(way.machine),
    }
    if Problem(folder).device.type == "cpu":
        env["PFL_PYTORCH_DEVICE"] = "cpu"
    before = gpu_bytes()
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([sys.executable, *launcher, *words], env=env, stdout=log, stderr=log)
        seen = watch(process, folder / "started", limit)
        took = time.perf_counter() - started
        if process.returncode:
            log.seek(0)
            raise SystemExit(f"{way.text} failed (exit {process.returncode}):\n{log.read()[-4000:]}")
    result = json.loads((folder / "result.json").read_text())
    seconds, ends = result["seconds"], result["ends"]
    cpu = (used_until(seen, ends[-1]) - used_until(seen, ends[0])) / (len(ends) - 1)
    gpu = max(0, max(sight.gpu for sight in seen) - before)
    most = max(sight.resident for sight in seen)
    return Outcome(took - sum(seconds), seconds, cpu, most, gpu, *judge(folder))


@dataclass(frozen=True)
class Sight:
    """What a process and its descendants had at a moment: CPU seconds used so far, bytes resident and on the GPU."""

    at: float
    cpu: float
    resident: int
    gpu: int


def watch(process: subprocess.Popen[bytes], started: Path, limit: float) -> list[Sight]:
    """Wait for a process, looking at it now and then from the first round on, when it makes the file ``started``."""
    seen: list[Sight] = []
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.3):
            if not started.exists():
                continue
            found = [ask(one) for one in family(process.pid)]
            cpu, resident = (sum(column) for column in zip(*found, strict=True)) if found else (0.0, 0)
            seen.append(Sight(time.time(), cpu, resident, gpu_bytes()))

    observer = threading.Thread(target=look)
    observer.start()
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        for one in family(process.pid):
            one.kill()
        process.wait()
    finally:
        done.set()
        observer.join()
    return seen


def used_until(seen: list[Sight], moment: float) -> float:
    """Return the CPU seconds used at the sight nearest to a moment."""
    return min(seen, key=lambda sight: abs(sight.at - moment)).cpu


def family(pid: int) -> list[psutil.Process]:
    try:
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def ask(process: psutil.Process) -> tuple[float, int]:
    """Return a process' CPU seconds and its share of the resident memory: what several map counts once among them."""
    try:
        times = process.cpu_times()
        return times.user + times.system, int(process.memory_full_info().pss)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0.0, 0


def gpu_bytes() -> int:
    """Return what is taken of the GPU's memory, by whomever."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


@torch.inference_mode()
def judge(folder: Path) -> tuple[float, float]:
    """Return accuracy and cross-entropy of a result on the test images; one judge for all, in full precision."""
    from safetensors.torch import load_file

    problem = Problem(folder)
    model = problem.model().eval()
    model.vit.load_state_dict(load_file(folder / "result.safetensors"))
    images, labels = (problem.tensors[name].to(problem.device) for name in ("test_images", "test_labels"))
    logits = torch.cat([model(part) for part in torch.split(images, 256)])
    return float((logits.argmax(1) == labels).float().mean()), float(F.cross_entropy(logits, labels))


def rows_of(spec: ProblemSpec, found: dict[str, list[Outcome]], samples: list[int]) -> list[dict[str, object]]:
    """Return a row for each way; seconds a round are those of the rounds after the first."""

    def a_round(one: Outcome) -> float:
        return statistics.mean(one.seconds[1:])

    rows: list[dict[str, object]] = []
    for text, outcomes in found.items():
        ratios = [a_round(one) / a_round(ours) for one, ours in zip(outcomes, found[next(iter(found))], strict=False)]
        middle = statistics.median(map(a_round, outcomes))
        rows.append(
            {
                "way": text,
                "clients": spec.clients,
                "a round": spec.per_round,
                "batch": spec.batch,
                "precision": Way(text).machine.get("precision", "bf16" if spec.bf16 else "fp32"),
                "accuracy %": round(100 * outcomes[0].accuracy, 2),
                "test loss": round(outcomes[0].loss, 4),
                "s a round": round(middle, 3),
                "samples/s": round(statistics.mean(samples[1:]) / middle, 1),
                f"times {next(iter(found))}": round(statistics.median(ratios), 3),
                "each turn": " ".join(f"{ratio:.2f}" for ratio in ratios),
                "CPU s a round": round(statistics.median(one.cpu for one in outcomes), 2),
                "memory MiB": round(max(one.resident for one in outcomes) / MIB),
                "GPU MiB": round(max(one.gpu for one in outcomes) / MIB),
                "first round s": round(statistics.median(one.seconds[0] for one in outcomes), 2),
                "start s": round(statistics.median(one.start for one in outcomes), 1),
            }
        )
    return rows


def surroundings(threads: int) -> dict[str, str]:
    """Return what the figures depend on."""
    place = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    packages = ", ".join(f"{name} {found}" for name in PACKAGES if (found := _version(name)))
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "hardware": f"{processor_name()}, {threads} threads, {place}",
        "versions": f"Python {platform.python_version()}, {packages}",
        "command": " ".join(["python", "benchmarks/peers.py", *sys.argv[1:]]),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def markdown(rows: list[dict[str, object]]) -> str:
    heads = list(rows[0])
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(str(row[head]) for head in heads) + " |" for row in rows)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True, help="where cifar10/ lies")
    parser.add_argument("--images", type=int, help="training images, and a fifth of it to test; default: all")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--per-round", type=int, nargs="+", default=[10, 20])
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--rounds", type=int, default=3, help="the first is not counted")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--beta", type=float, default=100.0, help="Dirichlet's: small ones make unequal clients")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of all processes together")
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=1800, help="seconds that one run may take")
    parser.add_argument("--out", type=Path, help="folder for peers.csv and peers.md")
    args = parser.parse_args()
    ways = [Way(text) for text in args.ways]
    if strange := [way.text for way in ways if way.name not in SCRIPTS]:
        parser.error(f"--ways {strange[0]}: is none of {', '.join(SCRIPTS)}")
    if args.rounds < 2:
        parser.error("--rounds: must be 2 or more, the first is not counted")
    torch.set_num_threads(args.threads)
    about = surroundings(args.threads)
    print("\n".join(f"{key}: {value}" for key, value in about.items()), flush=True)
    first = ProblemSpec(
        clients=args.clients,
        per_round=args.per_round[0],
        rounds=args.rounds,
        epochs=args.epochs,
        batch=args.batch[0],
        lr=args.lr,
        weight_decay=0.05,
        bf16=args.precision == "bf16",
        device=args.device,
        seed=args.seed,
        data_dir=str(Path(args.data_dir).resolve()),
        images=args.images,
        beta=args.beta,
    )
    rows: list[dict[str, object]] = []
    folder = Path(tempfile.mkdtemp(prefix="peers-"))
    try:
        for per_round, batch in itertools.product(args.per_round, args.batch):
            spec = replace(first, per_round=per_round, batch=batch)
            prepare(spec, folder)
            samples = Problem(folder).samples()
            found: dict[str, list[Outcome]] = {way.text: [] for way in ways}
            for turn, way in itertools.product(range(args.repeats), ways):
                outcome = play(way, folder, args.threads, args.limit)
                found[way.text].append(outcome)
                laps = " ".join(f"{one:.2f}" for one in outcome.seconds)
                print(f"{per_round} a round, batch {batch}, turn {turn + 1}, {way.text}: rounds {laps} s", flush=True)
            rows += rows_of(spec, found, samples)
            print("\n" + markdown(rows[-len(ways) :]), flush=True)
    finally:
        shutil.rmtree(folder)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        with (args.out / "peers.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0], *about])
            writer.writeheader()
            writer.writerows({**row, **about} for row in rows)
        lines = [f"- {key}: {value}" for key, value in about.items()]
        (args.out / "peers.md").write_text("\n".join(lines) + "\n\n" + markdown(rows))


if __name__ == "__main__":
    main()
