"""Overhead and memory of a fleet on real machines, measured on loopback with TLS and keys.

python benchmarks/fleet.py overhead --out /tmp/overhead   # 18 MiB and 2 clients, alternating with a minimal Flower app
python benchmarks/fleet.py memory --out /tmp/memory       # ViT-B and 4 clients: peak memory of each process

A round is timed from the end of the previous one to its own end. Ours ends when its checkpoint is committed, Flower's
when its strategy has aggregated. The first round of each fleet is not counted: clients connect and load in it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import psutil

from vitfleet.config import load_config
from vitfleet.config.schema import Config
from vitfleet.data.export import export_clients
from vitfleet.data.partitions.assign import assign_images
from vitfleet.data.sources.load import load_dataset
from vitfleet.flower.certificates import Certs, make_certs
from vitfleet.flower.device.supernode import client_command
from vitfleet.flower.processes import environment, free_port, stop_process_group
from vitfleet.flower.server.processes import CONNECTION, ServerSettings, run_flwr, running_server, start_run
from vitfleet.flower.server.serve import follow
from vitfleet.run.output.folder import create_run_folder
from vitfleet.run.records import RoundRecord, read_records

MIB = 2**20
REPEATS = 2
SMALL = ["rounds=6", "model.dim=256", "model.depth=6", "model.heads=4", "model.patch_size=2", "data.limit=40"]
LARGE = ["rounds=2", "model.name=vit_base_patch16_224", "data.limit=24", "train.batch_size=1", "train.optimizer=sgd"]
COMMON = ["data.partition.kind=iid", "eval.every=1000", "eval.batch_size=4", "machine.device=cpu", "machine.threads=1"]


def print_round(record: RoundRecord, seconds: float) -> None:
    failures = [entry.failure for entry in record.clients if entry.failure]
    print(f"round {record.round}: {seconds:.1f} s {failures or ''}", flush=True)


class PeakMemory:
    """Peak resident memory of a fleet's processes by a part of their command lines, sampled ten times a second."""

    def __init__(self, out: Path, commands: Sequence[str]) -> None:
        self.out = str(out)
        self.peaks = dict.fromkeys(commands, 0)
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.watch)

    def watch(self) -> None:
        while not self.ended.wait(0.1):
            for process in psutil.process_iter():
                try:
                    line = " ".join(process.cmdline())
                    command = next((command for command in self.peaks if command in line), None)
                    if command is not None and process.environ().get("FLWR_HOME", "").startswith(self.out):
                        self.peaks[command] = max(self.peaks[command], process.memory_info().rss)
                except psutil.Error:  # it has just ended, or belongs to another user
                    continue


def start_clients(
    out: Path, names: Sequence[str], settings: ServerSettings, certs: Certs
) -> list[subprocess.Popen[bytes]]:
    processes = []
    for name in names:
        home = out / "clients" / name
        home.mkdir(parents=True, exist_ok=True)
        command = client_command(
            f"127.0.0.1:{settings.port}", name, out / "data" / name, home, certs, {"device": "cpu", "threads": 1}
        )
        with (home / "log").open("ab") as log:
            processes.append(
                subprocess.Popen(
                    command, env=environment(home / "flower"), stdout=log, stderr=log, start_new_session=True
                )
            )
    return processes


def prepare(out: Path, names: Sequence[str], overrides: list[str]) -> tuple[Config, Certs]:
    shutil.rmtree(out, ignore_errors=True)
    fleet = [f"fleet.clients={len(names)}", f"fleet.per_round={len(names)}"]
    config = load_config("digits", [*overrides, *COMMON, *fleet])
    data = load_dataset(config.data)
    export_clients(data, assign_images(config, data), list(names), out / "data")
    flower = config.fleet.model_copy(update={"kind": "flower", "names": tuple(names)})
    return config.model_copy(update={"fleet": flower}), make_certs(out / "fleet", [], names)


def run_ours(out: Path, config: Config, certs: Certs, names: Sequence[str]) -> None:
    settings = ServerSettings("127.0.0.1", free_port(), certs.home, certs)
    with running_server(settings, names):
        clients = start_clients(out, names, settings, certs)
        try:
            create_run_folder(config, out / "run", "fleet", ["benchmarks/fleet.py"]).release()
            follow(settings, out / "run", start_run(settings, out / "run"), print_round)
        finally:
            for client in clients:
                stop_process_group(client)


def time_ours(out: Path, config: Config, certs: Certs, names: Sequence[str]) -> list[float]:
    """Run vitfleet and return the seconds of its rounds, from the times of its checkpoints."""
    written_at: list[float] = []
    ended = threading.Event()

    def watch() -> None:
        checkpoint = out / "run" / "checkpoint" / "checkpoint.json"
        while not ended.wait(0.02):
            if checkpoint.exists() and (written := checkpoint.stat().st_mtime_ns / 1e9) not in written_at[-1:]:
                written_at.append(written)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run_ours(out, config, certs, names)
    finally:
        ended.set()
        watcher.join()
    assert len(written_at) == config.rounds
    return [later - earlier for earlier, later in pairwise(written_at)]


