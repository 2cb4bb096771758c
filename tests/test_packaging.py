"""The wheel holds the whole package and works without the repository; one version everywhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import vitfleet

ROOT = Path(__file__).parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel as a user does, in a copy of the source; without isolation nothing is downloaded."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", copy / "src", ignore=ignore)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", str(copy)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-2000:]
    return next((copy / "dist").glob("*.whl"))


def test_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    source = ROOT / "src"
    files = {
        path.relative_to(source).as_posix()
        for path in (source / "vitfleet").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("vitfleet/")}
    assert packed == files


def test_command_of_an_installed_wheel_works(wheel: Path, tmp_path: Path) -> None:
    """Installed without its dependencies, which this environment has."""
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(site)]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    code = "import vitfleet; print(vitfleet.__version__, vitfleet.__file__)"
    for command, expected in (
        ([sys.executable, "-c", code], f"{VERSION} {site}"),
        ([str(site / "bin" / "vitfleet"), "presets"], "eftvit-digits"),
        ([str(site / "bin" / "vitfleet"), "--help"], "Usage"),
    ):
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        assert expected in result.stdout


def test_one_version_everywhere() -> None:
    assert vitfleet.__version__ == VERSION
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert newest[1] in (VERSION, "Unreleased:")
