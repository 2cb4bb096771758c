"""One name, one ViT: plain ones of any size, and timm's by their names, with or without pretrained weights."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import timm
import torch
from safetensors.torch import load_file
from timm.models import adapt_input_conv
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from vitfleet.config.registry import MODELS, NoParams, register_model, validate_params
from vitfleet.config.schema import ModelConfig
from vitfleet.errors import ConfigError, UserError
from vitfleet.models.anatomy import is_plain_vit
from vitfleet.models.net import Net, wrap_timm_model
from vitfleet.randomness import Address, Purpose

PLAIN = "vit"
PLAIN_PATCH = 4
PLAIN_DEPTH = 4
MOST_PATCHES = 4096  # attention costs their square: beyond this it is a mistake, not a model
HALF = 0.5  # normalisation of models that do not say otherwise: 0…1 becomes −1…1


@dataclass(frozen=True)
class ModelRequest:
    """What a registered model is built for.

    Attributes
    ----------
    config
        The table ``model``.
    classes, channels, data_side
        The data's classes, colour channels and image side in pixels.
    """

    config: ModelConfig
    classes: int
    channels: int
    data_side: int


def build(
    config: ModelConfig,
    classes: int,
    channels: int,
    data_side: int,
    seed: int,
    adapt: Callable[[nn.Module], None] | None = None,
) -> Net:
    """Build the model that a configuration names.

    Parameters
    ----------
    classes, channels, data_side
        What the data has: the head's width, colour channels, pixels a side (the default input size of a
        plain ViT; a timm model keeps its own).
    seed
        Addresses the initial weights.
    adapt
        Adds to the architecture what a method needs in it.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(Address(seed, Purpose.INIT).torch_seed())
        entry = MODELS.get(config.name)
        if entry is not None:
            params = validate_params(MODELS, config.name, config.params, "model.params")
            vit, side = entry.target(params, ModelRequest(config, classes, channels, data_side))
        else:
            vit, side = _from_timm(config, classes, channels)
        if config.weights and config.weights != "hub":
            load_pretrained(vit, Path(config.weights), config.name)
        if adapt is not None:  # last: what it adds leaves the model's own initial weights as they were
            adapt(vit)
    pretrained = getattr(vit, "pretrained_cfg", None) or {}
    mean = tuple(pretrained.get("mean", (HALF,) * 3))[:channels]
    std = tuple(pretrained.get("std", (HALF,) * 3))[:channels]
    try:
        net = wrap_timm_model(vit.requires_grad_(False), side, mean, std)
    except (TypeError, AttributeError) as error:
        raise ConfigError(
            "model.name", config.name, f"is not a vision transformer whose layers vitfleet can find ({error})"
        ) from None
    if config.depth is not None and len(getattr(vit, "blocks", ())) != config.depth:  # some families ignore it
        raise ConfigError("model.depth", config.depth, f"cannot be set for {config.name}; leave it out")
    return net


@register_model(PLAIN)
def plain_vit(params: NoParams, request: ModelRequest) -> tuple[nn.Module, int]:
    """Build a plain ViT of the sizes in the table ``model``."""
    config = request.config
    if config.weights == "hub":
        raise ConfigError("model.weights", "hub", "needs a timm name in model.name, such as vit_tiny_patch16_224")
    side = config.image_size or request.data_side
    patch = config.patch_size or PLAIN_PATCH
    _check_patch(side, patch)
    vit = VisionTransformer(
        img_size=side,
        patch_size=patch,
        in_chans=request.channels,
        num_classes=request.classes,
        embed_dim=config.dim,
        depth=config.depth or PLAIN_DEPTH,
        num_heads=config.heads,
        mlp_ratio=config.mlp_ratio,
    )
    return vit, side


