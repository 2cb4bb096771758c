"""Load pretrained weights from a safetensors file into a model of other sizes."""

from __future__ import annotations

from contextlib import nullcontext
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from vitfleet.config.train import SHIPPED_WEIGHTS
from vitfleet.errors import ConfigError
from vitfleet.models.families.vit import TIMM_VIT, PatchEmbed, PlainViT
from vitfleet.models.parts import is_instance_of

HEAD_PREFIXES = ("head.", "head_dist.")
# Weights of a file that a model need not have.
OPTIONAL_PREFIXES = (*HEAD_PREFIXES, "pre_logits.")


def load_pretrained(vit: nn.Module, weights: str, name: str) -> None:
    """Load weights from a safetensors file, from ``<folder>/<name>.safetensors``, or those that are shipped.

    Position embeddings are interpolated to the model's grid, patch embeddings resampled to its patch size, colour
    channels summed or repeated to its number of channels. A head for another number of classes keeps its initial
    weights. Any other weight that is missing or has another shape is an error.
    """
    shipped = files("vitfleet") / "weights" / f"{weights}.safetensors"
    with as_file(shipped) if weights in SHIPPED_WEIGHTS else nullcontext(Path(weights)) as path:
        given = _read_file(path, name)
    try:
        given = _resize(given, vit)
    except (RuntimeError, ValueError, AssertionError, NotImplementedError) as error:
        raise ConfigError("model.weights", weights, f"does not fit model.name = {name!r} ({error})") from error
    state = vit.state_dict()
    expected = {key: tensor for key, tensor in state.items() if tensor.is_floating_point()}
    head = {key for key in expected if key.startswith(HEAD_PREFIXES)}
    if any(key in given and given[key].shape != expected[key].shape for key in head):
        given = {key: tensor for key, tensor in given.items() if key not in head}
    wrong = [
        key
        for key, tensor in expected.items()
        if key not in head and (key not in given or given[key].shape != tensor.shape)
    ]
    if wrong:
        remedy = f"{len(wrong)} weights are missing or of another shape, the first is {wrong[0]}"
        raise ConfigError("model.weights", weights, f"does not fit model.name = {name!r}: {remedy}")
    surplus = [key for key in given if key not in state and not key.startswith(OPTIONAL_PREFIXES)]
    if surplus:
        raise ConfigError(
            "model.weights",
            weights,
            f"has {len(surplus)} weights that model.name = {name!r} with these sizes does not have, "
            f"the first is {surplus[0]}; leave out model.depth and other sizes",
        )
    vit.load_state_dict({key: tensor for key, tensor in given.items() if key in expected}, strict=False)


def _read_file(path: Path, name: str) -> dict[str, Tensor]:
    file = path / f"{name}.safetensors" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError("model.weights", str(path), f"there is no such file ({file}); name a .safetensors file")
    try:
        return load_file(file)
    except Exception as error:  # safetensors raises a different type for each kind of damage
        raise ConfigError("model.weights", str(path), f"is not a readable safetensors file ({error})") from error


def _resize(weights: dict[str, Tensor], vit: Any) -> dict[str, Tensor]:
    """Fit position and patch embeddings to the sizes of a plain ViT; other families are left as they are."""
    resizable = is_instance_of(vit, TIMM_VIT) or (isinstance(vit, PlainViT) and isinstance(vit.patch_embed, PatchEmbed))
    if not resizable or _fits(weights, vit):
        return weights
    from timm.models import adapt_input_conv
    from timm.models.vision_transformer import checkpoint_filter_fn

    resized: dict[str, Tensor] = checkpoint_filter_fn(weights, vit)
    patch_kernel = "patch_embed.proj.weight"
    if patch_kernel in resized:
        resized[patch_kernel] = adapt_input_conv(vit.patch_embed.proj.in_channels, resized[patch_kernel])
    return resized


def _fits(weights: dict[str, Tensor], vit: nn.Module) -> bool:
    """Whether weights have the names and shapes of a model's; its head may have others."""
    own, given = (
        {key: tensor.shape for key, tensor in tensors.items() if not key.startswith(HEAD_PREFIXES)}
        for tensors in (vit.state_dict(), weights)
    )
    return own == given
