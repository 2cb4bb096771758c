"""Compare the virtual clock's communication time with a real server and client on a slow connection.

    sudo .venv/bin/python benchmarks/network.py --out /tmp/network

Two network namespaces are joined by a pair of interfaces. The server with SuperLink, proxy, TLS and keys is in one, a
client in the other. Rounds with both directions limited to ``--bandwidth`` MB/s alternate with rounds without a limit.
Apart from the client's own work, they differ by the communication time. It is compared with the virtual clock's
prediction for the bytes in the records, and with the bytes and the time measured at the interface. Needs Linux, root,
and the commands ``ip`` and ``tc``.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from vitfleet.config.fleet import DeviceName
from vitfleet.costs.hardware_profiles import HARDWARE_PROFILES, MEGABYTE, RoundWorkload, workload_seconds
from vitfleet.files import TIMINGS_FILE
from vitfleet.flower.processes import stop_process_group
from vitfleet.run.records import read_records

SERVER, CLIENT = "vitfleet-server", "vitfleet-client"  # namespaces
INTERFACES = {SERVER: "vf-server", CLIENT: "vf-client"}
ADDRESSES = {SERVER: "10.213.0.1", CLIENT: "10.213.0.2"}
PORT = 9092
CLIENT_NAME = "remote"
PROFILE: DeviceName = "nano"  # only its bandwidth matters here, and that is overridden
MODEL = [
    "model.dim=192", "model.heads=4", "model.patch_size=2", "train.epochs=1", "data.limit=40", "eval.every=1000",
    "machine.device=cpu", "machine.threads=1", "fleet.devices={}",
]  # fmt: skip
SAMPLE_INTERVAL_S = 0.02  # between two samples of the interface's counters
EDGE = 0.1  # fraction of a direction's bytes in a round; polling and acknowledgements are less


def run_command(*command: str, check: bool = True) -> None:
    subprocess.run(command, check=check, stdout=subprocess.DEVNULL, stderr=None if check else subprocess.DEVNULL)


def in_namespace(namespace: str, *command: str) -> list[str]:
    return ["ip", "netns", "exec", namespace, *command]


@contextmanager
def two_namespaces() -> Iterator[None]:
    """Create the namespaces and connect them; delete them afterwards, and first those of an earlier run."""
    delete_namespaces()
    try:
        for namespace in INTERFACES:
            run_command("ip", "netns", "add", namespace)
        first = [INTERFACES[SERVER], "netns", SERVER]
        second = [INTERFACES[CLIENT], "netns", CLIENT]
        run_command("ip", "link", "add", *first, "type", "veth", "peer", "name", *second)
        for namespace, interface in INTERFACES.items():
            run_command("ip", "-n", namespace, "address", "add", f"{ADDRESSES[namespace]}/30", "dev", interface)
            for name in ("lo", interface):  # the SuperLink listens on loopback
                run_command("ip", "-n", namespace, "link", "set", name, "up")
        yield
    finally:
        delete_namespaces()


def delete_namespaces() -> None:
    for namespace in INTERFACES:
        run_command("ip", "netns", "delete", namespace, check=False)


def limit_bandwidth(bandwidth: float | None) -> None:
    """Limit both directions to a bandwidth in bytes/s; ``None`` removes the limit.

    The token bucket holds 10 ms of traffic, so that a burst cannot hide a message. The queue before it holds 200 ms,
    like that of a typical modem.
    """
    for namespace, interface in INTERFACES.items():
        queue = ["tc", "-n", namespace, "qdisc"]
        if bandwidth is None:
            run_command(*queue, "delete", "dev", interface, "root", check=False)
        else:
            burst = max(2000, int(bandwidth / 100))
            rule = ["tbf", "rate", f"{int(8 * bandwidth)}bit", "burst", f"{burst}b", "latency", "200ms"]
            run_command(*queue, "replace", "dev", interface, "root", *rule)


@dataclass
class InterfaceSampler:
    """Samples the byte counters of the server's interface."""

    pid: int
    samples: list[tuple[float, int, int]] = field(default_factory=list)  # time, bytes down to the client, bytes up
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.ended.wait(SAMPLE_INTERVAL_S):
            self.sample()

    def sample(self) -> None:
        for row in Path(f"/proc/{self.pid}/net/dev").read_text().splitlines():
            name, _, counts = row.partition(":")
            if name.strip() == INTERFACES[SERVER]:
                columns = counts.split()
                self.samples.append((time.monotonic(), int(columns[8]), int(columns[0])))


