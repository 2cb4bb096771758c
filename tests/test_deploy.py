"""The files of `deploy/` fit the program: commands and extras exist, and a linter would refuse nothing of them."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
import typer.main

from vitfleet.cli.base import app
from vitfleet.flower.device.trim import size_of, trim_torch

ROOT = Path(__file__).parents[1]
CONTAINERFILE = ROOT / "deploy" / "Containerfile"
UNIT = ROOT / "deploy" / "vitfleet-client.service"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
INSTRUCTIONS = {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "USER", "VOLUME", "EXPOSE", "ENTRYPOINT"}


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the container file and their arguments."""
    text = re.sub(r"^#.*\n", "", CONTAINERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = re.sub(r"\s*\\\n\s*", " ", text).splitlines()
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines if line]


def stages() -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    for name, arguments in instructions():
        if name == "FROM":
            stage = found.setdefault(arguments.split(" AS ")[1], [])
        stage.append((name, arguments))
    return found


def parse_command(words: list[str]) -> None:
    """Parse the arguments of `vitfleet`; raises what the command line would print."""
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group)
    group.commands[words[0]].make_context(words[0], words[1:])


def test_container_file_has_only_known_instructions_and_pinned_bases() -> None:
    assert {name for name, _ in instructions()} <= INSTRUCTIONS
    bases = [arguments.split(" AS ")[0] for name, arguments in instructions() if name == "FROM"]
    assert set(bases) == {"python:3.12-slim"}
    assert set(stages()) == {"wheel", "client", "server"}


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")}
    copied = {
        source.removeprefix("./") for name, text in instructions() if name == "COPY" for source in text.split()[:-1]
    }
    assert copied == allowed
    assert all((ROOT / source).exists() for source in copied)


@pytest.mark.parametrize(("stage", "extra"), [("client", "client"), ("server", "flower")])
def test_image_installs_this_version_and_does_not_run_as_root(stage: str, extra: str) -> None:
    run = next(arguments for name, arguments in stages()[stage] if name == "RUN")
    assert f"'vitfleet[{extra}]=={PROJECT['version']}'" in run
    assert "--no-cache-dir" in run
    assert extra in PROJECT["optional-dependencies"]
    users = [arguments for name, arguments in stages()[stage] if name == "USER"]
    assert users[-1] not in ("root", "0")


def test_entry_points_are_commands() -> None:
    given = {"client": ["--server", "fleet.example.org", "--name", "kitchen"], "server": ["eftvit-digits"]}
    for stage, arguments in given.items():
        entry = json.loads(next(text for name, text in stages()[stage] if name == "ENTRYPOINT"))
        assert entry[0] == "vitfleet"
        parse_command([*entry[1:], *arguments])


def test_unit_starts_a_client_that_may_write_its_state() -> None:
    unit = configparser.ConfigParser(strict=True, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(UNIT.read_text(encoding="utf-8"))
    assert set(unit.sections()) == {"Unit", "Service", "Install"}
    service = unit["Service"]
    program, *words = shlex.split(service["ExecStart"])
    assert program == "/opt/vitfleet/bin/vitfleet"
    parse_command(words)
    assert words[words.index("--state") + 1] == f"/var/lib/{service['StateDirectory']}"
    assert service["ProtectSystem"] == "strict"
    assert service["User"] not in ("", "root")


def test_unit_is_accepted_by_systemd(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/vitfleet/bin/vitfleet", sys.executable))  # which must exist
    result = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True)
    assert UNIT.name not in result.stderr, result.stderr
    copy.write_text(copy.read_text().replace("[Service]\n", "[Service]\nRestartSeconds=3\n"))
    wrong = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True)
    assert "RestartSeconds" in wrong.stderr  # it does look


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_images_are_built_where_a_container_tool_is(tmp_path: Path) -> None:
    tool = next((tool for tool in ("podman", "docker") if shutil.which(tool)), None)
    if tool is None or subprocess.run([tool, "info"], capture_output=True).returncode:
        pytest.skip("no container tool that works")
    base = subprocess.run([tool, "pull", "python:3.12-slim"], capture_output=True)
    if base.returncode:
        pytest.skip("the base image cannot be fetched")
    for stage in ("client", "server"):
        command = [tool, "build", "-f", str(CONTAINERFILE), "--target", stage, str(ROOT)]
        built = subprocess.run(command, capture_output=True, text=True)
        assert built.returncode == 0, built.stderr


def test_trimming_removes_what_is_unused_and_nothing_else(tmp_path: Path) -> None:
    torch = tmp_path / "torch"
    used = ("__init__.py", "lib/libtorch.so", "bin/torch_shm_manager", "nn/test/kept.py")
    for name in (*used, "bin/protoc", "test/deep/a_test", "include/ATen/a.h", "share/cmake/x"):
        (torch / name).parent.mkdir(parents=True, exist_ok=True)
        (torch / name).write_bytes(b"x" * 100)
    (torch / "bin" / "link").symlink_to("protoc")
    link = (torch / "bin" / "link").lstat().st_size
    assert trim_torch(torch) == 400 + link
    assert {str(path.relative_to(torch)) for path in torch.rglob("*") if path.is_file()} == set(used)
    assert size_of(torch) == 400
