"""What the builder of a registered model is given; sizes and checks that several builders share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vitfleet.config.base import Table
from vitfleet.config.schema import ModelConfig
from vitfleet.config.train import HUB_WEIGHTS
from vitfleet.errors import ConfigError

MAX_PATCHES = 4096  # attention costs their square: more is a mistake
SMALL_IMAGE = 96  # pixels: smaller images get a family's small configuration
USUAL_GRID = 8  # patches along each side of an image that small models train on in reasonable time


@dataclass(frozen=True)
class ModelRequest:
    """Arguments of a registered model's constructor.

    Attributes
    ----------
    config
        The table ``model``.
    num_classes, channels, data_image_size
        Number of classes and colour channels of the data, and the height and width of its images in pixels.
    """

    config: ModelConfig
    num_classes: int
    channels: int
    data_image_size: int

    @property
    def image_size(self) -> int:
        """The model's input size: that of the configuration, or else of the data."""
        return self.config.image_size or self.data_image_size


def check_patch_size(image_size: int, patch_size: int) -> None:
    """Require patches that cut an image without remainder, and not into too many."""
    num_patches = (image_size // patch_size) ** 2
    if num_patches > MAX_PATCHES:
        wrong = (
            f"cuts an image of {image_size} x {image_size} pixels into {num_patches:,} patches, more than "
            f"{MAX_PATCHES:,}; choose larger patches or a smaller model.image_size"
        )
    elif image_size % patch_size:
        wrong = f"must divide the image size, {image_size} pixels; model.image_size may be another one"
    else:
        return
    raise ConfigError("model.patch_size", patch_size, f"{wrong}, such as {fewer_patches(image_size)}")


def fewer_patches(image_size: int) -> str:
    """Return options with which an image of this size is cut into 8 x 8 patches: at most 64 pixels wide."""
    size = next((size for size in (64, 32, 16) if size <= image_size), USUAL_GRID)
    return f"-o model.image_size={size} -o model.patch_size={size // USUAL_GRID}"


@contextmanager
def timm_required_for(key: str, value: str) -> Iterator[None]:
    """Say what needs timm, if it is not installed: a device need not have it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("timm", "torchvision"):
            raise
        raise ConfigError(key, value, "needs timm, which is not installed: pip install 'vitfleet[timm]'") from error


def refuse_hub_weights(request: ModelRequest) -> None:
    """Refuse to download weights for a model that is not one of timm's."""
    if request.config.weights == HUB_WEIGHTS:
        raise ConfigError("model.weights", HUB_WEIGHTS, "needs a timm name in model.name, such as vit_tiny_patch16_224")


def choose_sizes(params: Table, image_size: int, small: dict[str, Any], standard: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes for an image size; a parameter that is set takes the place of its default."""
    chosen = {name: value for name, value in params.model_dump().items() if value is not None}
    return {**(small if image_size < SMALL_IMAGE else standard), **chosen}


def check_stages(sizes: dict[str, Any], *names: str) -> None:
    """Require one value per stage in each of the named sizes."""
    stages = len(sizes[names[0]])
    for name in names[1:]:
        if len(sizes[name]) != stages:
            raise ConfigError(
                f"model.params.{name}",
                list(sizes[name]),
                f"must have one value per stage, as model.params.{names[0]} = {list(sizes[names[0]])} has",
            )


def check_divides(heads: int, dim: int) -> None:
    """Require a width that can be divided among the attention heads."""
    if dim % heads:
        raise ConfigError("model.params.heads", heads, f"must divide the width, {dim}")
