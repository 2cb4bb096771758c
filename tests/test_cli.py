"""The command, as a user meets it: what it says, what it leaves behind, how it ends."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

import pytest

from conftest import Command, MakeConfig
from vitfleet.config import presets
from vitfleet.run.folder import create_run_folder

# What makes any preset on digits a run of some seconds.
SMALL = ("data.limit=200", "train.epochs=1", "model.dim=16", "model.patch_size=4")
Result: TypeAlias = subprocess.CompletedProcess[str]
Launch: TypeAlias = Callable[..., subprocess.Popen[str]]


def options(*overrides: str) -> list[str]:
    return [part for override in overrides for part in ("-o", override)]


def assert_refused(result: Result, *words: str) -> None:
    """It ended with code 2 and one sentence that holds these words."""
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    for word in words:
        assert word in result.stderr


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory,
    executable: Path,
    environment: dict[str, str],
    tiny_overrides: tuple[str, ...],
) -> tuple[Path, Result]:
    """Return the folder of a tiny run that the command finished in a process of its own, and what it said."""
    cwd = tmp_path_factory.mktemp("finished")
    command = [str(executable), "run", "digits", *options(*tiny_overrides), "--out", "done", "--seed", "4"]
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return cwd / "done", result


@pytest.fixture
def launch(executable: Path, environment: dict[str, str], tmp_path: Path) -> Iterator[Launch]:
    """Return a function that starts the command and does not wait for its end."""
    processes: list[subprocess.Popen[str]] = []

    def begin(*arguments: str | Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [str(executable), *map(str, arguments)],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
        return process

    yield begin
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_help_lists_the_commands(vitfleet: Command, tmp_path: Path) -> None:
    result = vitfleet(tmp_path, "--help")
    assert result.returncode == 0
    for command in ("run", "resume", "presets"):
        assert f" {command} " in result.stdout


@pytest.mark.parametrize("command", ["run", "resume", "presets"])
def test_every_command_has_help(command: str, vitfleet: Command, tmp_path: Path) -> None:
    result = vitfleet(tmp_path, command, "--help")
    assert result.returncode == 0
    assert f"vitfleet {command}" in result.stdout


def test_presets_lists_all_with_a_line_each(vitfleet: Command, tmp_path: Path) -> None:
    result = vitfleet(tmp_path, "presets")
    assert result.returncode == 0
    client_metrics = " ".join(result.stdout.split())
    for name, title in presets().items():
        assert name in client_metrics
        assert title.split(":")[0].split()[0] in client_metrics


def test_a_run_ends_with_a_table_and_a_folder(finished: tuple[Path, Result]) -> None:
    folder, result = finished
    assert result.returncode == 0, result.stderr
    assert "accuracy" in result.stdout
    assert "fedavg" in result.stdout
    assert "│" in result.stdout
    assert result.stdout.strip().endswith("run folder: done")
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["method"], summary["seed"], summary["rounds"]) == ("fedavg", 4, 3)
    config = json.loads((folder / "config.json").read_text())
    assert (config["seed"], config["model"]["dim"], config["train"]["weight_decay"]) == (4, 16, 0.05)
    for name in ("model.safetensors", "records.jsonl", "partition.json", "partition.png", "about.json"):
        assert (folder / name).stat().st_size > 0
    assert len((folder / "records.jsonl").read_text().splitlines()) == 3
    assert list((folder / "tensorboard").glob("events.*"))


def test_a_folder_that_holds_a_run_is_not_overwritten(finished: tuple[Path, Result], vitfleet: Command) -> None:
    folder, _ = finished
    before = {path: path.read_bytes() for path in folder.glob("*.*")}
    assert_refused(vitfleet(folder.parent, "run", "digits", "--out", "done"), "done", "resume", "--out")
    assert {path: path.read_bytes() for path in folder.glob("*.*")} == before


def test_a_finished_run_can_be_resumed_and_stays(finished: tuple[Path, Result], vitfleet: Command) -> None:
    folder, _ = finished
    lasting = [folder / "records.jsonl", folder / "summary.json", folder / "config.json"]
    before = [path.read_bytes() for path in lasting]
    result = vitfleet(folder.parent, "resume", "done")
    assert result.returncode == 0, result.stderr
    assert [path.read_bytes() for path in lasting] == before


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.lr=fast", ["train.lr", "fast"]),
        ("train.lr=-1", ["train.lr", "-1"]),
        ("train.learning_rate=1", ["train.learning_rate"]),
        ("data.partition.beta=0", ["data.partition.beta", "greater than 0"]),
        ("train.mask_ratio=1", ["train.mask_ratio", "less than 1"]),
        ("rounds", ["key=value"]),
        ("method.name=fedfoo", ["method.name", "fedfoo", "fedavg"]),
        ("fleet.per_round=99", ["fleet.per_round", "99"]),
    ],
)
def test_a_bad_override_is_one_sentence(override: str, words: list[str], vitfleet: Command, tmp_path: Path) -> None:
    assert_refused(vitfleet(tmp_path, "run", "digits", "-o", override, "--out", "bad"), *words)
    assert not (tmp_path / "bad").exists()


def test_a_preset_nobody_knows_is_one_sentence(launch: Launch, vitfleet: Command, tmp_path: Path) -> None:
    process = launch("run", "digit")
    out, client_metrics = process.communicate(timeout=60)
    assert_refused(
        subprocess.CompletedProcess(process.args, process.returncode, out, client_metrics), "digit", "'digits'"
    )
    assert_refused(vitfleet(tmp_path, "run", "none.toml"), "none.toml")
    assert not (tmp_path / "runs").exists()


def test_more_clients_than_images_is_one_sentence_and_leaves_no_folder(vitfleet: Command, tmp_path: Path) -> None:
    arguments = options("data.limit=50", "fleet.clients=51", "machine.device=cpu")
    result = vitfleet(tmp_path, "run", "digits", *arguments, "--out", "crowd")
    assert_refused(result, "fleet.clients", "51", "between 1 and 50")
    assert not (tmp_path / "crowd").exists()


@pytest.mark.usefixtures("nowhere")
def test_a_data_set_that_is_not_there_is_one_sentence_and_leaves_no_folder(vitfleet: Command, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    arguments = options("data.name=cifar100", "machine.device=cpu")
    result = vitfleet(tmp_path, "run", "digits", *arguments, "--data-dir", "data", "--out", "missing")
    assert_refused(result, "cifar100", str(tmp_path / "data"))
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize("folder", ["empty", "nowhere"])
def test_a_folder_without_a_run_cannot_be_resumed(folder: str, vitfleet: Command, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert_refused(vitfleet(tmp_path, "resume", folder), folder, "no run")
    assert not (tmp_path / "nowhere").exists()


Started: TypeAlias = tuple[subprocess.Popen[str], Path]
Start: TypeAlias = Callable[[int], Started]


@pytest.fixture
def start(launch: Launch, tiny_overrides: tuple[str, ...], tmp_path: Path) -> Start:
    """Return a function that starts a run of so many rounds and waits until it is under way."""

    def begin(rounds: int) -> Started:
        folder = tmp_path / "a folder whose path is long enough to be wrapped in a narrow terminal" / "run"
        process = launch("run", "digits", *options(*tiny_overrides, f"rounds={rounds}"), "--out", folder)
        wait_for(lambda: done(folder) >= 2, process)
        return process, folder

    return begin


def done(folder: Path) -> int:
    records = folder / "records.jsonl"
    return len(records.read_bytes().splitlines()) if records.exists() else 0


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def test_a_second_process_is_refused_while_the_first_runs(start: Start, vitfleet: Command, tmp_path: Path) -> None:
    process, folder = start(100_000)
    assert_refused(vitfleet(tmp_path, "resume", folder), str(folder), "another process")
    before = done(folder)
    wait_for(lambda: done(folder) > before, process)  # the first one does not mind


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_says_how_to_go_on_and_does(
    sent: signal.Signals, start: Start, vitfleet: Command, tmp_path: Path
) -> None:
    rounds = 60
    process, folder = start(rounds)
    process.send_signal(sent)
    _, client_metrics = process.communicate(timeout=60)
    assert process.returncode == 130, client_metrics
    assert "Traceback" not in client_metrics
    assert 2 <= done(folder) < rounds
    assert f"vitfleet resume {shlex.quote(str(folder))}" in client_metrics  # whole, to be copied into a shell
    result = vitfleet(tmp_path, "resume", folder)
    assert result.returncode == 0, result.stderr
    assert done(folder) == rounds
    assert json.loads((folder / "summary.json").read_text())["rounds"] == rounds


def open_when_read(pipe: Path, process: subprocess.Popen[str]) -> int:
    """Wait until a process reads from a named pipe, and return the pipe's other end: nothing comes out of it."""
    while True:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # nobody reads from it yet
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)


