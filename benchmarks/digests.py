"""Digests of final weights and recorded numbers: every method on a CPU, two rounds or tasks on digits, and a fleet.

A change that is meant to change no result is held to these: run it before the change with ``--write FILE`` and
afterwards with ``--check FILE``. A digest is of one model of processor, torch version and number of threads: matrix
libraries choose their kernels by the processor. So there is a file for each kind of machine in ``tests/digests``.

    OMP_NUM_THREADS=1 python benchmarks/digests.py --check tests/digests/intel-6-207.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

COMMON = (
    "rounds=2 fleet.clients=6 fleet.per_round=3 machine.device=cpu machine.precision=fp32 machine.threads=1 "
    "machine.workers=1 data.limit=400 train.epochs=2 train.schedule=cosine data.augment.flip=true "
    "data.augment.crop=0.1 model.patch_size=2 data.partition.beta=0.5"
)
TASKS = (
    "data.tasks.count=2 data.tasks.classes=2 data.tasks.per_client=[1,2] data.tasks.rounds_per_task=2 "
    "data.tasks.share=[0.2,0.4] fleet.clients=6 fleet.per_round=4 machine.device=cpu machine.precision=fp32 "
    "machine.threads=1 machine.workers=1 train.epochs=3"
)
COMMON_TASKS = (
    "data.tasks.count=2 data.tasks.classes=2 data.tasks.rounds_per_task=2 data.tasks.order=common "
    "data.tasks.partitioned=true data.tasks.scenario=class data.partition.beta=0.5 rounds=4 fleet.clients=6 "
    "fleet.per_round=4 machine.device=cpu machine.precision=fp32 machine.threads=1 machine.workers=1"
)
WITHOUT_TASKS = {
    "standalone": "",
    "fedavg": "",
    "fedprox": "method.mu=0.1",
    "apfl": "",
    "transfl": "method.k=2",
    "fed-full": "",
    "fed-head": "",
    "fed-bias": "",
    "fed-prompt": "method.prompts=3",
    "fed-lora": "method.rank=2",
    "fedbfpt": "method.local_layers=3",
    "eftvit": "method.local_layers=2 train.mask_ratio=0.5",
    "closed-form": "model.weights=digits method.features=both method.blocks=2",
    "fedper": "",
    "fedrep": "",
}
WITH_TASKS = {
    "gem": "method.margin=0.5",
    "a-gem": "",
    "ewc": "",
    "mas": "",
    "fedweit": "",
    "fedvit": "method.k=1 method.head_epochs=1",
    "fedknow": "method.k=1",
    "er": "",
    "der++": "",
    "dytox": "",
    "bcn": "",
    "lvt": "",
    "analytic": "model.weights=digits method.features=both method.blocks=2",
    "joint": "",
}
MORE = {
    "fedavg, stacked": ("digits", f"{COMMON} method.name=fedavg machine.stack_size=3"),
    "transfl, stacked": ("digits", f"{COMMON} method.name=transfl method.k=2 machine.stack_size=3"),
    "fedvit, stacked": ("fedvit-digits", f"{TASKS} method.name=fedvit machine.stack_size=4"),
    "fedavg, buffered": (
        "digits",
        f"{COMMON} method.name=fedavg fleet.schedule.kind=buffered fleet.schedule.concurrency=3",
    ),
    "er, common tasks": ("start-fedavg", f"{COMMON_TASKS} method.name=er method.heads=shared head.start=closed-form"),
    "fedavg, trimmed": ("digits", f"{COMMON} method.name=fedavg aggregate.rule=trimmed aggregate.trim=0.34"),
}
FLOWER = (
    "rounds=2 eval.clients=0 method.name=transfl method.k=2 data.limit=400 train.epochs=1 "
    "model.patch_size=2 data.partition.beta=0.5"
)
EXPORT = "export-data --to parquet"  # keeps the order of the images
HARDWARE_PROFILES = ("kitchen", "garden")


def cases() -> dict[str, tuple[str, str]]:
    """Return what is run in one process: a preset and its overrides, by name."""
    plain = {name: ("digits", f"{COMMON} method.name={name} {more}") for name, more in WITHOUT_TASKS.items()}
    tasks = {name: ("fedvit-digits", f"{TASKS} method.name={name} {more}") for name, more in WITH_TASKS.items()}
    return {**plain, **tasks, **MORE}


def environment() -> dict[str, str]:
    """Return what a digest depends on besides the code."""
    return {
        "torch": torch.__version__.split("+")[0],
        "machine": platform.machine(),
        "processor": processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def processor() -> str:
    """Return the vendor, the family and the model of the processor; other systems than Linux name it differently."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    fields = dict(reversed([[part.strip() for part in line.split(":", 1)] for line in lines if ":" in line]))
    known = [fields.get(name) for name in ("vendor_id", "cpu family", "model")]
    return " ".join(part for part in known if part) or platform.processor()


def vitfleet(*arguments: str) -> list[str]:
    """Return the command line of a vitfleet command."""
    return [sys.executable, "-m", "vitfleet", *arguments]


def run_case(preset: str, overrides: str, folder: Path) -> dict[str, str]:
    """Train one configuration and return its digests."""
    options = [part for override in overrides.split() for part in ("-o", override)]
    subprocess.run(vitfleet("run", preset, *options, "--out", str(folder)), check=True, capture_output=True)
    return digest(folder)


