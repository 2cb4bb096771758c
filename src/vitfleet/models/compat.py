"""Makes timm importable where torchvision's compiled operators do not fit the installed torch.

torchvision's published wheels are built for CUDA. Beside a CPU build of torch their operators do not load
and ``import torchvision``, so ``import timm``, fails with ``operator torchvision::nms does not exist``.
vitfleet uses none of those operators: declaring the two that are looked up at import is enough.
Where torchvision is healthy nothing happens.
"""

import sys

import torch

# Kept alive for the process: a Library withdraws its operators when it is collected.
_declared: torch.library.Library | None = None


def ensure_torchvision() -> None:
    """Import torchvision, declaring its missing operators first if that is what it takes."""
    global _declared
    try:
        import torchvision
    except RuntimeError as error:
        if "torchvision::" not in str(error) or _declared is not None:
            raise
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        _declared = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for name in ("nms", "qnms"):
            _declared.define(  # type: ignore[no-untyped-call]
                f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
        import torchvision  # noqa: F401
