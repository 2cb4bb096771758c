"""The commands run, resume, compare, cost and report: output, files and exit codes."""

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

import psutil
import pytest

from conftest import Command, MakeConfig
from vitfleet.config import load_config, presets
from vitfleet.run.output.folder import create_run_folder

# Overrides that make any preset on digits a run of seconds.
SMALL = ("data.limit=200", "train.epochs=1", "model.dim=16", "model.patch_size=4")
Result: TypeAlias = subprocess.CompletedProcess[str]
Launch: TypeAlias = Callable[..., subprocess.Popen[str]]


def options(*overrides: str) -> list[str]:
    return [part for override in overrides for part in ("-o", override)]


def assert_rejected(result: Result, *words: str) -> None:
    """Assert that a command ended with code 2 and one sentence that contains these words."""
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
    """Return the folder of a tiny run that the command finished in a process of its own, and its output."""
    cwd = tmp_path_factory.mktemp("finished")
    command = [str(executable), "run", "digits", *options(*tiny_overrides), "--out", "done", "--seed", "4"]
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return cwd / "done", result


@pytest.fixture
def launch(executable: Path, environment: dict[str, str], tmp_path: Path) -> Iterator[Launch]:
    """Return a function that starts the command without waiting for its end."""
    processes: list[subprocess.Popen[str]] = []

    def start_command(*arguments: str | Path) -> subprocess.Popen[str]:
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

    yield start_command
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


def test_a_preset_is_printed_as_a_file_to_start_from(vitfleet: Command, tmp_path: Path) -> None:
    result = vitfleet(tmp_path, "presets", "--show", "digits")
    (tmp_path / "mine.toml").write_text(result.stdout)
    assert load_config(str(tmp_path / "mine.toml")) == load_config("digits")
    assert_rejected(vitfleet(tmp_path, "presets", "--show", "digit"), "did you mean 'digits'?")


def test_presets_lists_every_preset_with_its_title(vitfleet: Command, tmp_path: Path) -> None:
    result = vitfleet(tmp_path, "presets")
    assert result.returncode == 0
    output = " ".join(result.stdout.split())
    for name, title in presets().items():
        assert name in output
        assert title.split(":")[0].split()[0] in output


def test_run_prints_a_summary_and_writes_its_folder(finished: tuple[Path, Result]) -> None:
    folder, result = finished
    assert result.returncode == 0, result.stderr
    assert "accuracy" in result.stdout
    assert "FedAvg on digits" in result.stdout
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


def test_table_prints_and_writes_the_results(finished: tuple[Path, Result], vitfleet: Command) -> None:
    folder, _ = finished
    result = vitfleet(folder.parent, "table", "done", "--columns", "accuracy,upload")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("|  | accuracy, % | upload, MiB |")
    written = vitfleet(folder.parent, "table", "done", "--to", "tex", "--out", "results.tex")
    assert written.returncode == 0, written.stderr
    assert r"\begin{tabular}" in (folder.parent / "results.tex").read_text()
    assert_rejected(vitfleet(folder.parent, "table", "done", "--to", "word"), "--to word", "tex, md, csv")


def test_run_rejects_a_folder_that_holds_a_run(finished: tuple[Path, Result], vitfleet: Command) -> None:
    folder, _ = finished
    before = {path: path.read_bytes() for path in folder.glob("*.*")}
    assert_rejected(vitfleet(folder.parent, "run", "digits", "--out", "done"), "done", "resume", "--out")
    assert {path: path.read_bytes() for path in folder.glob("*.*")} == before


def test_resume_of_a_finished_run_changes_nothing(finished: tuple[Path, Result], vitfleet: Command) -> None:
    folder, _ = finished
    files = [folder / "records.jsonl", folder / "summary.json", folder / "config.json"]
    before = [path.read_bytes() for path in files]
    result = vitfleet(folder.parent, "resume", "done")
    assert result.returncode == 0, result.stderr
    assert "this run is finished" in result.stdout
    assert [path.read_bytes() for path in files] == before


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
def test_run_rejects_a_bad_override_in_one_sentence(
    override: str, words: list[str], vitfleet: Command, tmp_path: Path
) -> None:
    assert_rejected(vitfleet(tmp_path, "run", "digits", "-o", override, "--out", "bad"), *words)
    assert not (tmp_path / "bad").exists()


