"""What new users stumbled over on the command line: each ends in one sentence with what is wrong and the remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import TINY, Command
from made_photos import draw_photos
from vitfleet.config.registry import METHODS
from vitfleet.report.console.costs import left_out_lines


def keys(*more: str) -> list[str]:
    return [part for override in (*TINY, "rounds=1", *more) for part in ("-o", override)]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, vitfleet: Command) -> Path:
    """Return the folder of a run in the folder that commands run in."""
    folder = tmp_path_factory.mktemp("first")
    result = vitfleet(folder, "run", "digits", *keys(), "--out", "first")
    assert result.returncode == 0, result.stderr
    return folder


def sentence(vitfleet: Command, folder: Path, *arguments: str) -> str:
    """Return the one line that a command refused with."""
    result = vitfleet(folder, *arguments)
    assert result.returncode == 2, result.stdout
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


@pytest.mark.parametrize(
    ("monitor", "expected"),
    [
        ("accuracyy", "callbacks.early_stopping.monitor = 'accuracyy'"),
        ("metrics.per_class.mean", "-o metrics.per_class.every=1"),  # it is off
        ("metrics.per_klass.mean", "metrics.per_klass"),
        ("task.average_accuracy", "data.tasks"),  # a run without tasks
    ],
)
def test_what_is_monitored_is_checked_before_training(
    monitor: str, expected: str, vitfleet: Command, tmp_path: Path
) -> None:
    command = ["run", "digits", *keys(f"callbacks.early_stopping.monitor={monitor}"), "--out", "stopped"]
    assert expected in sentence(vitfleet, tmp_path, *command)
    assert not (tmp_path / "stopped").exists()


def test_cost_takes_a_method_as_compare_does(vitfleet: Command, tmp_path: Path) -> None:
    result = vitfleet(tmp_path, "cost", "digits", "--method", "fedbfpt local_layers=3", "--method", "fedavg", "--json")
    assert result.returncode == 0, result.stderr
    assert set(json.loads(result.stdout)["methods"]) == {"fedbfpt local_layers=3", "fedavg"}


def test_a_key_given_as_an_option_is_answered_with_the_override(vitfleet: Command, tmp_path: Path) -> None:
    assert "-o rounds=5" in sentence(vitfleet, tmp_path, "run", "digits", "--rounds", "5")
    assert "-o train.lr=" in sentence(vitfleet, tmp_path, "run", "digits", "--lr", "1e-3")
    assert "-o train.epochs=" in sentence(vitfleet, tmp_path, "compare", "digits", "--epochs=2")


def test_a_command_that_is_not_there_names_a_similar_one_once(vitfleet: Command, tmp_path: Path) -> None:
    line = sentence(vitfleet, tmp_path, "list")
    assert line.count("'client'") <= 1
    assert "vitfleet --help" in line


def test_one_class_only_is_said(vitfleet: Command, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    draw_photos(tmp_path / "photos", ("cat",), per_class=20)
    result = vitfleet(tmp_path, "run", "digits", *keys("data.path=photos", "data.limit=null"), "--out", "one")
    assert result.returncode == 0, result.stderr
    assert "photos: all images are of one class, cat: there is nothing to learn" in caplog.text


def test_keys_by_prefix_and_methods_alone(vitfleet: Command, tmp_path: Path) -> None:
    by_prefix = vitfleet(tmp_path, "keys", "data.tasks").stdout.strip().splitlines()
    assert len(by_prefix) > 5
    assert all(line.startswith("data.tasks") for line in by_prefix)
    methods = vitfleet(tmp_path, "keys", "--methods").stdout.strip().splitlines()
    assert 20 < len(methods) < 60
    assert methods[0].startswith("standalone")
    assert "data.taks" in sentence(vitfleet, tmp_path, "keys", "data.taks")


def test_a_metric_is_a_column_of_the_table(vitfleet: Command, tmp_path: Path) -> None:
    assert vitfleet(tmp_path, "run", "digits", *keys("metrics.per_class={}"), "--out", "m").returncode == 0
    result = vitfleet(tmp_path, "table", "m", "--columns", "accuracy,metrics.per_class.worst", "--to", "csv")
    assert result.returncode == 0, result.stderr
    assert "per class worst" in result.stdout.splitlines()[0]
    listed = vitfleet(tmp_path, "table", "m", "--columns", "help").stdout
    assert "metrics.per_class.worst" in listed


def test_an_export_without_its_packages_leaves_no_folder(
    first: Path, vitfleet: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import importlib.util

    find_spec = importlib.util.find_spec
    hidden = {"onnx", "onnxruntime", "onnxscript", "peft"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name in hidden else find_spec(name, *more)
    )
    for name in hidden:
        monkeypatch.setitem(__import__("sys").modules, name, None)
    assert "pip install" in sentence(vitfleet, first, "export", "first", "--to", "onnx", "--out", "model")
    assert not (first / "model").exists()
    run = ["run", "digits", *keys("method.name=fed-lora"), "--out", str(tmp_path / "lora")]
    assert vitfleet(tmp_path, *run).returncode == 0
    assert "peft" in sentence(vitfleet, tmp_path, "export", "lora", "--to", "timm", "--out", "adapter")
    assert not (tmp_path / "adapter").exists()


def test_tasks_have_a_partition_of_their_own(vitfleet: Command, tmp_path: Path) -> None:
    line = sentence(vitfleet, tmp_path, "run", "fedvit-digits", "-o", "data.partition.beta=0.1", "--out", "tasks")
    assert "data.partition" in line
    assert "data.tasks" in line


# A command, and what its one sentence names: the option or the key, its value, and what to do instead.
MISTAKES = {
    "client --server h --data .": ("--name: is missing", "This client's name"),
    "client --server h:port --data . --name a": ("--server h:port", "must be HOST or HOST:PORT"),
    "client --server h:70000 --data . --name a": ("--server h:70000", "must be HOST or HOST:PORT"),
    "client --server https://h --data . --name a": ("--server https://h", "must be HOST or HOST:PORT"),
    "client --server h --data . --name a --threads 0": ("--threads: 0", "x>=1"),
    "client --server ::1 --data . --name a": ("--server ::1", "[::1]:9092"),
    "client --server h --data . --name a --threads two": ("--threads: must be a number, not 'two'", "--help"),
    "client --server h --data . --name a --limit epochs:5": ("--limit epochs:5", "must be NAME=VALUE"),
    "client --server h --data . --name a --state first/config.json": ("--state", "is no folder; name one"),
    "client --server 127.0.0.1:1 --data empty --name a": ("empty holds neither parquet files nor images", "<class>"),
    "client --server 127.0.0.1:1 --data photos --name a --device gpu": ("--device gpu", "must be auto, cpu, cuda"),
    "client --server 127.0.0.1:1 --data photos --name a --plugin no.py": ("plug-in no.py", "the path of a .py file"),
    "client --server 127.0.0.1:1 --data photos/cat/0.png --name a": (
        "--data",
        "0.png: is neither a parquet file nor a folder of images",
    ),
    "client --server 127.0.0.1:1 --data unreadable --name a": ("--data", "none of 1 images opened, of 1, can be read"),
    "client --server 127.0.0.1:1 --data photos --name a --state photos/cat/0.png/x": ("--state", "cannot be created"),
    "server": ("PRESET|FILE|DIR: is missing", "`vitfleet server --help`"),
    "server digits -o data.path=empty --names a,b": ("data.path = ", "empty holds neither parquet files nor images"),
    "server digits --port 70000": ("--port: 70000", "1<=x<=65535"),
    "server digits --host 203.0.113.7": ("--host 203.0.113.7", "0.0.0.0"),
    "server first": ("first: is a run in one process", "`vitfleet resume first`"),
    "server digits -o fleet.kind=simulation": ("fleet.kind = 'simulation'", "`vitfleet run`"),
    "server digits --names a,a": ("fleet.names = ['a', 'a']", "different names"),
    "compare digits --method fedavg mu=0.1": ("mu=0.1: a key is set with -o mu=0.1", "--method 'NAME mu=0.1'"),
    "compare digits --method fedavgg": ("method.name = 'fedavgg'", "did you mean fedavg?"),
    "compare digits --seeds 0-2": ("--seeds 0-2", "0,1,2"),
    "compare digits --seeds 0,0": ("digits-s0", "each seed once"),
    "compare digits --target 85": ("--target: 85.0", "0<=x<=1"),
    "compare digits --jobs many": ("--jobs: must be a number, not 'many'", "--help"),
    "compare digits -s train.lr": ("-s train.lr", "key=value,value"),
    "compare digits -s train.lr=1e-3,abc": ("train.lr = 'abc'", "number"),
    "compare digits -s method.k=1,2": ("method.k: no such key", "transfl"),
    "compare digits --seed 1": ("--seed: no such option", "did you mean --seeds?"),
    "compare digits -s train.lr=1e-3 -s train.lr=2e-3": ("train.lr is swept already", "train.lr=1,2,3"),
    "compare compared": ("compared: is the folder of a comparison", "`vitfleet resume compared`"),
    "compare photos": ("photos: is a folder", "-o data.path=photos"),
    "compare first": ("first: is the folder of a run", "first/config.json"),
    "search digits": ("search: no such command", "`vitfleet compare`"),
    "sweep digits": ("sweep: no such command", "`vitfleet compare`"),
    "export first": ("--to: is missing", "safetensors, timm, onnx"),
    "export first --to pth": ("--to pth", "must be one of safetensors, timm"),
    "export nothing --to timm": ("nothing", "no such run folder"),
    "export first --to timm --client 99": ("client = 99", "between 0 and 5"),
    "export first --to timm --out first/config.json": ("--out first/config.json", "cannot be created"),
    "export first --to timm --out photos": ("--out photos: is not empty", "choose another --out"),
    "export first --to timm --push-to-hub mine": ("--push-to-hub mine", "must be OWNER/NAME"),
    "export-data digits --out first": ("--out first: is not empty", "choose another --out"),
    "export-data digits --out new --names a,b -o fleet.clients=5": ("fleet.clients = 5", "--names has 2"),
    "export-data digits --out new --names a,a": ("--names a,a", "a name of its own"),
    "export-data digits --out photos/cat/0.png/x": ("--out photos/cat/0.png/x", "cannot be created"),
    "certs photos/cat/0.png --names a": ("photos/cat/0.png", "cannot be created"),
    "forget first": ("--client: is missing", "A client to leave out"),
    "forget first --client 0": ("--client 0: with fedavg", "run again"),
    "predict first": ("IMAGE…|FOLDER…: is missing", "`vitfleet predict --help`"),
    "predict first no.png nor.png neither.png": ("no.png: no such file", "nor can 2 more images be read"),
    "predict first unreadable": ("0.png: is not a readable image",),
    "demo first --port 99999 --no-browser": ("--port: 99999", "0<=x<=65535"),
    "demo first --clients a,b --no-browser": ("--clients a,b", "such as 3,7"),
    "report foreign": ("config.json: is no configuration of a run", "name the folder of a run"),
    "cost digits --device": ("--device: needs a value", "`vitfleet cost --help`"),
    "cost digits --device nope": ("--device nope", "there are nano"),
    "table first --out photos": ("--out photos: is a folder", "name a file"),
    "table first --out photos/cat/0.png/x.md": ("photos/cat/0.png", "cannot be created"),
    "table first --to xls": ("--to xls", "tex, md, csv"),
    "run digits --epochs 5": ("--epochs", "-o train.epochs=5"),
    "run digits -o rounds=0": ("rounds = 0", "greater than or equal to 1"),
    "resume first --rounds 1": ("--rounds 1", "must be more than the run's 1"),
    "table first --columns accurracy": ("columns accurracy", "there are accuracy"),
    "keys train.lrr": ("train.lrr", "did you mean train.lr"),
    "presets --show digit": ("'digit'", "did you mean 'digits'"),
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_answered_in_one_sentence(command: str, first: Path, vitfleet: Command) -> None:
    make_folders(first)
    before = files_below(first)
    name, *arguments = command.split()
    insecure = ["--insecure"] if name in {"server", "client"} else []
    result = vitfleet(first, name, *arguments, *insecure)
    assert result.returncode == 2, result.stdout
    line, *more = [line for line in result.stderr.strip().splitlines() if not line.startswith("warning: --insecure")]
    assert not more
    for words in MISTAKES[command]:
        assert words in line
    assert files_below(first) == before, "nothing half-made is left"


def make_folders(root: Path) -> None:
    """Make the folders that the mistakes name beside the run ``first``."""
    (root / "empty").mkdir(exist_ok=True)
    draw_photos(root / "photos", ("cat", "dog"), per_class=1)
    for file, content in {
        "unreadable/cat/0.png": "no image",
        "compared/compare.json": "{}",
        "foreign/config.json": "{}",
    }.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(content)


def files_below(root: Path) -> set[Path]:
    return {path for path in root.rglob("*") if path.is_file() and path.name != ".lock"}


def test_damaged_certificates_and_keys_are_named(vitfleet: Command, tmp_path: Path) -> None:
    draw_photos(tmp_path / "photos", ("cat",), per_class=1)
    client = ["client", "--server", "127.0.0.1:1", "--data", "photos", "--name", "a"]
    assert vitfleet(tmp_path, "certs", "fleet", "--host", "127.0.0.1", "--names", "a").returncode == 0
    (tmp_path / "fleet" / "nodes" / "a").write_text("junk")
    assert "nodes/a: is damaged, or no key; restore it, or remove it and copy it" in sentence(
        vitfleet, tmp_path, *client
    )
    (tmp_path / "fleet" / "ca.crt").write_text("junk")
    for command in (client, ["server", "digits", "--port", "1"]):
        line = sentence(vitfleet, tmp_path, *command)
        assert "ca.crt: is damaged, or no certificate" in line
        assert "`vitfleet certs" in line


def test_cost_says_which_methods_it_left_out_and_why(vitfleet: Command, tmp_path: Path) -> None:
    done = vitfleet(tmp_path, "cost", "digits", *keys("head.start=closed-form"), "--json")
    assert done.returncode == 0, done.stderr
    costs = json.loads(done.stdout)
    assert "the server has no head to be solved" in costs["left_out"]["standalone"]
    assert not costs["left_out"].keys() & costs["methods"].keys()
    assert costs["left_out"].keys() | costs["methods"].keys() == set(METHODS.names())
    alike = {"gem": "method.name = 'gem': learns tasks", "er": "method.name = 'er': learns tasks", "x": "has no head"}
    assert list(left_out_lines(alike)) == [
        "not in these tables: gem, er (learns tasks)",
        "not in these tables: x (has no head)",
    ]
