"""Whoever imports torchvision after vitfleet can, also where its compiled operators do not fit the installed torch.

The packages here are made: which torchvision is installed does not matter.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# What torchvision does at import where its compiled operators did not load.
UNFIT = """
import torch
from torchvision import first
torch._C._dispatch_has_kernel_for_dispatch_key("torchvision::nms", "Meta")
value = 3
"""
FIT = """
import torch
library = torch.library.Library("torchvision", "DEF")
library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
value = 3
"""


def import_made(folder: Path, source: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process in which torchvision is a made package."""
    package = folder / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(source)
    (package / "first.py").write_text("count = 1")
    path = [str(folder), *sys.path]
    command = [sys.executable, "-S", "-c", f"import sys; sys.path[:] = {path!r}\n{code}"]  # -S: without .pth files
    return subprocess.run(command, capture_output=True, text=True)


IMPORT = """
try:
    import torchvision
except RuntimeError as error:
    print(error)
import vitfleet
import torchvision, torch
print(torchvision.value, torch.ops.torchvision.nms)
"""


def test_unfit_torchvision_is_imported_after_vitfleet_only(tmp_path: Path) -> None:
    before, after = import_made(tmp_path, UNFIT, IMPORT).stdout.splitlines()
    assert before == "operator torchvision::nms does not exist"
    assert after == "3 torchvision.nms"


def test_torchvision_that_fits_is_left_alone(tmp_path: Path) -> None:
    assert import_made(tmp_path, FIT, IMPORT).stdout.splitlines() == ["3 torchvision.nms"]


def test_other_errors_are_not_hidden(tmp_path: Path) -> None:
    result = import_made(tmp_path, "raise RuntimeError('another')", "import vitfleet\nimport torchvision")
    assert "RuntimeError: another" in result.stderr


def test_looking_for_torchvision_does_not_import_it(tmp_path: Path) -> None:
    code = "import vitfleet, sys\nfrom importlib.util import find_spec\n"
    code += "print(find_spec('torchvision').name, find_spec('torch').name, 'torch' in sys.modules)"
    assert import_made(tmp_path, UNFIT, code).stdout.split() == ["torchvision", "torch", "False"]
