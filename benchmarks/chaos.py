"""A fleet in trouble: real processes on loopback, TLS, keys, and everything that goes wrong with devices.

    .venv/bin/python benchmarks/chaos.py --method transfl --out /tmp/chaos

Six devices, ten rounds. Devices are killed, stopped for longer than a round, and lie (NaN, wrong shapes, updates a
million times too large); the server is killed outright once and started again. In the end the run must be complete,
every fault in its records, and the server's state, bit for bit, that of the same run in one process asked only for the
replies that were used. ``tests/flower/test_trouble.py`` is a small form of it.
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
from dataclasses import dataclass, field, replace
from pathlib import Path

from vitfleet.config import load_config, read_config
from vitfleet.config.schema import Config
from vitfleet.data.assignment import assign_images
from vitfleet.data.export import export_clients
from vitfleet.data.sources import load
from vitfleet.fleet.base import Fleet, FleetWrapper, Reply, Request
from vitfleet.flower.certificates import make_certs
from vitfleet.flower.processes import free_port
from vitfleet.run.loop import run_rounds
from vitfleet.run.records import RoundRecord, TaskRecord, read_records
from vitfleet.run.setup import open_run

RngContext = tuple[int, int]  # round, client


@dataclass(frozen=True)
class Plan:
    """What is run, and what goes wrong in it.

    Attributes
    ----------
    overrides
        Of the preset ``digits``.
    lies
        What a client sends in a round in place of what it learned.
    stopped
        A client in a round, stopped until the round is over.
    killed
        A client in a round, killed when it has worked but not answered, and started again.
    server_killed
        The round in which the server is killed and started again.
    """

    names: tuple[str, ...]
    rounds: int
    overrides: tuple[str, ...]
    lies: Mapping[RngContext, str]
    stopped: Mapping[int, int]
    killed: Mapping[int, int]
    server_killed: int
    deadline: float

    @property
    def faults(self) -> set[RngContext]:
        """What must be missing in the run."""
        return {*self.lies, *self.stopped.items(), *self.killed.items()}


TINY = (
    "data.limit=400", "model.dim=16", "model.depth=2", "model.heads=2", "model.patch_size=4", "train.epochs=1",
    "train.batch_size=16", "eval.clients=0", "fleet.devices={}", "machine.device=cpu", "machine.threads=1",
    "aggregate.norm_factor=10",
)  # fmt: skip
METHODS = {
    "fedavg": ("method.name=fedavg",),
    "transfl": ("method.name=transfl", "method.k=1"),
    "eftvit": ("method.name=eftvit", "method.local_layers=1", "train.mask_ratio=0.5"),
    "fedvit": (
        "method.name=fedvit", "method.head_epochs=1", "train.epochs=2", "data.limit=1200", "data.tasks.count=5",
        "data.tasks.classes=2", "data.tasks.per_client=[1,2]", "data.tasks.rounds_per_task=2",
    ),
}  # fmt: skip
INTO_ITS_WORK = 3.0  # seconds
# What a fault may be called in the records; a device that is slow on a busy machine is late before it is anything else.
LATE = ("no reply within", "it is not connected", "Flower: ")
REASONS = {"nan": ("not finite",), "shape": ("of shape", "as torch."), "scale": ("aggregate.norm_factor",)}


def long_plan(method: str, deadline: float) -> Plan:
    return Plan(
        names=("ada", "bob", "cid", "dot", "eve", "fay"),
        rounds=10,
        overrides=(*TINY, *METHODS[method]),
        lies={(2, 1): "nan", (3, 2): "shape", (4, 3): "scale", (8, 1): "scale", (9, 4): "nan"},
        stopped={5: 4},
        killed={6: 5},
        server_killed=7,
        deadline=deadline,
    )


# What a bad device does: once Flower's process has loaded vitfleet there, it answers falsely in some rounds, or not at
# all until it is killed. Not earlier: Flower gives a process up that takes long to report.
LIAR = """
import importlib.abc, importlib.util, os, sys, time

plan = dict(part.split("=") for part in os.environ["CHAOS_LIES"].split(","))
change = {
    "nan": lambda one: one * float("nan"),
    "shape": lambda one: one[..., :-1],
    "scale": lambda one: one * 1e6,
}

