"""Every script in benchmarks/ and scripts/ runs: for real, with as little work as it takes."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path
from shutil import which
from typing import TypeAlias

import pytest
from PIL import Image

import vitfleet
from browser import CHROMIUM

ROOT = Path(__file__).parents[1]
RunScript: TypeAlias = Callable[..., str]

RUN = "-o rounds=1 -o data.limit=60 -o train.epochs=1 -o fleet.clients=4 -o fleet.per_round=2 -o machine.device=cpu"
TASKS = "-o data.limit=200 -o data.tasks.rounds_per_task=1 -o train.epochs=2 -o machine.device=cpu"
TIMM = "--model vit_tiny_patch16_224 --methods fed-full --batch 1 --device cpu"

# What each script is run with, in a folder where `plain` and `tasks` are comparisons.
ARGUMENTS = {
    "benchmarks/attack.py": "--methods fedavg --most 8 --drawn 2",
    "benchmarks/attack_server.py": "requests --methods fedavg --most 12 --drawn 1",
    "benchmarks/bandwidth.py": f"--clients 2 --runs runs --out figures {TASKS} -o data.tasks.count=2",
    "benchmarks/captured_steps.py": f"digits {RUN}",
    "benchmarks/client_step.py": f"{TIMM} --steps 1",
    "benchmarks/digests.py": "fedavg",
    "benchmarks/families.py": "--families deit --clients 2 --samples 8 --batch 4 --repeats 1 --device cpu "
    "--ways eager stacked",
    "benchmarks/fedvit_step.py": "--clients 2 --k 2 --stored 2 --batch 4 --steps 1 --repeat 1 --dim 24 --depth 2",
    "benchmarks/memory.py": TIMM,
    "benchmarks/plot_bars.py": "tasks bars --by model.dim",
    "benchmarks/plot_curves.py": "plain curves",
    "benchmarks/poison.py": f"run poison.csv --methods fedavg --rules clip --attacks none scaled --seeds 0 {RUN}",
    "benchmarks/report.py": "--rounds 2 --seeds 1 --methods 2",
    "benchmarks/scaling.py": "memory --rounds 2",
    "benchmarks/speed.py": "vit --batch 4 --clients 2 --samples 4 --epochs 1 --repeats 1 --device cpu "
    "--ways eager solo stacked",
    "benchmarks/sweep_k.py": f"fedvit-digits --k 2 1 --rankings wasserstein --out k {TASKS} -o data.tasks.count=3",
    "benchmarks/targets.py": "plain --reference fedavg",
    "benchmarks/utilisation.py": "--batch 1 --steps 1 --size 64 --device cpu",
    "scripts/make_digits_weights.py": "weights.safetensors 64",
    "scripts/make_run_picture.py": "picture.svg vitfleet --version",
}
# In a browser.
PICTURES = {"scripts/make_report_pictures.py": "plain/report.html ."}
WHOLE_RUN = {"benchmarks/whole_run.py": f"digits --steps --json times.json {RUN} -o rounds=2"}
# Fleets of real processes: they take a minute and more.
REAL_FLEETS = {
    "benchmarks/chaos.py": "--out chaos --deadline 20",
    "benchmarks/fleet.py": "overhead --out fleet",
    "benchmarks/kills.py": "--method fedavg --kills 1 --out kills",
    "benchmarks/soak.py": "--rounds 2 --out soak",
}
NOT_RUN = {
    "benchmarks/peers.py": "tests/test_documented_environments.py runs it",
    "benchmarks/flood.py": "is a part of chaos.py",
    "benchmarks/network.py": "changes the machine's network, as root",
    "scripts/avalanche_reference.py": "needs Avalanche, in an environment of its own",
    "scripts/check_advisories.py": "tests/test_advisories.py runs it",
    "scripts/docs_pages.py": "is a part of `mkdocs build`, which ./test runs",
    "scripts/docs_roles.py": "is a part of `mkdocs build`, which ./test runs",
    "scripts/setup": "./test begins with it",
}


def execute(script: Path, arguments: list[str], folder: Path) -> None:
    """Run a script in this process, which ends with it, with its output in a file."""
    output = os.open(folder / "output", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(folder)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


@pytest.fixture(scope="module")
def server() -> ForkServerContext:
    """Return where processes come from that have imported the slow packages already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vitfleet.api", "timm", "matplotlib.pyplot"])
    return context


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the comparisons that scripts read."""
    folder = tmp_path_factory.mktemp("scripts")
    small = {"data.limit": 200, "machine.device": "cpu"}
    vitfleet.compare("digits", methods=["fedavg", "standalone"], overrides={**small, "rounds": 2}, out=folder / "plain")
    keys = {**small, "data.tasks.rounds_per_task": 1, "train.epochs": 1}
    vitfleet.compare("fedvit-digits", methods=["fedavg", "er"], overrides=keys, out=folder / "tasks")
    return folder


@pytest.fixture
def run_script(server: ForkServerContext, folder: Path) -> Iterator[RunScript]:
    """Return a function that runs a script in a process of its own and returns what it printed."""
    started = []

    def run(script: str, arguments: str) -> str:
        process = server.Process(target=execute, args=(ROOT / script, arguments.split(), folder))
        started.append(process)
        process.start()
        process.join()
        output = (folder / "output").read_text()
        assert process.exitcode == 0, output[-4000:]
        return output

    yield run
    for process in started:
        process.kill()


def test_every_script_is_run_or_has_a_reason_not_to_be() -> None:
    scripts = {
        str(path.relative_to(ROOT))
        for name in ("benchmarks", "scripts")
        for path in (ROOT / name).iterdir()
        if path.is_file() and path.suffix in {".py", ""}
    }
    assert scripts == {*ARGUMENTS, *PICTURES, *WHOLE_RUN, *REAL_FLEETS, *NOT_RUN}


@pytest.mark.parametrize("script", ARGUMENTS)
def test_script_runs(script: str, run_script: RunScript) -> None:
    run_script(script, ARGUMENTS[script])


@pytest.mark.skipif(CHROMIUM is None or which("pdftoppm") is None, reason="needs Chromium and pdftoppm")
@pytest.mark.parametrize("script", PICTURES)
def test_script_takes_pictures(script: str, run_script: RunScript, folder: Path) -> None:
    vitfleet.Comparison(folder / "plain").report(figure_files=False)
    run_script(script, PICTURES[script])
    widths = {path.stem: Image.open(path).width for path in folder.glob("report*.png")}
    assert {name: widths[name] for name in ("report", "report-dark", "report-narrow")} == {
        "report": 1280, "report-dark": 1280, "report-narrow": 390
    }  # fmt: skip
    assert "report-printed" in widths


def test_time_of_a_whole_run_is_divided_into_its_parts(run_script: RunScript, folder: Path) -> None:
    for script, arguments in WHOLE_RUN.items():
        assert "clients' steps alone" in run_script(script, arguments)
    _, parts = json.loads((folder / "times.json").read_text())["rounds"]
    for part in ("clients", "evaluation", "checkpoint"):  # a round's checkpoint is written after its end
        assert 0 < parts[part] < parts["total"]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", REAL_FLEETS)
def test_script_with_a_real_fleet_runs(script: str, run_script: RunScript) -> None:
    run_script(script, REAL_FLEETS[script])


@pytest.mark.parametrize("script", [*REAL_FLEETS, "benchmarks/network.py"])
def test_script_says_how_it_is_used(script: str, run_script: RunScript) -> None:
    assert "--out" in run_script(script, "--help")
