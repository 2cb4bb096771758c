"""What the way over real machines costs, on loopback with TLS and keys.

python benchmarks/fleet.py overhead --out /tmp/overhead   # 18 MB and 2 devices, in turns with Flower's own minimal app
python benchmarks/fleet.py memory --out /tmp/memory       # ViT-B, 4 devices: the largest memory of each process

A round is timed from the end of the one before to its own: ours ends when its checkpoint is committed, Flower's when
its strategy has aggregated. The first round of each fleet is left out: devices join in it, and load what stays.
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
from vitfleet.data.assignment import assign_images
from vitfleet.data.export import export_clients
from vitfleet.data.sources import load_dataset
from vitfleet.flower.certificates import Certs, make_certs
from vitfleet.flower.commands import CONNECTION, ServerSettings, client_command, environment, free_port
from vitfleet.flower.flwr_cli import run_flwr, start_run
from vitfleet.flower.processes import running_server, stop_process_group
from vitfleet.flower.server import follow
from vitfleet.run.folder import create_run_folder
from vitfleet.run.records import RoundRecord, read_records

MIB = 2**20
TURNS = 2
SMALL = ["rounds=6", "model.dim=256", "model.depth=6", "model.heads=4", "model.patch_size=2", "data.limit=40"]
LARGE = ["rounds=2", "model.name=vit_base_patch16_224", "data.limit=24", "train.batch_size=1", "train.optimizer=sgd"]
COMMON = ["data.partition.kind=iid", "eval.every=1000", "eval.batch_size=4", "machine.device=cpu", "machine.threads=1"]


def print_round(record: RoundRecord, seconds: float) -> None:
    failures = [entry.failure for entry in record.clients if entry.failure]
    print(f"round {record.round}: {seconds:.1f} s {failures or ''}", flush=True)


class Peaks:
    """The largest resident memory of a fleet's processes of each kind, looked at ten times a second."""

    def __init__(self, out: Path, eval_reply: Sequence[str]) -> None:
        self.out = str(out)
        self.peaks = dict.fromkeys(eval_reply, 0)
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.watch)

    def watch(self) -> None:
        while not self.ended.wait(0.1):
            for process in psutil.process_iter():
                try:
                    line = " ".join(process.cmdline())
                    mark = next((mark for mark in self.peaks if mark in line), None)
                    if mark is not None and process.environ().get("FLWR_HOME", "").startswith(self.out):
                        self.peaks[mark] = max(self.peaks[mark], process.memory_info().rss)
                except psutil.Error:  # it has just ended, or is somebody else's
                    continue


def join(out: Path, names: Sequence[str], settings: ServerSettings, certs: Certs) -> list[subprocess.Popen[bytes]]:
    processes = []
    for name in names:
        home = out / "devices" / name
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


def play(out: Path, config: Config, certs: Certs, names: Sequence[str]) -> None:
    settings = ServerSettings("127.0.0.1", free_port(), certs.home, certs)
    with running_server(settings, names):
        devices = join(out, names, settings, certs)
        try:
            create_run_folder(config, out / "run", "fleet", ["benchmarks/fleet.py"]).release()
            follow(settings, out / "run", start_run(settings, out / "run"), print_round)
        finally:
            for device in devices:
                stop_process_group(device)


def play_timed(out: Path, config: Config, certs: Certs, names: Sequence[str]) -> list[float]:
    """Run ours and return the seconds of its rounds, by the times of its checkpoints."""
    seen: list[float] = []
    over = threading.Event()

    def watch() -> None:
        partition_io = out / "run" / "checkpoint" / "checkpoint.json"
        while not over.wait(0.02):
            if partition_io.exists() and (written := partition_io.stat().st_mtime_ns / 1e9) not in seen[-1:]:
                seen.append(written)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        play(out, config, certs, names)
    finally:
        over.set()
        watcher.join()
    assert len(seen) == config.rounds
    return [later - earlier for earlier, later in pairwise(seen)]