def test_a_run_that_is_stopped_while_it_is_set_up_can_be_resumed_too(
    launch: Launch, tiny_config: MakeConfig, vitfleet: Command, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    create_run_folder(tiny_config(), folder, "run", ["test"]).release()
    machine = folder / "machine.json"
    os.mkfifo(machine)  # a file that is read while a run is set up: there it stays until it is stopped
    process = launch("resume", folder)
    pipe = open_when_read(machine, process)
    process.send_signal(signal.SIGINT)
    _, client_metrics = process.communicate(timeout=60)
    os.close(pipe)
    assert process.returncode == 130, client_metrics
    assert "Traceback" not in client_metrics
    assert "vitfleet resume" in client_metrics
    machine.unlink()
    result = vitfleet(tmp_path, "resume", folder)
    assert result.returncode == 0, result.stderr
    assert done(folder) == 3


def test_without_a_configuration_three_methods_are_compared_on_the_same_shards(
    vitfleet: Command, tmp_path: Path
) -> None:
    sizes = options(*SMALL, "rounds=2")
    done = vitfleet(tmp_path, "run", *sizes, "--out", "both")
    assert done.returncode == 0, done.stderr
    for name in ("digits", "transfl-digits", "eftvit-digits"):
        assert name in done.stdout
        assert (tmp_path / "both" / f"{name}-s0" / "summary.json").exists()
    deals = {(folder / "partition.safetensors").read_bytes() for folder in (tmp_path / "both").glob("*-s0")}
    assert len(deals) == 1
    assert f"report: {Path('both') / 'report.html'}" in done.stdout
    assert (tmp_path / "both" / "report.html").exists()
    rows = (tmp_path / "both" / "compare.csv").read_text().splitlines()
    assert len(rows) == 4
    assert rows[0].startswith("name,method,seed,rounds,accuracy.global")

    again = vitfleet(tmp_path, "run", *sizes, "--out", "both")
    assert again.returncode == 2
    assert "vitfleet resume both" in again.stderr

    # One of its runs is taken away, as if it had been stopped before: resume makes it again, the same.
    lost = tmp_path / "both" / "transfl-digits-s0"
    records = (lost / "records.jsonl").read_bytes()
    shutil.rmtree(lost)
    resumed = vitfleet(tmp_path, "resume", "both")
    assert resumed.returncode == 0, resumed.stderr
    assert (lost / "records.jsonl").read_bytes() == records


def test_a_comparison_over_seeds_says_mean_and_spread(vitfleet: Command, tmp_path: Path) -> None:
    sizes = options(*SMALL, "rounds=1")
    done = vitfleet(tmp_path, "compare", "digits", *sizes, "--seeds", "0,1", "--out", "seeds")
    assert done.returncode == 0, done.stderr
    assert "±" in done.stdout
    wrong = vitfleet(tmp_path, "compare", "digits", "--seeds", "0;1")
    assert wrong.returncode == 2
    assert "--seeds 0;1: must be whole numbers" in wrong.stderr


def test_a_run_that_fails_beside_others_is_named(vitfleet: Command, tmp_path: Path) -> None:
    sizes = options(*SMALL, "rounds=1")
    methods = ["--method", "fedavg", "--method", "fedprox data.name=folder data.path=nowhere"]
    done = vitfleet(tmp_path, "compare", "digits", *sizes, *methods, "--jobs", "2", "--out", "both")
    assert done.returncode == 2
    assert "fedprox-s0: failed" in done.stderr
    assert "1 of 2 runs failed" in done.stderr
    assert (tmp_path / "both" / "fedavg-s0" / "summary.json").exists(), "the others go on"


def test_runs_at_the_same_time_that_are_stopped_and_resumed_are_as_one_after_the_other(
    launch: Launch, vitfleet: Command, tmp_path: Path
) -> None:
    what = ["digits", *options(*SMALL, "rounds=30"), "--method", "fedavg", "--method", "fed-head train.lr=0.01"]
    process = launch("compare", *what, "--jobs", "2", "--out", "together")
    names = "fedavg-s0", "fed-head-s0"
    folders = [tmp_path / "together" / name for name in names]
    wait_for(lambda: all(done(one) > 1 for one in folders), process)
    process.send_signal(signal.SIGINT)
    _, client_metrics = process.communicate(timeout=60)
    assert process.returncode == 130, client_metrics
    assert "vitfleet resume together --jobs 2" in client_metrics
    left = [name for name, folder in zip(names, folders, strict=True) if done(folder) < 30]
    assert left, "both had finished before they were stopped"
    resumed = vitfleet(tmp_path, "resume", "together", "--jobs", "2")  # refused if another process still had a run
    assert resumed.returncode == 0, resumed.stderr
    assert all(f"{name}: finished" in resumed.stdout for name in left)
    assert "report:" in resumed.stdout
    in_turn = vitfleet(tmp_path, "compare", *what, "--out", "in turn")
    assert in_turn.returncode == 0, in_turn.stderr
    for name in names:
        records, others = (tmp_path / where / name / "records.jsonl" for where in ("together", "in turn"))
        assert records.read_bytes() == others.read_bytes()
    config = json.loads((folders[1] / "config.json").read_text())
    assert (config["method"]["name"], config["train"]["lr"]) == ("fed-head", 0.01)


def test_costs_for_machines_and_for_people(vitfleet: Command, tmp_path: Path) -> None:
    done = vitfleet(tmp_path, "cost", "digits", "--method", "fedavg", "--method", "eftvit", "--json")
    assert done.returncode == 0, done.stderr
    methods = json.loads(done.stdout)["methods"]
    assert set(methods) == {"fedavg", "eftvit"}
    wanted = {
        "forward_gmac",
        "train_gflops",
        "train_ratio_to_full",
        "trainable_params",
        "peak_memory_bytes",
        "up_bytes",
        "down_bytes",
    }
    assert wanted <= set(methods["fedavg"])
    shown = vitfleet(tmp_path, "cost", "digits", "--method", "fedavg")
    assert "Raspberry Pi 4B, 2 GB" in shown.stdout
    assert "207.6 KiB" in shown.stdout


def test_a_report_of_runs_and_of_nothing(vitfleet: Command, tmp_path: Path) -> None:
    done = vitfleet(tmp_path, "run", "digits", *options(*SMALL, "rounds=1"), "--out", "one")
    assert done.returncode == 0, done.stderr
    reported = vitfleet(tmp_path, "report", "one")
    assert reported.returncode == 0, reported.stderr
    assert "report: one/report.html" in reported.stdout
    assert (tmp_path / "one" / "figures" / "accuracy-by-rounds.svg").exists()
    wrong = vitfleet(tmp_path, "report", "none")
    assert wrong.returncode == 2
    assert "none: contains neither a run nor a comparison" in wrong.stderr


def test_a_run_that_never_got_under_way_leaves_no_folder(vitfleet: Command, tmp_path: Path) -> None:
    if find_spec("wandb") is not None:
        pytest.skip("wandb is installed here")
    done = vitfleet(tmp_path, "run", "digits", "-o", "trackers.wandb={}", "-o", "rounds=1", "--out", "mine")
    assert done.returncode == 2
    assert "trackers = 'wandb': is not installed; pip install 'vitfleet[wandb]'" in done.stderr
    assert list(tmp_path.iterdir()) == []
