"""Makes torchvision, and timm with it, importable where its compiled operators do not fit the installed torch.

torchvision's published wheels are built for CUDA. With a CPU build of torch their operators do not load, and
``import torchvision`` (hence ``import timm``) fails with ``operator torchvision::nms does not exist``. Models need none
of those operators: it is enough to declare the two that are looked up at import. That is done when torchvision is
imported, by whomever, and only if its own import fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE = "torchvision"
OPERATORS = ("nms", "qnms")

# Kept alive for the process: a Library removes its operators when it is garbage-collected.
_library: Any = None


class TorchvisionFinder:
    """Finds torchvision as the other finders do, and repeats its import with the operators declared if it fails."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the specification of torchvision, and of no other module."""
        if fullname != PACKAGE:
            return None
        found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            setattr(spec.loader, "exec_module", partial(_execute, spec.loader.exec_module))  # noqa: B010
        return spec


def install_finder() -> None:
    """Let every later import of torchvision in this process go through :class:`TorchvisionFinder`."""
    if not any(isinstance(finder, TorchvisionFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, TorchvisionFinder())


def _execute(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    try:
        execute(module)
    except RuntimeError as error:
        if f"{PACKAGE}::" not in str(error) or _library is not None:
            raise
        for name in [name for name in sys.modules if name.startswith(f"{PACKAGE}.")]:
            del sys.modules[name]
        _declare_operators()
        execute(module)


def _declare_operators() -> None:
    global _library
    import torch

    _library = torch.library.Library(PACKAGE, "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in OPERATORS:
        _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
