"""Is the virtual clock right about the line? A real server and a real device, with a slow line between them.

    sudo .venv/bin/python benchmarks/network.py --out /tmp/network

Two network namespaces, joined by a pair of interfaces, both directions shaped to ``--line`` MB/s: the server with its
SuperLink, gate, TLS and keys in one, a device in the other. Rounds over the slow line take turns with rounds over the
same line unshaped. What they differ by, but for the device's own work, is the communication: it is held to the virtual
clock's prediction for the bytes that the records name. What the interface counted, and how long it was at it, is
printed beside it. Needs Linux, root, and the commands ``ip`` and ``tc``.
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
from vitfleet.flower.processes import stop_process_group
from vitfleet.run.records import read_records

SERVER, DEVICE = "vitfleet-server", "vitfleet-device"  # namespaces; also, shortened, their interfaces
INTERFACES = {SERVER: "vf-server", DEVICE: "vf-device"}
ADDRESSES = {SERVER: "10.213.0.1", DEVICE: "10.213.0.2"}
PORT = 9092
NAME = "far"
ANY: DeviceName = "nano"  # whose processor does not matter here: only its line, which is given
MODEL = [
    "model.dim=192", "model.heads=4", "model.patch_size=2", "train.epochs=1", "data.limit=40", "eval.every=1000",
    "machine.device=cpu", "machine.threads=1", "fleet.devices={}",
]  # fmt: skip
LOOK_EVERY = 0.02  # seconds between looks at the interface and at the records
EDGE = 0.1  # of the bytes that go one way in a round: polling, and what acknowledges the other way, is less


def sh(*command: str, check: bool = True) -> None:
    subprocess.run(command, check=check, stdout=subprocess.DEVNULL, stderr=None if check else subprocess.DEVNULL)


def inside(space: str, *command: str) -> list[str]:
    return ["ip", "netns", "exec", space, *command]


@contextmanager
def two_spaces() -> Iterator[None]:
    """Make the namespaces and what joins them, and take them away in the end; what an earlier run left, first."""
    tear_down()
    try:
        for space in INTERFACES:
            sh("ip", "netns", "add", space)
        (one, other) = INTERFACES.items()
        sh("ip", "link", "add", one[1], "netns", one[0], "type", "veth", "peer", "name", other[1], "netns", other[0])
        for space, interface in INTERFACES.items():
            sh("ip", "-n", space, "address", "add", f"{ADDRESSES[space]}/30", "dev", interface)
            for device in ("lo", interface):  # a SuperLink listens on its own loopback
                sh("ip", "-n", space, "link", "set", device, "up")
        yield
    finally:
        tear_down()


def tear_down() -> None:
    for space in INTERFACES:
        sh("ip", "netns", "delete", space, check=False)


def shape(line: float | None) -> None:
    """Let both directions carry so many bytes a second; ``None``: as many as they can.

    The bucket holds 10 ms of the line, so that a burst cannot hide a message; the queue before it 200 ms, as a usual
    modem's.
    """
    for space, interface in INTERFACES.items():
        where = ["tc", "-n", space, "qdisc"]
        if line is None:
            sh(*where, "delete", "dev", interface, "root", check=False)
        else:
            burst = max(2000, int(line / 100))
            rule = ["tbf", "rate", f"{int(8 * line)}bit", "burst", f"{burst}b", "latency", "200ms"]
            sh(*where, "replace", "dev", interface, "root", *rule)


@dataclass
class Watch:
    """What the server's interface has carried, looked at many times a second."""

    pid: int
    seen: list[tuple[float, int, int]] = field(default_factory=list)  # when, bytes down to the device, bytes up
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.ended.wait(LOOK_EVERY):
            self.look()

    def look(self) -> None:
        for row in Path(f"/proc/{self.pid}/net/dev").read_text().splitlines():
            name, _, counts = row.partition(":")
            if name.strip() == INTERFACES[SERVER]:
                words = counts.split()
                self.seen.append((time.monotonic(), int(words[8]), int(words[0])))


@dataclass(frozen=True)
class Way:
    """One direction of a round: what the interface carried, and when."""

    carried: int
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def way(seen: Sequence[tuple[float, int]]) -> Way:
    """Return what went one way in a round.

    When it began and ended follows from when its first and its last tenth was through: before and after a message
    there is some polling, and the other way's acknowledgements.
    """
    first, last = seen[0][1], seen[-1][1]
    low, high = (first + share * (last - first) for share in (EDGE, 1 - EDGE))
    began, ended = (next(when for when, count in seen if count >= bound) for bound in (low, high))
    edge = (ended - began) * EDGE / (1 - 2 * EDGE)
    return Way(last - first, began - edge, ended + edge)


@dataclass(frozen=True)
class Round:
    """What was measured of a round, and what the virtual clock says of its communication."""

    number: int
    slow: bool
    seconds: float
    predicted: float
    down_bytes: int
    up_bytes: int
    down: Way
    up: Way

    @property
    def device(self) -> float:
        """Seconds from the last byte down to the first byte up: the device works."""
        return self.up.began - self.down.ended

    @property
    def rest(self) -> float:
        """Seconds of the round in which the device does not work: communication, and looking whether there is any."""
        return self.seconds - self.device

    def row(self) -> str:
        cells = [f"{self.number} {'slow' if self.slow else 'fast'}", f"{self.seconds:.2f}", f"{self.device:.2f}"]
        cells += [f"{self.rest:.2f}"]
        for size, way in ((self.down_bytes, self.down), (self.up_bytes, self.up)):
            cells += [f"{size / 1e6:.3f}", f"{way.carried / 1e6:.3f}", f"{way.seconds:.2f}"]
        return f"| {' | '.join(cells)} |"


