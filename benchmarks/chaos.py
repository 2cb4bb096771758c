"""Fault injection on a real fleet: processes on loopback with TLS and keys, and everything that can fail on clients.

    .venv/bin/python benchmarks/chaos.py --method transfl --out /tmp/chaos

Six clients, ten rounds. Clients are killed, are stopped for longer than a round, and send false updates (NaN, wrong
shapes, values a million times too large). A second client connects with a stolen key, and 200 half-open connections
flood the server. The server is killed once and restarted. In the end the run must be complete, every fault must be in
its records, and the server's state must equal, bit for bit, that of the same run in one process with only the replies
that were used. ``tests/flower/test_fault_injection.py`` is a small form of it.
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
from typing import TypeAlias

from flood import described, flood, probed
from vitfleet.config import load_config, read_config
from vitfleet.config.schema import Config
from vitfleet.data.export import export_clients
from vitfleet.data.partitions.assign import assign_images
from vitfleet.data.sources.load import load_dataset
from vitfleet.files import CONFIG_FILE
from vitfleet.fleet.base import Fleet, FleetWrapper, Reply, Request
from vitfleet.flower.certificates import make_certs
from vitfleet.flower.device.supernode import SUPERNODE_LOG
from vitfleet.flower.processes import free_port
from vitfleet.run.loop import run_rounds
from vitfleet.run.records import RoundRecord, TaskRecord, read_records
from vitfleet.run.setup import open_run

RoundClient: TypeAlias = tuple[int, int]  # round, client


@dataclass(frozen=True)
class FaultPlan:
    """A run and the faults in it.

    Attributes
    ----------
    overrides
        Of the preset ``digits``.
    false_updates
        What a client does to its update in a round.
    stopped
        By round, the client that is stopped until the round is over.
    killed
        By round, the client that is killed after it has trained but before it has replied, and then restarted.
    server_killed
        The round in which the server is killed and restarted.
    stolen
        By round, the client whose key a second client uses from then on for three rounds, with images and a state of
        its own. It must not take part.
    flooded
        The rounds during which 200 half-open connections are held.
    """

    names: tuple[str, ...]
    rounds: int
    overrides: tuple[str, ...]
    false_updates: Mapping[RoundClient, str]
    stopped: Mapping[int, int]
    killed: Mapping[int, int]
    server_killed: int
    deadline: float
    stolen: Mapping[int, int] = field(default_factory=dict)
    flooded: frozenset[int] = frozenset()

    @property
    def faults(self) -> set[RoundClient]:
        """The replies that must not be used."""
        return {*self.false_updates, *self.stopped.items(), *self.killed.items()}


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
THIEF_ROUNDS = 3
PROBE_S = 5.0  # how long honest requests are timed, at least
KILL_DELAY_S = 3.0  # after the start of a round
# Parts of the recorded failures. On a busy machine a slow client is late before its update can be rejected.
LATE = ("no reply within", "not connected", "disconnected", "Flower: ")
REJECTED = {
    "nan": ("not finite",),
    "shape": ("the shape",),
    "scale": ("aggregate.max_change", "aggregate.max_ratio", "aggregate.norm_factor"),
}


def long_plan(method: str, deadline: float) -> FaultPlan:
    return FaultPlan(
        names=("ada", "bob", "cid", "dot", "eve", "fay"),
        rounds=10,
        overrides=(*TINY, *METHODS[method]),
        false_updates={(2, 1): "nan", (3, 2): "shape", (4, 3): "scale", (8, 1): "scale", (9, 4): "nan"},
        stopped={5: 4},
        killed={6: 5},
        server_killed=7,
        deadline=deadline,
        stolen={2: 0},
        flooded=frozenset({3}),  # the probes go on into the next round, which has nothing that depends on the time
    )


# Makes a client faulty: after vitfleet has been imported in its worker, the client sends false updates in some rounds,
# or waits until it is killed. Not earlier: Flower gives up on a process that takes long to report.
INJECTION = """
import importlib.abc, importlib.util, os, sys, time

faults = dict(part.split("=") for part in os.environ["CHAOS_FAULTS"].split(","))
change = {
    "nan": lambda tensor: tensor * float("nan"),
    "shape": lambda tensor: tensor[..., :-1],
    "scale": lambda tensor: tensor * 1e6,
}

