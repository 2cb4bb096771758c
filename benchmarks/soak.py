"""A fleet of real processes over hundreds of rounds: do memory, open files, sockets or processes grow?

    .venv/bin/python benchmarks/soak.py --out /tmp/soak

Two clients, 300 rounds. Every few seconds the memory, the open files and the sockets of every process that stays are
read, and the number of all processes of the fleet. Printed are the medians of an early and of a late part of the run.
Afterwards server and clients get Ctrl-C, and nothing may be left of them.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import statistics
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from chaos import METHODS, TINY, FaultPlan, FleetProcesses

NAMES = ("ada", "bob")
# Part of a command line, and what the process is. Processes that Flower starts for one message are only counted.
ROLES = {
    "vitfleet server": "server",
    "flower-superlink": "SuperLink",
    "vitfleet.flower.server.proxy": "proxy",
    "flwr-serverapp": "rounds",
    "flower-supernode": "SuperNode",
    "vitfleet.flower.device.worker": "worker",
}
INTERVAL_S = 5.0
STOP_TIMEOUT_S = 60.0
EARLY, LATE = (0.1, 0.3), (0.8, 1.0)  # parts of the run that are compared
Sample = tuple[int, dict[str, tuple[float, float, float]], int]  # round; MiB, files and sockets by role; processes


@dataclass
class Sampler:
    """Reads what the processes of a fleet use, in a thread of its own."""

    fleet: FleetProcesses
    samples: list[Sample] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.ended.wait(INTERVAL_S):
            self.samples.append((rounds_done(self.fleet.out / "run"), *self.read()))

    def read(self) -> tuple[dict[str, tuple[float, float, float]], int]:
        processes = fleet_processes(self.fleet)
        used: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
        for process in processes:
            try:
                role = role_of(process)
                if role is not None:
                    sockets = len(process.net_connections(kind="all"))
                    used[role].append((process.memory_info().rss / 2**20, process.num_fds(), sockets))
            except psutil.Error:  # it has ended
                continue
        totals = {role: tuple(map(sum, zip(*values, strict=True))) for role, values in used.items()}
        return totals, len(processes)  # type: ignore[return-value]


def role_of(process: psutil.Process) -> str | None:
    command = " ".join(process.cmdline())
    return next((role for part, role in ROLES.items() if part in command), None)


def fleet_processes(fleet: FleetProcesses) -> list[psutil.Process]:
    """Return all processes of a fleet, also those whose parents have ended."""
    groups = {process.pid for process in fleet.processes.values()}
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.pid in groups or process.environ().get("FLWR_HOME", "").startswith(str(fleet.out))
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:  # it has ended, or it is another user's
            continue
    return found


def rounds_done(run: Path) -> int:
    records = run / "records.jsonl"
    return records.read_bytes().count(b"\n") if records.exists() else 0


def part_of(samples: list[Sample], rounds: int, part: tuple[float, float]) -> list[Sample]:
    return [sample for sample in samples if part[0] * rounds <= sample[0] <= part[1] * rounds]


def report(samples: list[Sample], rounds: int) -> None:
    early, late = (part_of(samples, rounds, part) for part in (EARLY, LATE))
    print(f"{len(samples)} samples; medians of rounds {EARLY[0] * rounds:g}–{EARLY[1] * rounds:g} → "
          f"{LATE[0] * rounds:g}–{LATE[1] * rounds:g}")  # fmt: skip
    for role in ROLES.values():
        columns = []
        for position, unit in enumerate(("MiB", "files", "sockets")):
            values = [[used[role][position] for _, used, _ in part if role in used] for part in (early, late)]
            medians = [statistics.median(numbers or [0]) for numbers in values]
            columns.append(f"{medians[0]:.0f} → {medians[1]:.0f} {unit}")
        print(f"{role}: {', '.join(columns)}")
    counts = [statistics.median([count for _, _, count in part] or [0]) for part in (early, late)]
    print(f"processes: {counts[0]:g} → {counts[1]:g}")


def interrupt(fleet: FleetProcesses) -> list[str]:
    """Interrupt clients as Ctrl-C does; return the commands of all processes that are left, and temporary files."""
    for process in fleet.processes.values():
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
    for process in fleet.processes.values():
        process.wait(STOP_TIMEOUT_S)
    end = time.monotonic() + STOP_TIMEOUT_S
    while (left := fleet_processes(fleet)) and time.monotonic() < end:
        time.sleep(0.5)
    names = [" ".join(process.cmdline()) for process in left]
    return names + [str(path) for pattern in ("*.tmp", "*.sock") for path in fleet.out.rglob(pattern)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--method", choices=sorted(METHODS), default="fedavg")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it, and so would the fleet
    overrides = (*TINY, *METHODS[arguments.method])
    fleet = FleetProcesses(out, FaultPlan(NAMES, arguments.rounds, overrides, {}, {}, {}, 0, deadline=600.0))
    fleet.prepare()
    sampler = Sampler(fleet)
    thread = threading.Thread(target=sampler.run, daemon=True)
    try:
        fleet.start_server()
        for client in range(len(NAMES)):
            fleet.start_client(client)
        thread.start()
        if fleet.processes["server"].wait() != 0:
            raise RuntimeError(f"the server failed: see {out / 'server.log'}")
        sampler.ended.set()
        thread.join()
        report(sampler.samples, arguments.rounds)
        left = interrupt(fleet)
        print(f"left after Ctrl-C: {left or 'nothing'}")
    finally:
        for name in fleet.processes:
            fleet.kill(name)


if __name__ == "__main__":
    main()