def test_run_rejects_an_unknown_preset_in_one_sentence(launch: Launch, vitfleet: Command, tmp_path: Path) -> None:
    process = launch("run", "digit")
    stdout, stderr = process.communicate(timeout=60)
    result = subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
    assert_rejected(result, "digit", "'digits'")
    assert_rejected(vitfleet(tmp_path, "run", "none.toml"), "none.toml")
    assert not (tmp_path / "runs").exists()


def test_run_rejects_more_clients_than_images_and_leaves_no_folder(vitfleet: Command, tmp_path: Path) -> None:
    arguments = options("data.limit=50", "fleet.clients=51", "machine.device=cpu")
    result = vitfleet(tmp_path, "run", "digits", *arguments, "--out", "crowd")
    assert_rejected(result, "fleet.clients", "51", "between 1 and 50")
    assert not (tmp_path / "crowd").exists()


@pytest.mark.usefixtures("isolated_data")
def test_run_rejects_a_missing_data_set_and_leaves_no_folder(vitfleet: Command, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    arguments = options("data.name=cifar100", "machine.device=cpu")
    result = vitfleet(tmp_path, "run", "digits", *arguments, "--data-dir", "data", "--out", "missing")
    assert_rejected(result, "cifar100", str(tmp_path / "data"))
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize("folder", ["empty", "nowhere"])
def test_resume_rejects_a_folder_without_a_run(folder: str, vitfleet: Command, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert_rejected(vitfleet(tmp_path, "resume", folder), folder, "no run")
    assert not (tmp_path / "nowhere").exists()


Started: TypeAlias = tuple[subprocess.Popen[str], Path]
Start: TypeAlias = Callable[[int], Started]


@pytest.fixture
def start(launch: Launch, tiny_overrides: tuple[str, ...], tmp_path: Path) -> Start:
    """Return a function that starts a run of a number of rounds and waits for its second record."""

    def start_run(rounds: int) -> Started:
        folder = tmp_path / "a folder whose path is long enough to be wrapped in a narrow terminal" / "run"
        process = launch("run", "digits", *options(*tiny_overrides, f"rounds={rounds}"), "--out", folder)
        wait_for(lambda: rounds_done(folder) >= 2, process)
        return process, folder

    return start_run


def rounds_done(folder: Path) -> int:
    records = folder / "records.jsonl"
    return len(records.read_bytes().splitlines()) if records.exists() else 0


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def test_resume_rejects_a_run_that_another_process_runs(start: Start, vitfleet: Command, tmp_path: Path) -> None:
    process, folder = start(100_000)
    assert_rejected(vitfleet(tmp_path, "resume", folder), str(folder), "another process")
    before = rounds_done(folder)
    wait_for(lambda: rounds_done(folder) > before, process)  # the first process is not disturbed


@pytest.mark.parametrize("sent", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_an_interrupted_run_prints_how_to_resume_it(
    sent: signal.Signals, start: Start, vitfleet: Command, tmp_path: Path
) -> None:
    rounds = 60
    process, folder = start(rounds)
    process.send_signal(sent)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert 2 <= rounds_done(folder) < rounds
    assert f"vitfleet resume {shlex.quote(str(folder))}" in stderr  # on one line, to be copied into a shell
    result = vitfleet(tmp_path, "resume", folder)
    assert result.returncode == 0, result.stderr
    assert rounds_done(folder) == rounds
    assert json.loads((folder / "summary.json").read_text())["rounds"] == rounds


def open_when_read(pipe: Path, process: subprocess.Popen[str]) -> int:
    """Wait until a process reads from a named pipe, and return the pipe's other end, to which nothing is written."""
    while True:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # no process reads from it yet
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)


def test_a_run_interrupted_during_setup_can_be_resumed(
    launch: Launch, tiny_config: MakeConfig, vitfleet: Command, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    create_run_folder(tiny_config(), folder, "run", ["test"]).release()
    machine = folder / "machine.json"
    os.mkfifo(machine)  # it is read during setup: reading blocks until the process is interrupted
    process = launch("resume", folder)
    pipe = open_when_read(machine, process)
    process.send_signal(signal.SIGINT)
    # Python sees a signal that comes just before the process waits for bytes only when that wait ends.
    os.close(pipe)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert "vitfleet resume" in stderr
    machine.unlink()
    result = vitfleet(tmp_path, "resume", folder)
    assert result.returncode == 0, result.stderr
    assert rounds_done(folder) == 3


@pytest.mark.usefixtures("without_figure_files")
def test_run_without_a_configuration_compares_three_methods_on_one_partition(
    vitfleet: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitfleet.cli.compare.MAX_JOBS", 1)  # in this process: others take seconds to start
    sizes = options("data.limit=150", "train.epochs=1", "rounds=1")
    result = vitfleet(tmp_path, "run", *sizes, "--out", "both")
    assert result.returncode == 0, result.stderr
    for name, title in {"fedavg": "FedAvg", "transfl": "TransFL", "eftvit": "EFTViT"}.items():
        assert f"\n{title}: " in result.stdout, "a sentence about what it gained"
        assert title in result.stdout
        assert (tmp_path / "both" / f"{name}-s0" / "summary.json").exists()
    partitions = {(folder / "partition.safetensors").read_bytes() for folder in (tmp_path / "both").glob("*-s0")}
    assert len(partitions) == 1
    assert f"report: {Path('both') / 'report.html'}" in result.stdout
    assert (tmp_path / "both" / "report.html").exists()
    assert "figures as files: vitfleet report both" in result.stdout
    assert not (tmp_path / "both" / "figures").exists()
    assert "3 runs, estimated: about" in result.stdout
    rows = (tmp_path / "both" / "compare.csv").read_text().splitlines()
    assert len(rows) == 4
    assert rows[0].startswith("name,method,seed,rounds,defence,eval_split,accuracy.global")

    again = vitfleet(tmp_path, "run", *sizes, "--out", "both")
    assert again.returncode == 2
    assert "vitfleet resume both" in again.stderr

    # One of the runs is removed, as if it had not started: resume runs it again, with the same result.
    removed = tmp_path / "both" / "transfl-s0"
    records = (removed / "records.jsonl").read_bytes()
    shutil.rmtree(removed)
    resumed = vitfleet(tmp_path, "resume", "both")
    assert resumed.returncode == 0, resumed.stderr
    assert (removed / "records.jsonl").read_bytes() == records


@pytest.mark.usefixtures("without_figure_files")
def test_compare_over_seeds_prints_mean_and_spread(vitfleet: Command, tmp_path: Path) -> None:
    sizes = options(*SMALL, "rounds=1")
    result = vitfleet(tmp_path, "compare", "digits", *sizes, "--seeds", "0,1", "--out", "seeds")
    assert result.returncode == 0, result.stderr
    assert "2 runs, estimated: about" in result.stdout
    assert "run 2 of 2, seed 1: FedAvg on digits" in result.stdout
    assert "±" in result.stdout
    for seeds in ("0;1", "0,²"):
        wrong = vitfleet(tmp_path, "compare", "digits", "--seeds", seeds)
        assert wrong.returncode == 2
        assert f"--seeds {seeds}: must be whole numbers" in wrong.stderr


@pytest.mark.usefixtures("without_figure_files")
def test_compare_names_a_run_that_fails_and_finishes_the_others(vitfleet: Command, tmp_path: Path) -> None:
    sizes = options(*SMALL, "rounds=1")
    methods = ["--method", "fedavg", "--method", "fedprox data.name=folder data.path=nowhere"]
    result = vitfleet(tmp_path, "compare", "digits", *sizes, *methods, "--jobs", "2", "--out", "both")
    assert result.returncode == 2
    assert ": FedProx, seed 0: failed: " in result.stderr
    assert "1 of 2 runs failed" in result.stderr
    assert (tmp_path / "both" / "fedavg-s0" / "summary.json").exists(), "the other run finishes"


def processes_naming(folder: Path) -> list[list[str]]:
    """Return the command lines that name a folder, absolutely or from its parent."""
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    names = f"{folder.name}/", str(folder)
    return [command for command in commands if any(name in word for word in command for name in names)]


@pytest.mark.long
def test_parallel_runs_that_are_interrupted_and_resumed_equal_sequential_ones(
    launch: Launch, vitfleet: Command, tmp_path: Path
) -> None:
    arguments = ["digits", *options(*SMALL, "rounds=30"), "--method", "fedavg", "--method", "fed-head train.lr=0.01"]
    process = launch("compare", *arguments, "--jobs", "2", "--out", "together")
    names = "fedavg-s0", "fed-head-s0"
    folders = [tmp_path / "together" / name for name in names]
    wait_for(lambda: all(rounds_done(folder) > 1 for folder in folders), process)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "vitfleet resume together --jobs 2" in stderr
    assert not processes_naming(tmp_path / "together"), "no process is left"
    assert not list((tmp_path / "together").rglob("*.tmp"))
    unfinished = [name for name, folder in zip(names, folders, strict=True) if rounds_done(folder) < 30]
    assert unfinished, "both had finished before they were interrupted"
    resumed = vitfleet(tmp_path, "resume", "together", "--jobs", "2")  # rejected if another process still held a run
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.count(", seed 0: finished after ") == len(unfinished)
    assert "report:" in resumed.stdout
    sequential = vitfleet(tmp_path, "compare", *arguments, "--out", "sequential")
    assert sequential.returncode == 0, sequential.stderr
    for name in names:
        records, others = (tmp_path / where / name / "records.jsonl" for where in ("together", "sequential"))
        assert records.read_bytes() == others.read_bytes()
    config = json.loads((folders[1] / "config.json").read_text())
    assert (config["method"]["name"], config["train"]["lr"]) == ("fed-head", 0.01)


def test_cost_prints_a_table_or_json(vitfleet: Command, tmp_path: Path) -> None:
    result = vitfleet(tmp_path, "cost", "digits", "--method", "fedavg", "--method", "eftvit", "--json")
    assert result.returncode == 0, result.stderr
    methods = json.loads(result.stdout)["methods"]
    assert json.loads(result.stdout)["would_fit"] == {}  # it fits everywhere
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
    shown = vitfleet(tmp_path, "cost", "--device", "pi4", "nano", "digits", "--method", "fedavg")
    assert "Raspberry Pi 4B, 2 GB" in shown.stdout
    assert "Jetson Nano" in shown.stdout
    assert "laptop" not in shown.stdout
    assert "207.6 KiB" in shown.stdout


def test_report_of_a_run_and_of_a_missing_folder(vitfleet: Command, tmp_path: Path) -> None:
    result = vitfleet(tmp_path, "run", "digits", *options(*SMALL, "rounds=1"), "--out", "one")
    assert result.returncode == 0, result.stderr
    reported = vitfleet(tmp_path, "report", "one")
    assert reported.returncode == 0, reported.stderr
    assert "report: one/report.html" in reported.stdout
    assert (tmp_path / "one" / "figures" / "accuracy-by-rounds-fedavg.svg").exists()
    wrong = vitfleet(tmp_path, "report", "none")
    assert wrong.returncode == 2
    assert "none: contains neither a run nor a comparison" in wrong.stderr


def test_run_that_fails_in_setup_leaves_no_folder(vitfleet: Command, tmp_path: Path) -> None:
    if find_spec("wandb") is not None:
        pytest.skip("wandb is installed here")
    result = vitfleet(tmp_path, "run", "digits", "-o", "trackers.wandb={}", "-o", "rounds=1", "--out", "mine")
    assert result.returncode == 2
    assert "trackers = 'wandb': is not installed; the extra `wandb` installs it" in result.stderr
    assert list(tmp_path.iterdir()) == []