def play(out: Path, overrides: list[str], rounds: int, line: float) -> list[Round]:
    """Run the server and the device, every second round over the slow line, and return what was measured."""
    given = [part for one in [*overrides, f"rounds={rounds}"] for part in ("-o", one)]
    vitfleet = [sys.executable, "-m", "vitfleet"]
    certs = ["--certs", str(out / "fleet")]
    subprocess.run([*vitfleet, "certs", out / "fleet", "--host", ADDRESSES[SERVER], "--names", NAME], check=True)
    subprocess.run([*vitfleet, "export", "digits", "--out", out / "data", "--names", NAME, *given], check=True)
    server = [*vitfleet, "server", "digits", "--host", ADDRESSES[SERVER], "--port", str(PORT), *certs]
    server += ["--out", str(out / "run"), *given]
    device = [*vitfleet, "client", "--server", f"{ADDRESSES[SERVER]}:{PORT}", "--name", NAME, *certs]
    device += ["--data", str(out / "data" / NAME), "--state", str(out / "state"), "--device", "cpu", "--threads", "1"]
    started = {}
    try:
        for space, command in ((SERVER, server), (DEVICE, device)):
            with (out / f"{space}.log").open("ab") as log:
                started[space] = subprocess.Popen(
                    inside(space, *command), stdout=log, stderr=log, start_new_session=True
                )
        watch = Watch(started[SERVER].pid)
        thread = threading.Thread(target=watch.run)
        time.sleep(1)  # until the process is in its namespace
        thread.start()
        try:
            return list(follow(out / "run", started[SERVER], watch, rounds, line))
        finally:
            watch.ended.set()
            thread.join()
    finally:
        for process in started.values():
            stop_process_group(process)


def follow(run: Path, server: subprocess.Popen[bytes], watch: Watch, rounds: int, line: float) -> Iterator[Round]:
    """Shape the line for every second round, and yield a round when it is over."""
    begin = 0
    for number in range(1, rounds + 1):
        while lines(run / "timings.jsonl") < number:
            if server.poll() is not None:
                raise SystemExit(f"the server ended: see {run.parent / SERVER}.log")
            time.sleep(LOOK_EVERY)
        shape(line if number % 2 else None)  # for the round after this one: its messages are not on their way yet
        watch.look()
        end = len(watch.seen) - 1
        record = list(read_records(run))[-1]
        (client,) = record.clients
        if client.failure:
            raise SystemExit(f"round {number}: {client.failure}")
        seconds = json.loads((run / "timings.jsonl").read_text().splitlines()[number - 1])["seconds"]
        predicted = workload_seconds(HARDWARE_PROFILES[ANY], RoundWorkload(client.down_bytes, 0, client.up_bytes), line)
        seen = watch.seen[begin : end + 1]
        down, up = way([(one[0], one[1]) for one in seen]), way([(one[0], one[2]) for one in seen])
        yield (done := Round(number, number % 2 == 0, seconds, predicted, client.down_bytes, client.up_bytes, down, up))
        print(done.row(), flush=True)
        begin = end


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def report(rounds: Sequence[Round], line: float) -> None:
    """Say what was measured, without the first round, which sends the app too, and the last, which evaluates."""
    slow, fast = ([one for one in rounds[1:-1] if one.slow is kind] for kind in (True, False))
    over_slow, over_fast = (statistics.median(one.rest for one in some) for some in (slow, fast))
    measured, predicted = over_slow - over_fast, statistics.median(one.predicted for one in slow)
    on_the_line = statistics.median(one.down.seconds + one.up.seconds for one in slow)
    framing = statistics.median((one.down.carried + one.up.carried) / (one.down_bytes + one.up_bytes) for one in slow)
    print(f"\n{line / MEGABYTE:g} MB/s, {len(slow)} slow and {len(fast)} fast rounds, medians:")
    print(f"predicted by the virtual clock {predicted:.2f} s")
    print(f"measured, slow less fast round, both without the device's work {measured:.2f} s "
          f"({over_slow:.2f} - {over_fast:.2f}), {measured / predicted - 1:+.1%}")  # fmt: skip
    print(f"measured on the interface {on_the_line:.2f} s, {on_the_line / predicted - 1:+.1%}")
    print(f"bytes on the interface {framing - 1:+.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--line", type=float, default=1.0, help="MB/s, both ways")
    parser.add_argument("--pairs", type=int, default=5, help="slow rounds, and as many fast ones")
    parser.add_argument("--layers", type=int, default=4, help="of the model: 1.8 MB each")
    given = parser.parse_args()
    out = given.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    line = given.line * MEGABYTE
    print("| round | seconds | device's | rest | down MB | carried | in s | up MB | carried | in s |\n|" + 10 * "---|")
    with two_spaces():
        report(play(out, [*MODEL, f"model.depth={given.layers}"], 2 * given.pairs + 2, line), line)


if __name__ == "__main__":
    main()
