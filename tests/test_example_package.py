"""The example package: a method, a data set, a partition and a metric of its own, through every way of using them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vitfleet as api
from conftest import Command
from vitfleet.run.callbacks import Callback
from vitfleet.run.records import RoundRecord
from vitfleet.run.state import RunState

pytestmark = pytest.mark.usefixtures("without_figure_files")

PACKAGE = Path(__file__).parents[1] / "examples" / "plugin-package"
PLUGIN = PACKAGE / "src" / "vitfleet_example" / "plugin.py"
CONFIG = PACKAGE / "fedexp-shapes.toml"
SHORT = ["-o", "rounds=2", "-o", "data.params.images=120"]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process and its children import the package, as if it were installed."""
    source = str(PACKAGE / "src")
    monkeypatch.syspath_prepend(source)
    for name in [name for name in sys.modules if name.split(".")[0] == "vitfleet_example"]:
        monkeypatch.delitem(sys.modules, name)  # a test registers the components anew
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")])))


def test_method_file_has_at_most_40_lines() -> None:
    assert len((PACKAGE / "src" / "vitfleet_example" / "fedexp.py").read_text().splitlines()) <= 40


def test_example_runs_resumes_and_compares_from_the_command_line(vitfleet: Command, tmp_path: Path) -> None:
    done = vitfleet(tmp_path, "run", CONFIG, "--plugin", PLUGIN, *SHORT, "--out", "run")
    assert done.returncode == 0, done.stderr
    used = {(part["kind"], part["name"]) for part in json.loads((tmp_path / "run" / "plugins.json").read_text())}
    assert used == {
        ("method", "fedexp"), ("data set", "shapes"), ("partition", "unequal"), ("metric", "kappa"),
    }  # fmt: skip
    resumed = vitfleet(tmp_path, "resume", "run")
    assert resumed.returncode == 0, resumed.stderr
    compared = vitfleet(
        tmp_path,
        "compare",
        CONFIG,
        "--plugin",
        PLUGIN,
        *SHORT,
        "--method",
        "fedavg",
        "--method",
        "fedexp",
        "--out",
        "both",
    )
    assert compared.returncode == 0, compared.stderr
    assert "FedExP" in compared.stdout
    cost = vitfleet(tmp_path, "cost", CONFIG, "--plugin", PLUGIN, "--method", "fedexp", "--json")
    assert json.loads(cost.stdout)["methods"]["fedexp"]["up_bytes"] > 0
    keys = vitfleet(tmp_path, "keys", "--plugin", PLUGIN)
    assert "ε: the larger, the nearer to FedAvg" in keys.stdout
    report = vitfleet(tmp_path, "report", "run")
    assert report.returncode == 0, report.stderr