def run_flower(folder: Path, export: str) -> dict[str, str]:
    """Train on two real clients over TLS, one process tree each, and return the run's digests."""
    names = ",".join(HARDWARE_PROFILES)
    options = [part for override in FLOWER.split() for part in ("-o", override)]
    certs, shards, out = folder / "certs", folder / "shards", folder / "run"
    subprocess.run(
        vitfleet(*export.split(), "digits", "--out", str(shards), "--names", names, *options[4:]),
        check=True, capture_output=True,
    )  # fmt: skip
    subprocess.run(
        vitfleet("certs", str(certs), "--host", "127.0.0.1", "--names", names), check=True, capture_output=True
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    log = (folder / "log").open("w")
    server = subprocess.Popen(
        vitfleet(
            "server", "digits", *options, "-o", "machine.precision=fp32", "-o", "machine.device=cpu",
            "-o", "machine.threads=1", "--out", str(out), "--certs", str(certs), "--host", "127.0.0.1", "--port", port,
        ),
        stdout=log, stderr=log,
    )  # fmt: skip
    clients = [
        subprocess.Popen(
            vitfleet(
                "client", "--server", f"127.0.0.1:{port}", "--data", str(shards / name), "--name", name,
                "--certs", str(certs), "--state", str(folder / "state" / name), "--device", "cpu", "--threads", "1",
            ),
            stdout=log, stderr=log,
        )
        for name in HARDWARE_PROFILES
    ]  # fmt: skip
    try:
        code = server.wait(timeout=600)
    finally:
        for process in (*clients, server):
            process.terminate()
        for process in (*clients, server):
            process.wait(timeout=60)
    if code:
        raise SystemExit((folder / "log").read_text()[-4000:])
    return digest(out)


def digest(folder: Path) -> dict[str, str]:
    """Return digests of a run's final states, its model, and the numbers in its records."""
    states = hashlib.sha256()
    for path in sorted((folder / "checkpoint").glob("*.safetensors")):
        states.update(path.name.encode())
        states.update(_tensors(path))
    numbers = hashlib.sha256()
    for line in (folder / "records.jsonl").read_text().splitlines():
        numbers.update(json.dumps(_numbers(json.loads(line))).encode())
    digests = {"states": states.hexdigest(), "records": numbers.hexdigest()}
    model = folder / "model.safetensors"
    # Where a part of the model is a mean over clients, it follows from the states.
    if model.exists() and not _averaged_clients(model):
        digests["model"] = hashlib.sha256(_tensors(model)).hexdigest()
    return digests


def _averaged_clients(path: Path) -> int:
    with safe_open(path, "pt") as file:
        return int(json.loads(file.metadata()["vitfleet"])["averaged_clients"])


def _tensors(path: Path) -> bytes:
    found = hashlib.sha256()
    with safe_open(path, "pt") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name).contiguous()
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return found.digest()


def _numbers(record: dict[str, Any]) -> list[Any]:
    """Return the numbers of a record, under no name: names may change, numbers may not."""
    accuracy = record["accuracy"] or {}
    learned = record["task"] or {}
    clients = [
        [
            *(client[key] for key in ("client", "down_bytes", "up_bytes", "correct", "tested", "gflops")),
            *(client[key] for key in ("began", "ended")),
            list(client["numbers"].values()),
        ]
        for client in record["clients"]
    ]
    return [
        *(record[key] for key in ("round", "lr", "loss", "total_up_bytes", "total_down_bytes", "virtual_seconds")),
        [accuracy.get(key) for key in ("global_", "loss", "models", "local")],
        [learned.get(key) for key in ("task", "matrix", "initial", "average_accuracy", "forgetting")],
        [learned.get(key) for key in ("backward_transfer", "forward_transfer")],
        clients,
    ]


def compute(names: list[str], export: str) -> dict[str, dict[str, str]]:
    """Run the named cases, or all of them, one after the other."""
    found: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (preset, overrides) in cases().items():
            if not names or name in names:
                started = time.perf_counter()
                found[name] = run_case(preset, overrides, Path(folder) / name.replace(", ", "-"))
                print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)
        if not names or "flower" in names:
            found["flower"] = run_flower(Path(folder), export)
            print("flower", flush=True)
    return found


def main() -> None:
    """Write digests, or compare them with those of an earlier version."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--check", type=Path)
    parser.add_argument("--export", default=EXPORT, help="the command that writes every client's images")
    parser.add_argument("names", nargs="*", help="only these cases")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found = compute(given.names, given.export)
    if given.write:
        given.write.write_text(json.dumps({"environment": environment(), "digests": found}, indent=1) + "\n")
    if given.check:
        known = json.loads(given.check.read_text())
        if known["environment"] != environment():
            raise SystemExit(f"written on {known['environment']}, this is {environment()}: digests do not compare")
        wrong = [name for name, value in found.items() if known["digests"].get(name) != value]
        for name in wrong:
            print(f"{name}: {found[name]}\n  was {known['digests'].get(name)}")
        print(f"{len(found) - len(wrong)} of {len(found)} digests are as they were")
        sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