@dataclass(frozen=True)
class Transfer:
    """One direction of a round at the interface: its bytes, its start and its end."""

    bytes: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


def measure_transfer(samples: Sequence[tuple[float, int]]) -> Transfer:
    """Return the transfer in one direction of a round.

    Its start and end are extrapolated from the times at which the first and the last tenth had passed: before and after
    a message there are polling and the other direction's acknowledgements.
    """
    first, last = samples[0][1], samples[-1][1]
    low, high = (first + fraction * (last - first) for fraction in (EDGE, 1 - EDGE))
    start, end = (next(time for time, count in samples if count >= bound) for bound in (low, high))
    edge = (end - start) * EDGE / (1 - 2 * EDGE)
    return Transfer(last - first, start - edge, end + edge)


@dataclass(frozen=True)
class Round:
    """Measurements of a round, and the virtual clock's prediction of its communication time."""

    number: int
    limited: bool
    seconds: float
    predicted: float
    down_bytes: int
    up_bytes: int
    down: Transfer
    up: Transfer

    @property
    def client_seconds(self) -> float:
        """Seconds from the last byte down to the first byte up: the client trains."""
        return self.up.start - self.down.end

    @property
    def other_seconds(self) -> float:
        """Seconds of the round in which the client does not train: communication and polling."""
        return self.seconds - self.client_seconds

    def row(self) -> str:
        cells = [f"{self.number}{' limited' if self.limited else ''}", f"{self.seconds:.2f}"]
        cells += [f"{self.client_seconds:.2f}", f"{self.other_seconds:.2f}"]
        for size, transfer in ((self.down_bytes, self.down), (self.up_bytes, self.up)):
            cells += [f"{size / 2**20:.3f}", f"{transfer.bytes / 2**20:.3f}", f"{transfer.seconds:.2f}"]
        return f"| {' | '.join(cells)} |"


def measure_rounds(out: Path, overrides: list[str], rounds: int, bandwidth: float) -> list[Round]:
    """Run the server and the client, every second round with limited bandwidth, and return the measurements."""
    options = [argument for override in [*overrides, f"rounds={rounds}"] for argument in ("-o", override)]
    vitfleet = [sys.executable, "-m", "vitfleet"]
    certs = ["--certs", str(out / "fleet")]
    subprocess.run([*vitfleet, "certs", out / "fleet", "--host", ADDRESSES[SERVER], "--names", CLIENT_NAME], check=True)
    subprocess.run(
        [
            *vitfleet,
            "export-data",
            "digits",
            "--to",
            "parquet",
            "--out",
            out / "data",
            "--names",
            CLIENT_NAME,
            *options,
        ],
        check=True,
    )
    server = [*vitfleet, "server", "digits", "--host", ADDRESSES[SERVER], "--port", str(PORT), *certs]
    server += ["--out", str(out / "run"), *options]
    client = [*vitfleet, "client", "--server", f"{ADDRESSES[SERVER]}:{PORT}", "--name", CLIENT_NAME, *certs]
    client += [
        "--data",
        str(out / "data" / CLIENT_NAME),
        "--state",
        str(out / "state"),
        "--device",
        "cpu",
        "--threads",
        "1",
    ]
    processes = {}
    try:
        for namespace, command in ((SERVER, server), (CLIENT, client)):
            with (out / f"{namespace}.log").open("ab") as log:
                processes[namespace] = subprocess.Popen(
                    in_namespace(namespace, *command), stdout=log, stderr=log, start_new_session=True
                )
        sampler = InterfaceSampler(processes[SERVER].pid)
        thread = threading.Thread(target=sampler.run)
        time.sleep(1)  # until the process is in its namespace
        thread.start()
        try:
            return list(follow(out / "run", processes[SERVER], sampler, rounds, bandwidth))
        finally:
            sampler.ended.set()
            thread.join()
    finally:
        for process in processes.values():
            stop_process_group(process)