class Liar(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "vitfleet.flower.client":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            honest = module.FlowerClient._train

            def lie(self, payload):
                reply = honest(self, payload)
                how = plan.get(str(payload.request.round))
                if how == "wait":
                    time.sleep(3600)
                elif how and reply.message:
                    for name, one in reply.message.tensors.items():
                        if one.is_floating_point():
                            reply.message.tensors[name] = change[how](one)
                return reply

            module.FlowerClient._train = lie

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Liar())
"""


@dataclass
class Restricted(FleetWrapper[Fleet]):
    """A fleet in one process of which some replies are never asked for."""

    without: set[RngContext]

    def train(self, requests: Iterable[Request]) -> Iterator[Reply]:
        for request in requests:
            if (request.round, request.client) in self.without:
                yield Reply(request.client, None, failure="left out")
            else:
                yield from self.inner.train([request])


@dataclass
class Site:
    """A folder with a fleet's keys, its devices' images and what each keeps, and the processes."""

    out: Path
    plan: Plan
    port: int = field(default_factory=free_port)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def vitfleet(self, *arguments: str | Path) -> list[str]:
        return [sys.executable, "-m", "vitfleet", *map(str, arguments)]

    def prepare(self) -> None:
        """Make keys, deal the images, write down how to lie."""
        (self.out / "liar").mkdir(parents=True)
        (self.out / "liar" / "sitecustomize.py").write_text(LIAR)
        names = self.plan.names
        make_certs(self.out / "fleet", [], names)
        everybody = {"fleet.clients": len(names), "fleet.per_round": len(names)}
        config = load_config("digits", self._overrides(), everybody)
        data = load(config.data)
        export_clients(data, assign_images(config, data), list(names), self.out / "data")

    def serve(self) -> None:
        """Start the server, with a new run or the one that is there."""
        where = ["--host", "127.0.0.1", "--port", str(self.port), "--certs", str(self.out / "fleet")]
        run = self.out / "run"
        if (run / "config.json").exists():
            return self._start("server", self.vitfleet("server", run, *where))
        patience = ["-o", f"fleet.deadline_s={self.plan.deadline:g}", "-o", "fleet.join_s=60"]
        return self._start("server", self.vitfleet("server", "digits", *where, "--out", run, *self._given(), *patience))

    def join(self, client: int) -> None:
        """Start a device."""
        name = self.plan.names[client]
        bad = {**self.plan.lies, **dict.fromkeys(self.plan.killed.items(), "wait")}
        lies = ",".join(f"{round}={how}" for (round, liar), how in bad.items() if liar == client)
        path = os.pathsep.join([str(self.out / "liar"), os.environ.get("PYTHONPATH", "")])
        command = self.vitfleet(
            "client", "--server", f"127.0.0.1:{self.port}", "--name", name, "--data", self.out / "data" / name,
            "--certs", self.out / "fleet", "--state", self.out / "state" / name, "--device", "cpu", "--threads", "1",
        )  # fmt: skip
        self._start(name, command, {"CHAOS_LIES": lies, "PYTHONPATH": path} if lies else {})

    def signal(self, name: str, how: signal.Signals) -> None:
        os.killpg(self.processes[name].pid, how)

    def kill(self, name: str) -> None:
        """Kill a process outright, if it is still there, with what it started."""
        process = self.processes[name]
        if process.poll() is None:
            self.signal(name, signal.SIGKILL)
            process.wait()

    def await_round(self, round: int) -> None:
        """Wait until a round is under way: the one before it is over."""
        while sum(1 for _ in read_records(self.out / "run")) < round - 1:
            if self.processes["server"].poll() is not None:
                raise RuntimeError(f"the server ended: see {self.out / 'server.log'}")
            time.sleep(0.2)

    def _overrides(self) -> list[str]:
        return [f"rounds={self.plan.rounds}", *self.plan.overrides]

    def _given(self) -> list[str]:
        return [part for one in self._overrides() for part in ("-o", one)]

    def _start(self, name: str, command: list[str], more: Mapping[str, str] | None = None) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", **(more or {})}
        with (self.out / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)


def play(plan: Plan, out: Path) -> None:
    """Run a plan with all its troubles to its end."""
    site = Site(out, plan)
    site.prepare()
    try:
        site.serve()
        for client in range(len(plan.names)):
            site.join(client)
        make_trouble(site)
        if site.processes["server"].wait() != 0:
            raise RuntimeError(f"the server failed: see {out / 'server.log'}")
    finally:
        for name in site.processes:
            site.kill(name)


def make_trouble(site: Site) -> None:
    """Make every trouble in its round."""
    plan = site.plan
    for round in range(1, plan.rounds + 1):
        site.await_round(round)
        print(f"{time.strftime('%X')} round {round}", flush=True)
        if round in plan.stopped:
            name = plan.names[plan.stopped[round]]
            site.signal(name, signal.SIGSTOP)
            site.await_round(round + 1)
            site.signal(name, signal.SIGCONT)
        if round in plan.killed:
            time.sleep(INTO_ITS_WORK)
            site.kill(plan.names[plan.killed[round]])
            site.join(plan.killed[round])
        if round == plan.server_killed:
            time.sleep(INTO_ITS_WORK)
            site.kill("server")
            site.serve()


def check(plan: Plan, out: Path) -> dict[RngContext, str]:
    """Hold a run to the same run in one process, asked only for the replies that were used.

    Returns
    -------
    dict
        The replies that were not, and why.
    """
    run, honest = out / "run", out / "restricted"
    records = list(read_records(run))
    assert [record.round for record in records] == list(range(1, plan.rounds + 1))
    left_out = {
        (record.round, entry.client): entry.failure
        for record in records
        for entry in record.clients
        if entry.failure is not None
    }
    assert plan.faults <= set(left_out), f"used all the same: {plan.faults - set(left_out)}"
    for place, how in plan.lies.items():
        assert any(words in left_out[place] for words in (*REASONS[how], *LATE)), (place, left_out[place])
    restrict(read_config(run / "config.json"), honest, set(left_out))
    for troubled, restricted in zip(records, read_records(honest), strict=True):
        assert used(troubled) == used(restricted), f"the records of round {troubled.round} differ"
        assert_same_marks(troubled.task, restricted.task)
    assert server_state(run) == server_state(honest), "the states differ"
    return left_out


def restrict(config: Config, folder: Path, without: set[RngContext]) -> None:
    """Run a configuration in one process without some replies."""
    inline = config.model_copy(update={"fleet": config.fleet.model_copy(update={"kind": "inline", "names": ()})})
    context = open_run(inline, folder)
    run_rounds(replace(context, fleet=Restricted(context.fleet, without)))


def used(record: RoundRecord) -> list[object]:
    """Return what a round's record says of the replies that were used."""
    entries = [entry for entry in record.clients if entry.failure is None]
    return [record.round, record.lr, record.loss, record.accuracy, entries]