class FaultInjector(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "vitfleet.flower.device.client":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            correct_train = module.FlowerClient._train

            def faulty_train(self, payload):
                reply = correct_train(self, payload)
                fault = faults.get(str(payload.request.round))
                if fault == "wait":
                    time.sleep(3600)
                elif fault and reply.message:
                    for name, tensor in reply.message.tensors.items():
                        if tensor.is_floating_point():
                            reply.message.tensors[name] = change[fault](tensor)
                return reply

            module.FlowerClient._train = faulty_train

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, FaultInjector())
"""


@dataclass
class FleetWithoutReplies(FleetWrapper[Fleet]):
    """A fleet in one process in which some replies are never requested."""

    excluded: set[RoundClient]

    def train(self, requests: Iterable[Request]) -> Iterator[Reply]:
        for request in requests:
            if (request.round, request.client) in self.excluded:
                yield Reply(request.client, None, failure="excluded")
            else:
                yield from self.inner.train([request])


@dataclass
class FleetProcesses:
    """The processes of a fleet, and a folder with its keys, its clients' images and their states."""

    out: Path
    plan: FaultPlan
    port: int = field(default_factory=free_port)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def vitfleet(self, *arguments: str | Path) -> list[str]:
        return [sys.executable, "-m", "vitfleet", *map(str, arguments)]

    def prepare(self) -> None:
        """Create the keys, export the images, write the fault injection."""
        (self.out / "injection").mkdir(parents=True)
        (self.out / "injection" / "sitecustomize.py").write_text(INJECTION)
        names = self.plan.names
        make_certs(self.out / "fleet", [], names)
        fleet_size = {"fleet.clients": len(names), "fleet.per_round": len(names)}
        config = load_config("digits", self._overrides(), fleet_size)
        data = load_dataset(config.data)
        export_clients(data, assign_images(config, data), list(names), self.out / "data")

    def start_server(self) -> None:
        """Start the server with a new run, or resume the existing one."""
        address = ["--host", "127.0.0.1", "--port", str(self.port), "--certs", str(self.out / "fleet")]
        run = self.out / "run"
        if (run / CONFIG_FILE).exists():
            return self._start("server", self.vitfleet("server", run, *address))
        overrides = [*self._overrides(), f"fleet.deadline_s={self.plan.deadline:g}", "fleet.join_s=60"]
        options = [argument for override in overrides for argument in ("-o", override)]
        return self._start("server", self.vitfleet("server", "digits", *address, "--out", run, *options))

    def start_thief(self, client: int) -> None:
        """Start a second client with a client's key, but with another's images."""
        victim, other = self.plan.names[client], self.plan.names[client - 1]
        command = self._client_command(victim, self.out / "data" / other, self.out / "state" / "thief")
        self._start(thief_of(victim), command)

    def start_client(self, client: int) -> None:
        """Start a client, with its faults."""
        name = self.plan.names[client]
        all_faults = {**self.plan.false_updates, **dict.fromkeys(self.plan.killed.items(), "wait")}
        faults = ",".join(f"{round}={fault}" for (round, faulty), fault in all_faults.items() if faulty == client)
        python_path = os.pathsep.join([str(self.out / "injection"), os.environ.get("PYTHONPATH", "")])
        command = self._client_command(name, self.out / "data" / name, self.out / "state" / name)
        self._start(name, command, {"CHAOS_FAULTS": faults, "PYTHONPATH": python_path} if faults else {})

    def _client_command(self, name: str, data: Path, state: Path) -> list[str]:
        return self.vitfleet(
            "client", "--server", f"127.0.0.1:{self.port}", "--name", name, "--data", data,
            "--certs", self.out / "fleet", "--state", state, "--device", "cpu", "--threads", "1",
        )  # fmt: skip

    def signal(self, name: str, signal_number: signal.Signals) -> None:
        os.killpg(self.processes[name].pid, signal_number)

    def kill(self, name: str) -> None:
        """Kill a process and all processes that it started, if it is still running."""
        process = self.processes[name]
        if process.poll() is None:
            self.signal(name, signal.SIGKILL)
            process.wait()

    def wait_for_round(self, round: int) -> None:
        """Wait until a round is in progress: until the one before it is recorded."""
        while sum(1 for _ in read_records(self.out / "run")) < round - 1:
            if self.processes["server"].poll() is not None:
                raise RuntimeError(f"the server ended: see {self.out / 'server.log'}")
            time.sleep(0.2)

    def _overrides(self) -> list[str]:
        return [f"rounds={self.plan.rounds}", *self.plan.overrides]

    def _start(self, name: str, command: list[str], variables: Mapping[str, str] | None = None) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
        with (self.out / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)


def thief_of(name: str) -> str:
    return f"thief of {name}"


def run_plan(plan: FaultPlan, out: Path) -> None:
    """Run a plan with all its faults to its end."""
    fleet = FleetProcesses(out, plan)
    fleet.prepare()
    try:
        fleet.start_server()
        for client in range(len(plan.names)):
            fleet.start_client(client)
        inject_faults(fleet)
        if fleet.processes["server"].wait() != 0:
            raise RuntimeError(f"the server failed: see {out / 'server.log'}")
    finally:
        for name in fleet.processes:
            fleet.kill(name)