def _from_timm(config: ModelConfig, classes: int, channels: int) -> tuple[nn.Module, int]:
    if not timm.is_model(config.name):
        close = difflib.get_close_matches(config.name, [PLAIN, *timm.list_models("*it*")], n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "`vit`, or a name from timm.list_models()"
        raise ConfigError("model.name", config.name, f"is not a model; {hint}")
    native = timm.models.get_pretrained_cfg(config.name)
    side = config.image_size or (native.input_size[-1] if native else 224)
    sizes = {"img_size": config.image_size, "patch_size": config.patch_size, "depth": config.depth}
    given = {key: value for key, value in sizes.items() if value is not None}
    try:
        vit = timm.create_model(
            config.name,
            pretrained=config.weights == "hub",
            num_classes=classes,
            in_chans=channels,
            # Stochastic depth would draw from torch's global generator: no draw of a run may be unaddressed.
            drop_path_rate=0.0,
            **given,
        )
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError(f"model.name = {config.name!r}: timm cannot build it with {given}: {error}") from error
    except (OSError, RuntimeError) as error:
        if config.weights != "hub":
            raise
        raise UserError(
            f"model.weights = 'hub': the weights of {config.name} cannot be had ({error}); "
            "give a .safetensors file instead"
        ) from error
    if is_plain_vit(vit):
        _check_patch(side, vit.patch_embed.proj.kernel_size[0])
    return vit, side


def _check_patch(side: int, patch: int) -> None:
    if (side // patch) ** 2 > MOST_PATCHES:
        raise ConfigError(
            "model.patch_size",
            patch,
            f"cuts an image of {side} pixels a side into {(side // patch) ** 2:,} patches, more than {MOST_PATCHES:,}; "
            "take larger patches or a smaller model.image_size",
        )
    if side % patch:
        raise ConfigError("model.patch_size", patch, f"must divide the image's side, {side} pixels")


def load_pretrained(vit: nn.Module, path: Path, name: str) -> None:
    """Load weights from a safetensors file, or from ``<folder>/<name>.safetensors``.

    Positions are interpolated to the model's grid, patches resampled to its patch size, colour channels
    summed or repeated to its input. A head of another width stays as it was initialised; any other
    weight that is missing or does not fit is an error.
    """
    file = path / f"{name}.safetensors" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError("model.weights", str(path), f"there is no such file ({file}); name a .safetensors file")
    try:
        given = load_file(file)
    except Exception as error:  # safetensors raises a type of its own per kind of damage
        raise ConfigError("model.weights", str(path), f"is not a readable safetensors file ({error})") from error
    own = {n: tensor for n, tensor in vit.state_dict().items() if tensor.is_floating_point()}
    try:
        fitted = _fit(given, vit)
    except (RuntimeError, ValueError, AssertionError, NotImplementedError) as error:
        raise ConfigError("model.weights", str(path), f"does not fit model.name = {name!r} ({error})") from error
    head = {n for n in own if n.startswith(("head.", "head_dist."))}
    if any(n in fitted and fitted[n].shape != own[n].shape for n in head):
        fitted = {n: tensor for n, tensor in fitted.items() if n not in head}
    wrong = [n for n in own if n not in head and (n not in fitted or fitted[n].shape != own[n].shape)]
    if wrong:
        raise ConfigError(
            "model.weights",
            str(path),
            f"does not fit model.name = {name!r}: {len(wrong)} weights are missing or of another shape, "
            f"the first is {wrong[0]}",
        )
    surplus = [
        n for n in fitted if n not in vit.state_dict() and not n.startswith(("head.", "head_dist.", "pre_logits."))
    ]
    if surplus:
        raise ConfigError(
            "model.weights",
            str(path),
            f"has {len(surplus)} weights that model.name = {name!r} with these sizes has no place for, "
            f"the first is {surplus[0]}; leave model.depth and the like out",
        )
    vit.load_state_dict({n: tensor for n, tensor in fitted.items() if n in own}, strict=False)


def _fit(given: dict[str, Tensor], vit: nn.Module) -> dict[str, Tensor]:
    if not isinstance(vit, VisionTransformer):
        return given
    fitted: dict[str, Tensor] = checkpoint_filter_fn(given, vit)
    stem = "patch_embed.proj.weight"
    if stem in fitted:
        fitted[stem] = adapt_input_conv(vit.patch_embed.proj.in_channels, fitted[stem])
    return fitted
