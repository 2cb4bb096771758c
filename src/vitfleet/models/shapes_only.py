"""Models whose weights have shapes but no values, for costs: initialising the weights of a ViT-B takes a second."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook


@contextmanager
def weights_without_values() -> Iterator[None]:
    """Put the parameters of all models that are built inside on the device ``meta``.

    Buffers keep their values: some families compute with them, such as index tables of relative positions.
    """
    # torch declares that a hook returns nothing; what it returns takes the place of the parameter.
    handle = register_module_parameter_registration_hook(_without_values)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def _without_values(module: nn.Module, name: str, weight: nn.Parameter | None) -> nn.Parameter | None:
    if weight is None or weight.is_meta:  # one that two modules share stays one
        return None
    return nn.Parameter(weight.to("meta"), requires_grad=weight.requires_grad)