def play_minimal(out: Path, names: Sequence[str], certs: Certs, rounds: int, floats: int) -> list[float]:
    """Run Flower's own app as its documentation has it: its own intervals, its own database in memory, no gate."""
    port, home = free_port(), out / "flower-home"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink.{CONNECTION}]\naddress = "127.0.0.1:{port}"\nroot-certificates = "{certs.ca}"\n'
    )
    env = {key: value for key, value in environment(home).items() if key != "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"}
    link = ["flower-superlink", "--port", str(port), "--enable-supernode-auth", "--ssl-ca-certfile", str(certs.ca)]
    link += ["--ssl-certfile", str(certs.server), "--ssl-keyfile", str(certs.server_key)]
    log = (out / "minimal.log").open("wb")
    processes = [subprocess.Popen(link, env=env, stdout=log, stderr=log, start_new_session=True)]
    try:
        time.sleep(10)
        settings = ServerSettings("127.0.0.1", port, home, certs)
        keys = [str(certs.node_public_key(name)) for name in names]
        run_flwr(settings, *(["supernode", "register", key, CONNECTION] for key in keys))
        for name in names:
            node = ["flower-supernode", "--superlink", f"127.0.0.1:{port}", "--root-certificates", str(certs.ca)]
            node += ["--auth-supernode-private-key", str(certs.node_key(name)), "--port", str(free_port())]
            own = {**env, "FLWR_HOME": str(out / f"minimal-{name}")}
            processes.append(subprocess.Popen(node, env=own, stdout=log, stderr=log, start_new_session=True))
        report = out / "minimal.json"
        words = f'rounds={rounds} floats={floats} report="{report}"'
        app = str(Path(__file__).parent / "flower_minimal")
        run_flwr(settings, ["run", app, CONNECTION, "--run-config", words])
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
    theirs: list[float] = []
    for turn in range(TURNS):
        here = out / str(turn)
        config, certs = prepare(here, names, SMALL)
        ours += play_timed(here, config, certs, names)
        size = list(read_records(here / "run"))[-1].clients[0].up_bytes
        theirs += play_minimal(here, names, certs, config.rounds, size // 4)
        print(f"turn {turn}: ours {shown(ours)}; Flower's {shown(theirs)}", flush=True)
    mine, other = statistics.median(ours), statistics.median(theirs)
    print(f"a message of {size / 1e6:.1f} MB, {len(names)} devices, median of {len(ours)} rounds: {mine:.2f} s, "
          f"Flower's own app {other:.2f} s (of {len(theirs)}), {mine / other:.2f} times")  # fmt: skip


def shown(seconds: Sequence[float]) -> str:
    return " ".join(f"{one:.1f}" for one in seconds)


BARE = """
import psutil
from torch.utils import tensorboard
from vitfleet.config import load_config
from vitfleet.data.sources import load_dataset
from flwr.superlink import cli
from vitfleet.flower import server_app
load_dataset(load_config("digits").data)
print(psutil.Process().memory_info().rss)
"""


def bare() -> int:
    """Return the memory of a process that has imported what the server's app imports and read the data, no more."""
    return int(subprocess.run([sys.executable, "-c", BARE], capture_output=True, check=True, text=True).stdout)


def memory(out: Path) -> None:
    names = ("one", "two", "three", "four")
    config, certs = prepare(out, names, LARGE)
    app, eval_reply = "flwr-serverapp", ("flower-superlink", "vitfleet.flower.proxy", "flwr-clientapp", "flower.worker")
    peaks = Peaks(out, (app, *eval_reply))
    peaks.thread.start()
    try:
        play(out, config, certs, names)
    finally:
        peaks.ended.set()
        peaks.thread.join()
    size = list(read_records(out / "run"))[-1].clients[0].up_bytes
    print(f"messages of {size / MIB:.0f} MiB from {len(names)} devices")
    for mark, peak in peaks.peaks.items():
        print(f"{mark}: {peak / MIB:.0f} MiB, {peak / size:.2f} messages")
    idle = bare()
    print(f"{app} before it has a model: {idle / MIB:.0f} MiB; what it adds: "
          f"{(peaks.peaks[app] - idle) / MIB:.0f} MiB, {(peaks.peaks[app] - idle) / size:.2f} messages")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["overhead", "memory"])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    {"overhead": overhead, "memory": memory}[given.what](given.out.resolve())