def assert_same_marks(troubled: TaskRecord | None, restricted: TaskRecord | None) -> None:
    """Hold a task's exam to the same in one process: who sat it has the same marks, who did not has none."""
    assert (troubled is None) == (restricted is None)
    if troubled is None or restricted is None:
        return
    for client, (row, expected) in enumerate(zip(troubled.matrix, restricted.matrix, strict=True)):
        missing = str(client) in troubled.failures
        assert row == ([None] * len(row) if missing else expected), f"task {troubled.task}: client {client}"
    for row, expected in zip(troubled.initial or [], restricted.initial or [], strict=True):
        assert row in (expected, [None] * len(expected))
    print(
        f"task {troubled.task}: {len(troubled.matrix) - len(troubled.failures)} of {len(troubled.matrix)} sat the exam"
    )


def server_state(folder: Path) -> dict[str, bytes]:
    """Return every file of the server's state in a run's last checkpoint."""
    paths = sorted((folder / "checkpoint").glob("*.safetensors"))
    return {path.name: path.read_bytes() for path in paths if not path.name.startswith("client-")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", choices=sorted(METHODS), default="transfl")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--deadline", type=float, default=60.0)
    given = parser.parse_args()
    out = given.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    plan = long_plan(given.method, given.deadline)
    play(plan, out)
    left_out = check(plan, out)
    for (round, client), failure in left_out.items():
        print(f"round {round}, {plan.names[client]}: {failure}")
    print(f"complete: {len(left_out)} replies left out, the state is that of the honest ones, bit for bit")


if __name__ == "__main__":
    main()