def time_minimal(out: Path, names: Sequence[str], certs: Certs, rounds: int, floats: int) -> list[float]:
    """Run a minimal Flower app as its documentation shows it: default intervals, database in memory, no proxy."""
    port, home = free_port(), out / "flower-home"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink.{CONNECTION}]\naddress = "127.0.0.1:{port}"\nroot-certificates = "{certs.ca}"\n'
    )
    env = {key: value for key, value in environment(home).items() if key != "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"}
    superlink = ["flower-superlink", "--port", str(port), "--enable-supernode-auth", "--ssl-ca-certfile", str(certs.ca)]
    superlink += ["--ssl-certfile", str(certs.server), "--ssl-keyfile", str(certs.server_key)]
    log = (out / "minimal.log").open("wb")
    processes = [subprocess.Popen(superlink, env=env, stdout=log, stderr=log, start_new_session=True)]
    try:
        time.sleep(10)
        settings = ServerSettings("127.0.0.1", port, home, certs)
        keys = [str(certs.node_public_key(name)) for name in names]
        run_flwr(settings, *(["supernode", "register", key, CONNECTION] for key in keys))
        for name in names:
            node = ["flower-supernode", "--superlink", f"127.0.0.1:{port}", "--root-certificates", str(certs.ca)]
            node += ["--auth-supernode-private-key", str(certs.node_key(name)), "--port", str(free_port())]
            node_env = {**env, "FLWR_HOME": str(out / f"minimal-{name}")}
            processes.append(subprocess.Popen(node, env=node_env, stdout=log, stderr=log, start_new_session=True))
        report = out / "minimal.json"
        run_config = f'rounds={rounds} floats={floats} report="{report}"'
        app = str(Path(__file__).parent / "flower_minimal")
        run_flwr(settings, ["run", app, CONNECTION, "--run-config", run_config])
        while not report.exists():
            time.sleep(0.5)
        ends = json.loads(report.read_text())["ends"]
        return [later - earlier for earlier, later in pairwise(ends[1:])]
    finally:
        for process in reversed(processes):
            stop_process_group(process)


def overhead(out: Path) -> None:
    names = ("one", "two")
    shutil.rmtree(out, ignore_errors=True)
    ours: list[float] = []
    minimal: list[float] = []
    for repeat in range(REPEATS):
        folder = out / str(repeat)
        config, certs = prepare(folder, names, SMALL)
        ours += time_ours(folder, config, certs, names)
        size = list(read_records(folder / "run"))[-1].clients[0].up_bytes
        minimal += time_minimal(folder, names, certs, config.rounds, size // 4)
        print(f"repeat {repeat}: ours {formatted(ours)}; minimal Flower app {formatted(minimal)}", flush=True)
    ours_median, minimal_median = statistics.median(ours), statistics.median(minimal)
    print(f"message of {size / 2**20:.1f} MiB, {len(names)} clients, median of {len(ours)} rounds: "
          f"{ours_median:.2f} s; minimal Flower app, median of {len(minimal)} rounds: {minimal_median:.2f} s; "
          f"ratio {ours_median / minimal_median:.2f}")  # fmt: skip


def formatted(seconds: Sequence[float]) -> str:
    return " ".join(f"{value:.1f}" for value in seconds)


IMPORTS_ONLY = """
import psutil
from torch.utils import tensorboard
from vitfleet.config import load_config
from vitfleet.data.sources.load import load_dataset
from flwr.superlink import cli
from vitfleet.flower.server import server_app
load_dataset(load_config("digits").data)
print(psutil.Process().memory_info().rss)
"""


def baseline_memory() -> int:
    """Return the memory of a process that has only imported what the ServerApp imports and read the data."""
    return int(subprocess.run([sys.executable, "-c", IMPORTS_ONLY], capture_output=True, check=True, text=True).stdout)


def memory(out: Path) -> None:
    names = ("one", "two", "three", "four")
    config, certs = prepare(out, names, LARGE)
    server_app = "flwr-serverapp"
    commands = (server_app, "flower-superlink", "vitfleet.flower.server.proxy", "flwr-clientapp", "flower.worker")
    peaks = PeakMemory(out, commands)
    peaks.thread.start()
    try:
        run_ours(out, config, certs, names)
    finally:
        peaks.ended.set()
        peaks.thread.join()
    size = list(read_records(out / "run"))[-1].clients[0].up_bytes
    print(f"messages of {size / MIB:.0f} MiB from {len(names)} clients")
    for command, peak in peaks.peaks.items():
        print(f"{command}: {peak / MIB:.0f} MiB, {peak / size:.2f} messages")
    baseline = baseline_memory()
    added = peaks.peaks[server_app] - baseline
    print(f"{server_app} before it has a model: {baseline / MIB:.0f} MiB; added afterwards: "
          f"{added / MIB:.0f} MiB, {added / size:.2f} messages")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measure", choices=["overhead", "memory"])
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    {"overhead": overhead, "memory": memory}[arguments.measure](arguments.out.resolve())
