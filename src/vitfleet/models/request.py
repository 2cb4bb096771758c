"""What the builder of a registered model is given, and checks that several builders share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from vitfleet.config.schema import ModelConfig
from vitfleet.config.train import HUB_WEIGHTS
from vitfleet.errors import ConfigError

MAX_PATCHES = 4096  # attention costs their square: more is a mistake
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
    """Require patches that cut an image without remainder, and not into too many.

    Raises
    ------
    ConfigError
        Names the key, its value and the remedy.
    """
    num_patches = (image_size // patch_size) ** 2
    if num_patches > MAX_PATCHES:
        raise ConfigError(
            "model.patch_size",
            patch_size,
            f"cuts an image of {image_size} x {image_size} pixels into {num_patches:,} patches, more than "
            f"{MAX_PATCHES:,}; choose larger patches or a smaller model.image_size, such as "
            f"{fewer_patches(image_size)}",
        )
    if image_size % patch_size:
        raise ConfigError(
            "model.patch_size",
            patch_size,
            f"must divide the image size, {image_size} pixels; model.image_size may be another one, such as "
            f"{fewer_patches(image_size)}",
        )


def fewer_patches(image_size: int) -> str:
    """Return options with which an image of this size is cut into 8 x 8 patches: at most 64 pixels wide."""
    size = next((side for side in (64, 32, 16) if side <= image_size), USUAL_GRID)
    return f"-o model.image_size={size} -o model.patch_size={size // USUAL_GRID}"


@contextmanager
def timm_required_for(key: str, value: str) -> Iterator[None]:
    """Turn the absence of timm, which a device need not have, into an error that says what needs it.

    Raises
    ------
    ConfigError
        Names the key, its value and the remedy.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("timm", "torchvision"):
            raise
        raise ConfigError(key, value, "needs timm, which is not installed: pip install 'vitfleet[timm]'") from error


def refuse_hub_weights(request: ModelRequest) -> None:
    """Refuse to download weights for a model that is not one of timm's.

    Raises
    ------
    ConfigError
        Names the key, its value and the remedy.
    """
    if request.config.weights == HUB_WEIGHTS:
        raise ConfigError("model.weights", HUB_WEIGHTS, "needs a timm name in model.name, such as vit_tiny_patch16_224")
