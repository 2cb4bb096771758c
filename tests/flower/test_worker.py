"""A client's worker: a real process that persists between messages and ends with its parent."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.app.user_config import UserConfig
from loopback import LoopbackGrid, defended, export_images
from test_flower_fleet import flower, same_server_state

from conftest import MakeConfig
from vitfleet.config.schema import Config
from vitfleet.flower.device.client_app import train
from vitfleet.flower.device.worker import WorkerError, call_worker
from vitfleet.flower.server.fleet import fleet_factory
from vitfleet.run.loop import run_rounds
from vitfleet.run.output.folder import create_run_folder
from vitfleet.run.records import read_records
from vitfleet.run.setup import open_run

TIMEOUT_S = 60.0


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[bytes]]:
    """Return a process with which workers end."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        wait_until(lambda: not workers())


def workers() -> list[psutil.Process]:
    running = []
    for process in psutil.Process().children():
        try:
            if "vitfleet.flower.device.worker" in process.cmdline():
                running.append(process)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return running


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def settings(folder: Path) -> ConfigRecord:
    return ConfigRecord(
        {
            "message_type": "train",
            "data": str(folder / "data" / "0"),
            "state": str(folder / "state"),
            "device": "cpu",
            "threads": 1,
        }
    )


class WorkerClient:
    """A client whose messages a worker handles. ``before`` is called with the number of each message before it."""

    def __init__(self, folder: Path, parent: int, before: Callable[[int], None] = lambda number: None) -> None:
        self.folder = folder
        self.parent = parent
        self.before = before
        self.worker_ids: list[int] = []  # after each message

    def handle(self, client: int, message: Message) -> RecordDict:
        self.before(len(self.worker_ids))
        reply = call_worker(self.folder / "state", self.parent, settings(self.folder), message.content)
        self.worker_ids += [process.pid for process in workers()]
        return reply


def assert_equals_simulation(config: Config, client: WorkerClient) -> None:
    """Run all rounds in one process and through a worker: the results must be equal, bit for bit."""
    export_images(config, client.folder / "data")
    simulation = run_rounds(open_run(defended(config), client.folder / "simulation")).state
    make_fleet = fleet_factory(LoopbackGrid(client.handle, ["0"]))
    context = open_run(flower(config), client.folder / "flower", make_fleet=make_fleet)
    assert same_server_state(simulation, run_rounds(context).state)
    records = [(client.folder / name / "records.jsonl").read_bytes() for name in ("simulation", "flower")]
    assert records[0] == records[1]


ONE_CLIENT = ("rounds=3", "fleet.clients=1", "fleet.per_round=1", "eval.clients=0", "method.name=fedper")


def test_one_worker_handles_all_messages(
    tiny_config: MakeConfig, tmp_path: Path, parent: subprocess.Popen[bytes]
) -> None:
    client = WorkerClient(tmp_path, parent.pid)
    assert_equals_simulation(tiny_config(*ONE_CLIENT), client)
    assert len(client.worker_ids) == 3
    assert len(set(client.worker_ids)) == 1
    socket = next((tmp_path / "state").glob("worker-*.sock"))
    assert stat.S_IMODE(socket.stat().st_mode) & 0o077 == 0, "only its owner can open it"
    parent.kill()
    parent.wait()
    wait_until(lambda: not workers())
    assert not socket.exists(), "nothing is left of a worker"


def test_killed_worker_is_replaced(tiny_config: MakeConfig, tmp_path: Path, parent: subprocess.Popen[bytes]) -> None:
    def kill(number: int) -> None:
        if number == 1:
            (worker,) = workers()
            worker.kill()
            wait_until(lambda: not workers())

    client = WorkerClient(tmp_path, parent.pid, kill)
    assert_equals_simulation(tiny_config(*ONE_CLIENT), client)
    first, second, third = client.worker_ids
    assert first != second == third


def test_worker_reloads_changed_images(
    tiny_config: MakeConfig, tmp_path: Path, parent: subprocess.Popen[bytes]
) -> None:
    config = tiny_config(*ONE_CLIENT, "rounds=2")

    def remove_one_image(number: int) -> None:
        if number == 1:
            table = tmp_path / "data" / "0" / "train.parquet"
            pq.write_table(pq.read_table(table).slice(1), table)

    export_images(config, tmp_path / "data")
    client = WorkerClient(tmp_path, parent.pid, remove_one_image)
    make_fleet = fleet_factory(LoopbackGrid(client.handle, ["0"]))
    run_rounds(open_run(flower(config), tmp_path / "flower", make_fleet=make_fleet))
    samples = [int(str(record.clients[0].numbers["samples"])) for record in read_records(tmp_path / "flower")]
    assert samples[1] == samples[0] - 1
    assert len(set(client.worker_ids)) == 1


def test_exception_in_a_worker_fails_the_message_and_the_worker_continues(
    tmp_path: Path, parent: subprocess.Popen[bytes]
) -> None:
    folder = tmp_path / ("x" * 100) / ("y" * 100)  # longer than the path of a socket may be
    for _ in range(2):
        with pytest.raises(WorkerError, match="KeyError"):
            call_worker(folder, parent.pid, settings(tmp_path), RecordDict({"header": ConfigRecord({"round": 1})}))
    assert len(workers()) == 1


def test_worker_that_dies_while_handling_a_message_fails_the_message(
    tmp_path: Path, parent: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message goes to the running worker, then to a new one; if that ends too, the message has failed."""
    (tmp_path / "vitfleet_killer.py").write_text(
        "import os, sys\n"
        "class Killer:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'vitfleet.flower.device.handler':\n"
        f"            os.kill(os.getpid(), {int(signal.SIGKILL)})\n"
        "sys.meta_path.insert(0, Killer())\n"
    )
    (tmp_path / "sitecustomize.py").write_text("import vitfleet_killer\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(WorkerError, match="ended while handling a message"):
        call_worker(tmp_path / "state", parent.pid, settings(tmp_path), RecordDict())
    assert not workers()


def test_client_app_does_not_import_torch() -> None:
    code = "import sys, vitfleet.flower.device.client_app; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "flwr.clientapp" in loaded
    assert not {"torch", "timm", "torchvision", "PIL", "pyarrow", "safetensors"} & set(loaded)


def test_simulated_client_uses_no_worker(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config("rounds=2", "eval.clients=0")
    folder = tmp_path / "flower"
    create_run_folder(flower(config), folder, "flower", ["test"]).release()

    def handle(client: int, message: Message) -> RecordDict:
        node_config: UserConfig = {"partition-id": client, "num-partitions": config.fleet.clients, "threads": 1}
        context = Context(1, 1, node_config, RecordDict(), {"folder": str(folder)})
        return train(message, context).content

    names = [str(client) for client in range(config.fleet.clients)]
    context = open_run(flower(config), folder, make_fleet=fleet_factory(LoopbackGrid(handle, names)))
    state = run_rounds(context).state
    simulation = run_rounds(open_run(defended(config), tmp_path / "simulation")).state
    assert same_server_state(simulation, state)
    assert not workers()