def follow(
    run: Path, server: subprocess.Popen[bytes], sampler: InterfaceSampler, rounds: int, bandwidth: float
) -> Iterator[Round]:
    """Limit the bandwidth of every second round, and yield each round after its end."""
    first_sample = 0
    for number in range(1, rounds + 1):
        while count_lines(run / TIMINGS_FILE) < number:
            if server.poll() is not None:
                raise SystemExit(f"the server ended: see {run.parent / SERVER}.log")
            time.sleep(SAMPLE_INTERVAL_S)
        limit_bandwidth(bandwidth if number % 2 else None)  # for the next round, whose messages are not sent yet
        sampler.sample()
        last_sample = len(sampler.samples) - 1
        record = list(read_records(run))[-1]
        (client,) = record.clients
        if client.failure:
            raise SystemExit(f"round {number}: {client.failure}")
        seconds = json.loads((run / TIMINGS_FILE).read_text().splitlines()[number - 1])["seconds"]
        predicted = workload_seconds(
            HARDWARE_PROFILES[PROFILE], RoundWorkload(client.down_bytes, 0, client.up_bytes), bandwidth
        )
        samples = sampler.samples[first_sample : last_sample + 1]
        down = measure_transfer([(time, down_bytes) for time, down_bytes, _ in samples])
        up = measure_transfer([(time, up_bytes) for time, _, up_bytes in samples])
        limited = number % 2 == 0
        round = Round(number, limited, seconds, predicted, client.down_bytes, client.up_bytes, down, up)
        yield round
        print(round.row(), flush=True)
        first_sample = last_sample


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def report(rounds: Sequence[Round], bandwidth: float) -> None:
    """Print the result, without the first round, which also sends the app, and the last one, which evaluates."""
    limited, unlimited = ([round for round in rounds[1:-1] if round.limited is kind] for kind in (True, False))
    with_limit, without = (statistics.median(round.other_seconds for round in kind) for kind in (limited, unlimited))
    measured, predicted = with_limit - without, statistics.median(round.predicted for round in limited)
    at_interface = statistics.median(round.down.seconds + round.up.seconds for round in limited)
    framing = statistics.median(
        (round.down.bytes + round.up.bytes) / (round.down_bytes + round.up_bytes) for round in limited
    )
    print(f"\n{bandwidth / MEGABYTE:g} MB/s, {len(limited)} rounds with and {len(unlimited)} without a limit, medians:")
    print(f"predicted by the virtual clock {predicted:.2f} s")
    print(f"measured, difference of rounds with and without a limit, excluding the client's work {measured:.2f} s "
          f"({with_limit:.2f} - {without:.2f}), {measured / predicted - 1:+.1%}")  # fmt: skip
    print(f"measured at the interface {at_interface:.2f} s, {at_interface / predicted - 1:+.1%}")
    print(f"bytes at the interface {framing - 1:+.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--bandwidth", type=float, default=1.0, help="MB/s, in both directions")
    parser.add_argument("--pairs", type=int, default=5, help="number of pairs of a round with and one without a limit")
    parser.add_argument("--layers", type=int, default=4, help="of the model: 1.7 MiB each")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    bandwidth = arguments.bandwidth * MEGABYTE
    print("| round | s | client s | other s | down MiB | measured | in s | up MiB | measured | in s |\n|" + 10 * "---|")
    with two_namespaces():
        overrides = [*MODEL, f"model.depth={arguments.layers}"]
        report(measure_rounds(out, overrides, 2 * arguments.pairs + 2, bandwidth), bandwidth)


if __name__ == "__main__":
    main()