def test_example_runs_through_the_api_and_resumes_to_the_same_records(tmp_path: Path) -> None:
    class StopAfterFirstRound(Callback):
        def on_round_end(self, state: RunState, record: RoundRecord) -> None:
            if state.round == 2:
                raise KeyboardInterrupt

    options = {"rounds": 3, "data.params.images": 120, "metrics.kappa.every": 1}
    whole = api.train(CONFIG, plugins=[PLUGIN], overrides=options, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        api.train(
            CONFIG, plugins=[PLUGIN], overrides=options, out=tmp_path / "stopped", callbacks=[StopAfterFirstRound()]
        )
    stopped = api.load_run(tmp_path / "stopped")
    assert not stopped.finished
    stopped.resume()
    assert (tmp_path / "stopped" / "records.jsonl").read_bytes() == (tmp_path / "whole" / "records.jsonl").read_bytes()
    assert -1 <= whole.summary["metrics"]["kappa"]["value"] <= 1


def test_fedexp_goes_along_the_mean_change_and_with_a_large_epsilon_no_further(tmp_path: Path) -> None:
    """An oracle: a round of FedAvg, with a rate of almost nothing for the weights that it starts from."""

    def weights_after_a_round(**changed: object) -> torch.Tensor:
        keys = {"rounds": 1, "data.limit": 400, "data.partition.beta": 0.05, "fleet.per_round": 10, **changed}
        run = api.train("digits", plugins=[PLUGIN], overrides=keys, out=tmp_path / str(len(list(tmp_path.iterdir()))))
        return torch.cat([weight.flatten() for weight in run.model().parameters()])

    before, mean = weights_after_a_round(**{"train.lr": 1e-30}), weights_after_a_round()
    fedexp = {"method.name": "fedexp"}
    assert torch.equal(weights_after_a_round(**fedexp, **{"method.epsilon": 1e9}), mean)
    moved = weights_after_a_round(**fedexp, **{"method.epsilon": 1e-9})
    rate = float((moved - before).norm() / (mean - before).norm())
    assert rate > 1.1
    torch.testing.assert_close(moved, before + rate * (mean - before), rtol=1e-3, atol=1e-6)


def test_changed_plugin_is_not_resumed(vitfleet: Command, tmp_path: Path) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from vitfleet import register_method\n"
        "from vitfleet.config.base import MethodParams\n"
        "from vitfleet.methods.averaging.fedavg import WeightAveraging\n"
        "@register_method('mine')\n"
        "class Mine(WeightAveraging[MethodParams]):\n"
        "    pass\n".replace("'mine')", "'mine', MethodParams)")
    )
    done = vitfleet(tmp_path, "run", "digits", "-o", "method.name=mine.py:Mine", "-o", "rounds=1", "--out", "run")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "config.json").read_text())["method"]["name"] == "mine"
    plugin.write_text(plugin.read_text() + "# changed\n")
    reasons = {
        "'resume', 'run'": "read it, then say --trust-plugins",  # what it holds now was never trusted
        "'resume', 'run', '--trust-plugins'": "has changed since the run began; restore it, or start a new run",
    }
    for arguments, reason in reasons.items():
        code = f"import sys; from vitfleet.cli import main; sys.argv = ['vitfleet', {arguments}]; main()"
        resumed = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
        assert resumed.returncode == 2
        assert reason in resumed.stderr


def test_installed_package_is_found_by_its_entry_point(tmp_path: Path) -> None:
    """Install the package's metadata into a folder of its own: no --plugin is needed then."""
    site = tmp_path / "site"
    info = site / "vitfleet_example-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vitfleet-example\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[vitfleet.plugins]\nexample = vitfleet_example\n")
    code = "from vitfleet.config import load_config; print(load_config('digits', ['method.name=fedexp']).method)"
    path = os.pathsep.join([str(site), os.environ["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert "epsilon=0.001" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import nowhere_to_be_found\n", "line 1: ModuleNotFoundError"),
        ("x = 1\nraise ValueError('no')\n", "line 2: ValueError: no"),
        ("def f(:\n", "line 1: SyntaxError"),
    ],
)
def test_broken_plugin_is_reported_with_its_line(vitfleet: Command, tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "broken.py").write_text(text)
    done = vitfleet(tmp_path, "run", "digits", "--plugin", "broken.py")
    assert done.returncode == 2
    assert "plug-in" in done.stderr
    assert expected in done.stderr
    missing = vitfleet(tmp_path, "run", "digits", "--plugin", "missing.py")
    assert missing.returncode == 2
    assert "no such Python file" in missing.stderr


def test_name_that_is_taken_is_rejected(vitfleet: Command, tmp_path: Path) -> None:
    (tmp_path / "taken.py").write_text(
        "from vitfleet import register_method\n"
        "from vitfleet.config.base import MethodParams\n"
        "from vitfleet.methods.averaging.fedavg import WeightAveraging\n"
        "@register_method('fedavg', MethodParams)\n"
        "class Mine(WeightAveraging[MethodParams]):\n"
        "    pass\n"
    )
    done = vitfleet(tmp_path, "run", "digits", "--plugin", "taken.py")
    assert done.returncode == 2
    assert "the name is taken by" in done.stderr
