"""Every package that a client needs exists as a wheel for arm64 boards: asked of the package index, on any machine.

pip chooses wheels for another platform, but evaluates conditions such as ``platform_machine == 'x86_64'`` for its own.
So the packages are found here, by the metadata of those that are installed, and pip is asked for each in its version.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
BOARD = {
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_machine": "aarch64",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "python_full_version": "3.11.9",
    "python_version": "3.11",
    "sys_platform": "linux",
}
# Those of Debian 12 (glibc 2.36), as 64-bit Raspberry Pi OS has; pip does not add older ones by itself.
PLATFORMS = ("manylinux2014_aarch64", *(f"manylinux_2_{minor}_aarch64" for minor in range(17, 37)))
UNWANTED = {"pandas", "pyarrow", "timm", "torchvision", "datasets", "matplotlib", "scipy"}


def client_requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [Requirement(text) for text in (*project["dependencies"], *project["optional-dependencies"]["client"])]


def applies(requirement: Requirement, extras: set[str]) -> bool:
    """Whether a requirement holds on a board, for a package with some of its extras."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({**BOARD, "extra": extra}) for extra in extras or {""})


def is_cuda(requirement: Requirement) -> bool:
    """Whether it is a part of CUDA, which torch's default package for Linux requires and its CPU package does not."""
    return requirement.name.startswith(("nvidia-", "cuda-", "triton"))


def closure(requirements: list[Requirement]) -> dict[str, str]:
    """Return all packages that the requirements need on a board, each as a requirement of its installed version."""
    found: dict[str, str] = {}
    seen: dict[str, set[str]] = {}
    open_ones = list(requirements)
    while open_ones:
        requirement = open_ones.pop()
        name = canonicalize_name(requirement.name)
        if name in seen and requirement.extras <= seen[name]:
            continue
        extras = seen.setdefault(name, set())
        extras |= requirement.extras
        try:
            installed = distribution(name)
        except PackageNotFoundError:  # a package for boards only
            found[name] = str(requirement).split(";")[0]
            continue
        found[name] = f"{name}=={Version(installed.version).public}"
        needed = [Requirement(text) for text in installed.requires or []]
        open_ones += [part for part in needed if applies(part, extras) and not is_cuda(part)]
    return found


def pip(folder: Path, *requirements: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
    command += ["--target", str(folder / "target"), "--only-binary=:all:", "--report", str(folder / "report")]
    command += [part for platform in PLATFORMS for part in ("--platform", platform)]
    command += ["--python-version", "3.11", "--implementation", "cp", *requirements]
    return subprocess.run(command, capture_output=True, text=True, timeout=1200)


def test_conditions_are_those_of_a_board() -> None:
    assert applies(Requirement("a; platform_machine == 'aarch64'"), set())
    assert not applies(Requirement("a; platform_machine == 'x86_64'"), set())
    assert not applies(Requirement("a; extra == 'x'"), set())
    assert applies(Requirement("a; extra == 'x'"), {"x"})


def test_client_needs_neither_torchvision_nor_pyarrow_nor_pandas() -> None:
    packages = closure(client_requirements())
    assert {"torch", "pillow", "flwr", "grpcio", "cryptography"} <= packages.keys()
    assert not packages.keys() & UNWANTED


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_every_package_of_a_client_has_a_wheel_for_arm64(tmp_path: Path) -> None:
    if pip(tmp_path, "pip").returncode:
        pytest.skip("no package index can be reached")
    packages = closure(client_requirements())
    result = pip(tmp_path, *packages.values())
    assert result.returncode == 0, f"no wheels for arm64: {result.stderr[-2000:]}"
    report = json.loads((tmp_path / "report").read_text())["install"]
    files = {canonicalize_name(part["metadata"]["name"]): part["download_info"]["url"] for part in report}
    assert files.keys() == packages.keys()
    for name, file in files.items():
        assert file.endswith((f"_{BOARD['platform_machine']}.whl", "-none-any.whl")), f"{name}: {file}"
