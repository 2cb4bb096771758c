"""Environments as the documentation installs them: a package that a page does not name is not there.

Nothing is downloaded: an environment links to the packages that this one has.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
SCRIPT = "#!{python}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"


def make_environment(folder: Path, *requirements: str) -> Path:
    """Make an environment with what pip would install for these requirements; return its folder of commands.

    Parameters
    ----------
    requirements
        As in ``pip install``, such as ``vitfleet[sim]``. What is not installed here is left out.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for found in _with_dependencies(requirements):
        for name in {file.parts[0] for file in found.files or () if not file.is_absolute() and file.parts[0] != ".."}:
            if not (packages / name).exists() and not name.startswith("__editable__"):
                (packages / name).symlink_to(Path(str(found.locate_file(name))))
        for entry in found.entry_points:
            if entry.group == "console_scripts":
                script = folder / "bin" / entry.name
                script.write_text(
                    SCRIPT.format(python=folder / "bin" / "python", module=entry.module, function=entry.attr)
                )
                script.chmod(0o755)
    (packages / "vitfleet-source.pth").write_text(f"{ROOT / 'src'}\n")
    return folder / "bin"


def _with_dependencies(requirements: tuple[str, ...]) -> Iterator[Distribution]:
    """Yield the distributions that pip would install, as far as they are installed here."""
    pending, seen = [Requirement(text) for text in requirements], set[tuple[str, str]]()
    yielded = set[str]()
    while pending:
        requirement = pending.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            try:
                found = distribution(name)
            except PackageNotFoundError:
                continue
            if name not in yielded:
                yielded.add(name)
                yield found
            pending += [
                needed
                for needed in map(Requirement, found.requires or ())
                if needed.marker is None or needed.marker.evaluate({"extra": extra})
            ]
