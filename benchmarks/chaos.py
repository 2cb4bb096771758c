"""A fleet in trouble: real processes on loopback, TLS, keys, and everything that goes wrong with devices.

    .venv/bin/python benchmarks/chaos.py --method transfl --out /tmp/chaos

Six devices, ten rounds. Devices are killed, stopped for longer than a round, and lie (NaN, wrong shapes, updates a
million times too large); the server is killed outright once and started again. In the end the run must be complete,
every lie in its records, and the server's state, bit for bit, that of the same run in one process asked only for the
replies that were used.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vitfleet.config import read_config
from vitfleet.config.schema import Config
from vitfleet.deploy.processes import free_port
from vitfleet.fleet.base import Fleet, Reply, Request
from vitfleet.message import State
from vitfleet.run.conduct import conduct
from vitfleet.run.records import RoundRecord, read_records
from vitfleet.run.session import open_session

NAMES = ("ada", "bob", "cid", "dot", "eve", "fay")
ROUNDS = 10
LIES = {(2, 1): "nan", (3, 2): "shape", (4, 3): "scale", (8, 1): "scale", (9, 4): "nan"}  # (round, client)
STOPPED = {5: 4}  # round: client, stopped until the round is over
KILLED = {6: 5}  # round: client, killed and started again
SERVER_KILLED = 7
TINY = [
    f"rounds={ROUNDS}", "data.limit=400", "model.dim=16", "model.depth=2", "model.heads=2", "model.patch_size=4",
    "train.epochs=1", "train.batch_size=16", "eval.clients=0", "machine.device=cpu", "machine.threads=1",
    "aggregate.norm_factor=10",
]  # fmt: skip
METHODS = {
    "fedavg": ["method.name=fedavg"],
    "transfl": ["method.name=transfl", "method.k=1"],
    "eftvit": ["method.name=eftvit", "method.local_layers=1", "train.mask_ratio=0.5"],
}

# What a liar's machine does: once Flower's process has loaded vitfleet there, it answers falsely in some rounds. Not
# earlier: Flower gives a process up that takes long to report.
LIAR = """
import importlib.abc, importlib.util, os, sys

plan = dict(part.split("=") for part in os.environ["CHAOS_LIES"].split(","))
change = {
    "nan": lambda one: one * float("nan"),
    "shape": lambda one: one[..., :-1],
    "scale": lambda one: one * 1e6,
}

