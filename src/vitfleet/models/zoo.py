"""Build a model by its name: a registered family, or a vision transformer of timm."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

import vitfleet.models.families  # noqa: F401  (registers the built-in families)
from vitfleet.config.registry import MODELS
from vitfleet.config.schema import ModelConfig
from vitfleet.config.train import HUB_WEIGHTS
from vitfleet.errors import ConfigError, UserError
from vitfleet.models.families.request import ModelRequest, check_patch_size, timm_required_for
from vitfleet.models.families.vit import NAMED_VITS, build_named_vit
from vitfleet.models.net import Net, make_net
from vitfleet.models.pretrained import load_pretrained
from vitfleet.randomness import Address, Purpose

DEFAULT_TIMM_SIZE = 224
DEFAULT_NORMALISATION = (0.5, 0.5, 0.5)  # mean and std of models that declare none: maps 0…1 to −1…1


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
    from timm.layers import PatchEmbed

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
    if isinstance(getattr(vit, "patch_embed", None), PatchEmbed):
        check_patch_size(image_size, vit.patch_embed.proj.kernel_size[0])
    return vit, image_size


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
