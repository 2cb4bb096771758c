"""Build a model by its name, one of a registered family or of timm, with the pretrained weights of a file."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

import vitfleet.models.families  # noqa: F401  (registers the built-in families)
from vitfleet.config.registry import MODELS
from vitfleet.config.schema import ModelConfig
from vitfleet.config.train import HUB_WEIGHTS, SHIPPED_WEIGHTS
from vitfleet.errors import ConfigError, UserError
from vitfleet.models.families.request import ModelRequest, check_patch_size, timm_required_for
from vitfleet.models.families.vit import NAMED_VITS, TIMM_VIT, PatchEmbed, PlainViT, build_named_vit
from vitfleet.models.net import Net, make_net
from vitfleet.models.parts import is_instance_of
from vitfleet.randomness import Address, Purpose

DEFAULT_TIMM_SIZE = 224
DEFAULT_NORMALISATION = (0.5, 0.5, 0.5)  # mean and std of models that declare none: maps 0…1 to −1…1
HEAD_PREFIXES = ("head.", "head_dist.")
# Weights of a file that a model need not have.
OPTIONAL_PREFIXES = (*HEAD_PREFIXES, "pre_logits.")


def build_model(
    config: ModelConfig,
    num_classes: int,
    channels: int,
    data_image_size: int,
    seed: int,
    adapt: Callable[[nn.Module], None] | None = None,
) -> Net:
    """Build the model that a configuration names.

    Parameters
    ----------
    num_classes, channels, data_image_size
        Number of classes and colour channels of the data, and the height and width of its images in pixels, which is
        the default input size of a plain ViT. A timm model has its own default.
    seed
        Seed of the initial weights.
    adapt
        Adds the parts that a method needs to the architecture.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(Address(seed, Purpose.INIT).torch_seed())
        request = ModelRequest(config, num_classes, channels, data_image_size)
        entry = MODELS.get(config.name)
        with timm_required_for("model.name", config.name):
            if entry is not None:
                params = MODELS.validate(config.name, config.params)
                vit, image_size = entry.target(params, request)
            elif config.name in NAMED_VITS and config.weights != HUB_WEIGHTS:
                vit, image_size = build_named_vit(request)
            else:
                vit, image_size = _build_timm_model(request)
        if config.weights and config.weights != HUB_WEIGHTS:
            with timm_required_for("model.weights", config.weights):  # to resize them
                load_pretrained(vit, config.weights, config.name)
        if adapt is not None:  # last, so that the initial weights of the model itself do not depend on it
            adapt(vit)
    declared = getattr(vit, "pretrained_cfg", None) or {}
    mean = tuple(declared.get("mean", DEFAULT_NORMALISATION))[:channels]
    std = tuple(declared.get("std", DEFAULT_NORMALISATION))[:channels]
    try:
        net = make_net(vit.requires_grad_(False), image_size, mean, std)
    except (TypeError, AttributeError) as error:
        raise ConfigError(
            "model.name", config.name, f"is not a vision transformer whose blocks vitfleet can find ({error})"
        ) from None
    if config.depth is not None and len(getattr(vit, "blocks", ())) != config.depth:  # some families ignore it
        raise ConfigError("model.depth", config.depth, f"cannot be set for {config.name}; leave it out")
    return net


def _build_timm_model(request: ModelRequest) -> tuple[nn.Module, int]:
    import timm
    from timm.layers import PatchEmbed as TimmPatchEmbed

    config = request.config
    if not timm.is_model(config.name):
        close = difflib.get_close_matches(config.name, [*MODELS.names(), *timm.list_models("*it*")], n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "`vit`, or a name from timm.list_models()"
        raise ConfigError("model.name", config.name, f"is not a model; {hint}")
    declared = timm.models.get_pretrained_cfg(config.name)
    image_size = config.image_size or (declared.input_size[-1] if declared else DEFAULT_TIMM_SIZE)
    sizes = {"img_size": config.image_size, "patch_size": config.patch_size, "depth": config.depth}
    arguments = {key: value for key, value in sizes.items() if value is not None}
    try:
        vit = timm.create_model(
            config.name,
            pretrained=config.weights == HUB_WEIGHTS,
            num_classes=request.num_classes,
            in_chans=request.channels,
            # Stochastic depth would draw from torch's global generator, but every draw of a run has an address.
            drop_path_rate=0.0,
            **arguments,
        )
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError(f"model.name = {config.name!r}: timm cannot build it with {arguments}: {error}") from error
    except (OSError, RuntimeError) as error:
        if config.weights != HUB_WEIGHTS:
            raise
        raise UserError(
            f"model.weights = '{HUB_WEIGHTS}': the weights of {config.name} cannot be downloaded ({error}); "
            "give a .safetensors file instead"
        ) from error
    if isinstance(getattr(vit, "patch_embed", None), TimmPatchEmbed):
        check_patch_size(image_size, vit.patch_embed.proj.kernel_size[0])
    return vit, image_size


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


@contextmanager
def weights_without_values() -> Iterator[None]:
    """Put the parameters of all models that are built inside on the device ``meta``.

    Buffers keep their values: some families compute with them, such as index tables of relative positions.
    """

    def without_values(module: nn.Module, name: str, weight: nn.Parameter | None) -> nn.Parameter | None:
        if weight is None or weight.is_meta:  # one that two modules share stays one
            return None
        return nn.Parameter(weight.to("meta"), requires_grad=weight.requires_grad)

    # torch declares that a hook returns nothing; what it returns takes the place of the parameter.
    handle = register_module_parameter_registration_hook(without_values)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()