class Liar(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "vitfleet.fleet.device":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            honest = module.Device._answer

            def lie(self, order):
                reply = honest(self, order)
                how = plan.get(str(order.round))
                if how and reply.up:
                    for name, one in reply.up.tensors.items():
                        if one.is_floating_point():
                            reply.up.tensors[name] = change[how](one)
                return reply

            module.Device._answer = lie

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Liar())
"""


@dataclass
class Restricted:
    """A fleet in one process of which only some replies are asked for."""

    inner: Fleet
    without: set[tuple[int, int]]

    def ask(self, requests: Iterable[Request]) -> Iterator[Reply]:
        for request in requests:
            if (request.round, request.client) in self.without:
                yield Reply(request.client, None, failure="left out")
            else:
                yield from self.inner.ask([request])

    def own(self, client: int) -> State | None:
        return self.inner.own(client)

    def changed(self) -> Mapping[int, State | None]:
        return self.inner.changed()


@dataclass
class Nobody:
    rounds: list[int] = field(default_factory=list)

    def round_done(self, record: RoundRecord, seconds: float) -> None:
        self.rounds.append(record.round)


@dataclass
class Site:
    out: Path
    overrides: list[str]
    port: int
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def vitfleet(self, *arguments: str | Path) -> list[str]:
        return [sys.executable, "-m", "vitfleet", *map(str, arguments)]

    def start(self, name: str, command: list[str], **more: str) -> None:
        log = (self.out / f"{name}.log").open("ab")
        env = {**os.environ, "OMP_NUM_THREADS": "1", **more}
        self.processes[name] = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)

    def end(self, name: str, how: signal.Signals) -> None:
        process = self.processes[name]
        os.killpg(process.pid, how)
        process.wait()

    def join(self, client: int) -> None:
        name = NAMES[client]
        lies = ",".join(f"{round}={how}" for (round, liar), how in LIES.items() if liar == client)
        path = os.pathsep.join([str(self.out / "liar"), os.environ.get("PYTHONPATH", "")])
        more = {"CHAOS_LIES": lies, "PYTHONPATH": path} if lies else {}
        command = self.vitfleet(
            "client", "--server", f"127.0.0.1:{self.port}", "--name", name, "--data", self.out / "data" / name,
            "--certs", self.out / "fleet", "--state", self.out / "state" / name, "--device", "cpu", "--threads", "1",
        )  # fmt: skip
        self.start(name, command, **more)

    def serve(self, source: str | Path) -> None:
        where = ["--host", "127.0.0.1", "--port", str(self.port), "--certs", str(self.out / "fleet")]
        fresh = ["--out", str(self.out / "run"), *(part for one in self.overrides for part in ("-o", one))]
        self.start("server", self.vitfleet("server", source, *where, *(fresh if source == "digits" else [])))


def rounds_done(folder: Path) -> int:
    return sum(1 for _ in read_records(folder))


def await_round(site: Site, round: int) -> None:
    """Wait until a round is under way: the one before it is over."""
    while rounds_done(site.out / "run") < round - 1:
        if site.processes["server"].poll() is not None:
            raise SystemExit(f"the server ended: see {site.out / 'server.log'}")
        time.sleep(0.2)


def trouble(site: Site) -> None:
    """Make every trouble in its round."""
    for round in range(1, ROUNDS + 1):
        await_round(site, round)
        print(f"{time.strftime('%X')} round {round}", flush=True)
        if round in STOPPED:
            stopped = site.processes[NAMES[STOPPED[round]]]
            os.killpg(stopped.pid, signal.SIGSTOP)
            await_round(site, round + 1)
            os.killpg(stopped.pid, signal.SIGCONT)
        if round in KILLED:
            time.sleep(4)  # into its work
            site.end(NAMES[KILLED[round]], signal.SIGKILL)
            site.join(KILLED[round])
        if round == SERVER_KILLED:
            time.sleep(8)
            site.end("server", signal.SIGKILL)
            time.sleep(3)
            site.serve(site.out / "run")
    if site.processes["server"].wait() != 0:
        raise SystemExit(f"the server failed: see {site.out / 'server.log'}")


def check(out: Path, config: Config) -> None:
    """Hold the run to its restriction in one process."""
    records = list(read_records(out / "run"))
    left_out = {
        (one.round, client.client): client.failure for one in records for client in one.clients if client.failure
    }
    for (round, client), failure in left_out.items():
        print(f"round {round}, {NAMES[client]}: {failure}")
    assert [record.round for record in records] == list(range(1, ROUNDS + 1))
    assert set(LIES) <= set(left_out), "a lie was used"
    inline = config.model_copy(update={"fleet": config.fleet.model_copy(update={"kind": "inline", "names": ()})})
    session = open_session(inline, out / "restricted")
    session.fleet = Restricted(session.fleet, set(left_out))
    conduct(session, Nobody())
    states = [
        {path.name: path.read_bytes() for path in sorted((out / run / "checkpoint").glob("[!c]*.safetensors"))}
        for run in ("run", "restricted")
    ]
    assert states[0] == states[1], "the states differ"
    print(f"complete: {len(left_out)} replies left out, the state is that of the honest ones, bit for bit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", choices=sorted(METHODS), default="transfl")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--deadline", type=float, default=60.0)
    given = parser.parse_args()
    out = given.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    (out / "liar").mkdir(parents=True)
    (out / "liar" / "sitecustomize.py").write_text(LIAR)
    deal = [*TINY, *METHODS[given.method]]
    site = Site(out, [*deal, f"fleet.deadline_s={given.deadline}", "fleet.join_s=60"], free_port())
    names = ",".join(NAMES)
    subprocess.run(site.vitfleet("certs", out / "fleet", "--names", names), check=True)
    dealt = [part for one in deal for part in ("-o", one)]
    subprocess.run(site.vitfleet("deal", "digits", "--out", out / "data", "--names", names, *dealt), check=True)
    try:
        site.serve("digits")
        for client in range(len(NAMES)):
            site.join(client)
        trouble(site)
    finally:
        for name, process in site.processes.items():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGCONT)
            site.end(name, signal.SIGKILL) if process.poll() is None else None
    check(out, read_config(out / "run" / "config.json"))


if __name__ == "__main__":
    main()