def inject_faults(fleet: FleetProcesses) -> None:
    """Stop and kill processes in the rounds of the plan."""
    plan = fleet.plan
    for round in range(1, plan.rounds + 1):
        fleet.wait_for_round(round)
        print(f"{time.strftime('%X')} round {round}", flush=True)
        if round in plan.stolen:
            fleet.start_thief(plan.stolen[round])
        if round - THIEF_ROUNDS in plan.stolen:
            fleet.kill(thief_of(plan.names[plan.stolen[round - THIEF_ROUNDS]]))
        if round in plan.flooded:
            flood_round(fleet, round)
        if round in plan.stopped:
            name = plan.names[plan.stopped[round]]
            fleet.signal(name, signal.SIGSTOP)
            fleet.wait_for_round(round + 1)
            fleet.signal(name, signal.SIGCONT)
        if round in plan.killed:
            time.sleep(KILL_DELAY_S)
            fleet.kill(plan.names[plan.killed[round]])
            fleet.start_client(plan.killed[round])
        if round == plan.server_killed:
            time.sleep(KILL_DELAY_S)
            fleet.kill("server")
            fleet.start_server()


def flood_round(fleet: FleetProcesses, round: int) -> None:
    """Hold half-open connections until a round is over, and print how long honest requests took then and before."""
    ca = fleet.out / "fleet" / "ca.crt"
    with probed(fleet.port, ca) as calm:
        time.sleep(PROBE_S)
    with flood(fleet.port), probed(fleet.port, ca) as flooded:
        fleet.wait_for_round(round + 1)
        time.sleep(PROBE_S)
    print(f"honest requests before the flood: {described(calm)}; during it: {described(flooded)}")


def check(plan: FaultPlan, out: Path) -> dict[RoundClient, str]:
    """Compare a run with the same run in one process that uses the same replies.

    Returns
    -------
    dict
        The replies that were not used, and why.
    """
    run, simulation = out / "run", out / "simulation"
    records = list(read_records(run))
    assert [record.round for record in records] == list(range(1, plan.rounds + 1))
    failures = {
        (record.round, entry.client): entry.failure
        for record in records
        for entry in record.clients
        if entry.failure is not None
    }
    assert plan.faults <= set(failures), f"used in spite of a fault: {plan.faults - set(failures)}"
    for key, fault in plan.false_updates.items():
        assert any(part in failures[key] for part in (*REJECTED[fault], *LATE)), (key, failures[key])
    run_without_replies(read_config(run / CONFIG_FILE), simulation, set(failures))
    for record, expected in zip(records, read_records(simulation), strict=True):
        assert used_part(record) == used_part(expected), f"the records of round {record.round} differ"
        assert_same_evaluations(record.task, expected.task)
    assert server_state(run) == server_state(simulation), "the server states differ"
    if plan.stolen:
        log = (out / "state" / "thief" / "flower" / SUPERNODE_LOG).read_text()
        assert "Failed to activate SuperNode" in log, "a stolen key was not refused"
        assert not list((out / "state" / "thief").rglob("*.safetensors")), "the second client took part"
    return failures


def run_without_replies(config: Config, folder: Path, excluded: set[RoundClient]) -> None:
    """Run a configuration in one process without some replies."""
    fleet = config.fleet.model_copy(update={"kind": "simulation", "names": ()})
    context = open_run(config.model_copy(update={"fleet": fleet}), folder)
    run_rounds(replace(context, fleet=FleetWithoutReplies(context.fleet, excluded)))


def used_part(record: RoundRecord) -> list[object]:
    """Return the part of a round's record that depends only on the replies that were used."""
    entries = [entry for entry in record.clients if entry.failure is None]
    return [record.round, record.lr, record.loss, record.accuracy, entries]


def assert_same_evaluations(actual: TaskRecord | None, expected: TaskRecord | None) -> None:
    """Compare the evaluations after a task; a client whose evaluation failed has none."""
    assert (actual is None) == (expected is None)
    if actual is None or expected is None:
        return
    for client, (row, expected_row) in enumerate(zip(actual.matrix, expected.matrix, strict=True)):
        failed = str(client) in actual.failures
        assert row == ([None] * len(row) if failed else expected_row), f"task {actual.task}: client {client}"
    for row, expected_row in zip(actual.initial or [], expected.initial or [], strict=True):
        assert row in (expected_row, [None] * len(expected_row))
    evaluated = len(actual.matrix) - len(actual.failures)
    print(f"task {actual.task}: {evaluated} of {len(actual.matrix)} clients evaluated")


def server_state(folder: Path) -> dict[str, bytes]:
    """Return every file of the server's state in a run's last checkpoint."""
    paths = sorted((folder / "checkpoint").glob("*.safetensors"))
    return {path.name: path.read_bytes() for path in paths if not path.name.startswith("client-")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", choices=sorted(METHODS), default="transfl")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds per round")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    plan = long_plan(arguments.method, arguments.deadline)
    run_plan(plan, out)
    failures = check(plan, out)
    for (round, client), failure in failures.items():
        print(f"round {round}, {plan.names[client]}: {failure}")
    print(f"complete: {len(failures)} replies not used; the state equals that of the other replies, bit for bit")


if __name__ == "__main__":
    main()
