"""Makes timm importable if torchvision's compiled operators do not fit the installed torch.

torchvision's published wheels are built for CUDA. With a CPU build of torch their operators do not load, and
``import torchvision`` (hence ``import timm``) fails with ``operator torchvision::nms does not exist``. vitfleet uses
none of those operators: it is enough to declare the two that are looked up at import. With a working torchvision this
module does nothing.
"""

import sys

import torch

# Kept alive for the process: a Library removes its operators when it is garbage-collected.
_library: torch.library.Library | None = None


def ensure_torchvision() -> None:
    """Import torchvision; declare its missing operators first if necessary."""
    global _library
    try:
        import torchvision
    except RuntimeError as error:
        if "torchvision::" not in str(error) or _library is not None:
            raise
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        _library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for name in ("nms", "qnms"):
            _library.define(  # type: ignore[no-untyped-call]
                f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
        import torchvision  # noqa: F401
