"""Pages work in the environment that they say to install, and not only in the one with everything."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from documented_environment import ROOT, make_environment
from made_sets import write_small_cifar10
from test_docs import IN_ENVIRONMENTS, commands_of, reduction
from vitfleet.flower.processes import stop_process_group

PEERS = "--data-dir data --clients 4 --per-round 2 --batch 4 --rounds 2 --threads 1 --repeats 1 --ways eager ours"
# Runs several commands in one process: starting one takes seconds. So do figure files: only `report` draws them.
RUN_COMMANDS = """
import json, sys
from vitfleet.cli import main
from vitfleet.report.html import page
can_draw = page.can_draw
for arguments in json.load(sys.stdin):
    page.can_draw = can_draw if arguments[0] == "report" else lambda: False
    sys.argv = ["vitfleet", *arguments]
    try:
        main()
    except SystemExit as end:
        if end.code:
            sys.exit(f"{arguments}: exit code {end.code}")
"""


def requirement_of(page: Path) -> str:
    """Return what a page installs in a clone: `pip install -e '.[sim]'` is `vitfleet[sim]`."""
    extras = re.findall(r"pip install (?:-e )?'\.\[([a-z,]+)\]'", page.read_text(encoding="utf-8"))
    assert extras, page
    return f"vitfleet[{','.join(extras)}]"


def environment_without(commands: Path) -> dict[str, str]:
    """Return the environment of processes which find nothing but what is installed beside these commands."""
    removed = ("PYTHONPATH", "VITFLEET_DATA", "VIRTUAL_ENV", "FORCE_COLOR")
    kept = {name: value for name, value in os.environ.items() if name not in removed}
    return {**kept, "PATH": f"{commands}{os.pathsep}{kept['PATH']}", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("page", IN_ENVIRONMENTS)
def test_commands_of_a_page_run_where_it_was_followed(page: str, tmp_path: Path) -> None:
    document = ROOT / page
    commands = make_environment(tmp_path / "environment", requirement_of(document))
    (tmp_path / "here").mkdir()
    executed = [
        [*command.arguments, *reduction(command.arguments)]
        for command in commands_of(document)
        if command.reason_not_to_execute is None
    ]
    assert len(executed) > 2
    result = subprocess.run(
        [commands / "python", "-c", RUN_COMMANDS],
        input=json.dumps(executed),
        cwd=tmp_path / "here",
        env=environment_without(commands),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, f"{result.stdout[-2000:]}\n{result.stderr[-4000:]}"


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", ["README.md", "docs/first-steps.md"])
def test_commands_of_a_page_run_as_they_stand(page: str, tmp_path: Path) -> None:
    """Without the overrides with which the quick tests make them short."""
    commands = make_environment(tmp_path / "environment", requirement_of(ROOT / "README.md"))
    (tmp_path / "here").mkdir()
    for command in commands_of(ROOT / page):
        if command.reason_not_to_execute is None:
            result = subprocess.run(
                [commands / "vitfleet", *command.arguments],
                cwd=tmp_path / "here",
                env=environment_without(commands),
                capture_output=True,
                text=True,
            )
            assert result.returncode == 0, f"{command.text}\n{result.stderr[-4000:]}"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_tutorial_for_edge_engineers_as_it_stands(tmp_path: Path) -> None:
    """With a server and two clients of real processes, at the port that the page's commands use."""
    page = ROOT / "docs" / "tutorials" / "edge-engineer.md"
    commands = make_environment(tmp_path / "environment", requirement_of(page))
    (tmp_path / "here").mkdir()
    running: list[subprocess.Popen[bytes]] = []

    def start(arguments: tuple[str, ...]) -> subprocess.Popen[bytes]:
        command = [str(commands / "vitfleet"), *arguments]
        return subprocess.Popen(
            command, cwd=tmp_path / "here", env=environment_without(commands), start_new_session=True
        )

    try:
        for command in commands_of(page):
            if command.arguments[0] in {"server", "client"}:
                running.append(start(command.arguments))
            elif "onnx" not in command.arguments:  # which needs the extra export besides, as the page says
                for number, process in enumerate(running):
                    if number == 0:
                        assert process.wait(900) == 0, "the server"
                    stop_process_group(process)
                running = []
                assert start(command.arguments).wait(300) == 0, command.text
    finally:
        for process in running:
            stop_process_group(process)


@pytest.mark.long
def test_the_peers_are_compared_where_their_page_was_followed(tmp_path: Path) -> None:
    page = ROOT / "benchmarks" / "README.md"
    peers = [
        line
        for line in (ROOT / "benchmarks" / "requirements-peers.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    commands = make_environment(tmp_path / "environment", requirement_of(page), *peers)
    write_small_cifar10(tmp_path / "data")
    command = [str(commands / "python"), str(ROOT / "benchmarks" / "peers.py"), *PEERS.split()]
    result = subprocess.run(command, cwd=tmp_path, env=environment_without(commands), capture_output=True, text=True)
    assert result.returncode == 0, f"{result.stdout[-2000:]}\n{result.stderr[-4000:]}"


def test_an_environment_has_nothing_else(tmp_path: Path) -> None:
    """Otherwise the tests above could not fail."""
    commands = make_environment(tmp_path, "vitfleet[client]")
    code = "import importlib.util as u; print([n for n in ('torch', 'flwr', 'timm', 'pytest') if u.find_spec(n)])"
    result = subprocess.run(
        [commands / "python", "-c", code], env=environment_without(commands), capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "['torch', 'flwr']"
    assert sys.executable != str(commands / "python")
