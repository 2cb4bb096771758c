"""A device's worker: a real process that stays from message to message, and no longer than it may."""

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
from loopback import LoopbackGrid, deal
from test_flower_fleet import flower, same

from conftest import MakeConfig
from vitfleet.config.schema import Config
from vitfleet.flower.client_app import train
from vitfleet.flower.fleet import fleet_factory
from vitfleet.flower.worker import WorkerError, ask
from vitfleet.run.folder import create
from vitfleet.run.loop import run_rounds
from vitfleet.run.records import read_records
from vitfleet.run.setup import open_run

PATIENCE = 60.0


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[bytes]]:
    """Return a process for workers to end with."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        await_(lambda: not workers())


def workers() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children():
        try:
            if "vitfleet.flower.worker" in process.cmdline():
                found.append(process)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


def await_(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def words(folder: Path, kind: str = "train") -> ConfigRecord:
    return ConfigRecord(
        {
            "kind": kind,
            "data": str(folder / "data" / "0"),
            "state": str(folder / "state"),
            "device": "cpu",
            "threads": 1,
        }
    )


class Asked:
    """A fleet of one device, whose worker answers; ``before`` is called before each message."""

    def __init__(self, folder: Path, owner: int, before: Callable[[int], None] = lambda number: None) -> None:
        self.folder = folder
        self.owner = owner
        self.before = before
        self.seen: list[int] = []

    def answer(self, client: int, message: Message) -> RecordDict:
        self.before(len(self.seen))
        reply = ask(self.folder / "state", self.owner, words(self.folder), message.content)
        self.seen += [process.pid for process in workers()]
        return reply


def play(config: Config, asked: Asked) -> None:
    """Play a run in one process and through the worker: it must be the same, bit for bit."""
    deal(config, asked.folder / "data")
    inline = run_rounds(open_run(config, asked.folder / "inline")).state
    make_fleet = fleet_factory(LoopbackGrid(asked.answer, ["0"]))
    context = open_run(flower(config), asked.folder / "flower", make_fleet=make_fleet)
    assert same(inline, run_rounds(context).state)
    lines = [(asked.folder / where / "records.jsonl").read_bytes() for where in ("inline", "flower")]
    assert lines[0] == lines[1]


ONE = ("rounds=3", "fleet.clients=1", "fleet.per_round=1", "eval.clients=0", "method.name=fedper")


def test_one_worker_answers_message_after_message(
    tiny_config: MakeConfig, tmp_path: Path, owner: subprocess.Popen[bytes]
) -> None:
    asked = Asked(tmp_path, owner.pid)
    play(tiny_config(*ONE), asked)
    assert len(asked.seen) == 3
    assert len(set(asked.seen)) == 1
    socket = next((tmp_path / "state").glob("worker-*.sock"))
    assert stat.S_IMODE(socket.stat().st_mode) & 0o077 == 0  # for nobody but its owner
    owner.kill()
    owner.wait()
    await_(lambda: not workers())


def test_a_worker_that_was_killed_is_followed_by_another(
    tiny_config: MakeConfig, tmp_path: Path, owner: subprocess.Popen[bytes]
) -> None:
    def kill(number: int) -> None:
        if number == 1:
            (worker,) = workers()
            worker.kill()
            await_(lambda: not workers())

    asked = Asked(tmp_path, owner.pid, kill)
    play(tiny_config(*ONE), asked)
    first, second, third = asked.seen
    assert first != second == third


def test_a_worker_sees_that_its_images_have_changed(
    tiny_config: MakeConfig, tmp_path: Path, owner: subprocess.Popen[bytes]
) -> None:
    config = tiny_config(*ONE, "rounds=2")

    def lose_one(number: int) -> None:
        if number == 1:
            table = tmp_path / "data" / "0" / "train.parquet"
            pq.write_table(pq.read_table(table).slice(1), table)

    deal(config, tmp_path / "data")
    asked = Asked(tmp_path, owner.pid, lose_one)
    make_fleet = fleet_factory(LoopbackGrid(asked.answer, ["0"]))
    run_rounds(open_run(flower(config), tmp_path / "flower", make_fleet=make_fleet))
    samples = [int(str(record.clients[0].numbers["samples"])) for record in read_records(tmp_path / "flower")]
    assert samples[1] == samples[0] - 1
    assert len(set(asked.seen)) == 1


def test_a_bug_is_told_and_the_worker_stays(tmp_path: Path, owner: subprocess.Popen[bytes]) -> None:
    folder = tmp_path / ("x" * 100) / ("y" * 100)  # longer than a socket's address may be
    for _ in range(2):
        with pytest.raises(WorkerError, match="KeyError"):
            ask(folder, owner.pid, words(tmp_path), RecordDict({"header": ConfigRecord({"round": 1})}))
    assert len(workers()) == 1


def test_a_worker_that_dies_at_work_fails_the_message(
    tmp_path: Path, owner: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is there is asked, then a new one; when that ends too, the message has failed."""
    (tmp_path / "vitfleet_killer.py").write_text(
        "import os, sys\n"
        "class Killer:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'vitfleet.flower.client_handler':\n"
        f"            os.kill(os.getpid(), {int(signal.SIGKILL)})\n"
        "sys.meta_path.insert(0, Killer())\n"
    )
    (tmp_path / "sitecustomize.py").write_text("import vitfleet_killer\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(WorkerError, match="ended while it was at work"):
        ask(tmp_path / "state", owner.pid, words(tmp_path), RecordDict())
    assert not workers()


def test_the_process_of_a_message_imports_no_torch() -> None:
    code = "import sys, vitfleet.flower.client_app; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "flwr.clientapp" in loaded
    assert not {"torch", "timm", "torchvision", "PIL", "pyarrow", "safetensors"} & set(loaded)


def test_a_simulated_device_answers_without_a_worker(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config("rounds=2", "eval.clients=0")
    folder = tmp_path / "flower"
    create(flower(config), folder, "flower", ["test"]).release()

    def answer(client: int, message: Message) -> RecordDict:
        node: UserConfig = {"partition-id": client, "num-partitions": config.fleet.clients, "threads": 1}
        context = Context(1, 1, node, RecordDict(), {"folder": str(folder)})
        return train(message, context).content

    names = [str(client) for client in range(config.fleet.clients)]
    context = open_run(flower(config), folder, make_fleet=fleet_factory(LoopbackGrid(answer, names)))
    state = run_rounds(context).state
    inline = run_rounds(open_run(config, tmp_path / "inline")).state
    assert same(inline, state)
    assert not workers()
