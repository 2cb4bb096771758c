"""What a device checks before features of its images leave it.

A server chooses the local module that makes the features. One that transforms next to nothing, and is not trained to,
would send the images themselves: then a linear map turns features back into pixels. That is found here. What cannot be
found here is a module that was made to be inverted in another way: features of any local module tell much of the images
(SECURITY.md has figures). An owner who has the published pretrained weights can require the local module to be near
these.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from vitfleet.config.schema import Config
from vitfleet.data.preprocess import Preprocess
from vitfleet.errors import RefusedRequestError
from vitfleet.fleet.build import build_net
from vitfleet.flower.transport.payloads import RunSpec
from vitfleet.message import Tensors
from vitfleet.models.net import Net

PIXELS = 256  # values of a pixel
LEAST_ERROR = 1e-9  # of pixels that a linear map makes from features, as a share of their variance
FURTHEST = 0.05  # distance of a local module from the published one, as a share of its length


def check_transforms(net: Net, weights: Tensors, split: int, preprocess: Preprocess) -> None:
    """Refuse a local module from whose features a linear map makes the pixels: it is fitted to images of noise.

    Parameters
    ----------
    weights
        Those of the local module, as they are after the round: the embedding and the first ``split`` blocks.
    """
    device = next(iter(weights.values())).device
    # More patches than a feature has numbers, for the map; as many again to test it.
    count = math.ceil(4 * net.embed_dim / net.num_patches) + 2
    generator = torch.Generator().manual_seed(0)
    shape = (2 * count, len(net.mean), net.image_size, net.image_size)
    with torch.no_grad():
        images = preprocess(torch.randint(PIXELS, shape, generator=generator, dtype=torch.uint8).to(device))
        features = net.forward_to(weights, images, None, split)[:, net.num_prefix_tokens :].double().cpu()
        pixels = _patches(images.double().cpu(), net)
        # At each position by itself a constant is taken off: that of the position's embedding.
        inputs, targets = (values - values[:count].mean(0) for values in (features, pixels))
        decoder = torch.linalg.lstsq(inputs[:count].flatten(0, 1), targets[:count].flatten(0, 1)).solution
        wanted = targets[count:].flatten(0, 1)
        error = float((inputs[count:].flatten(0, 1) @ decoder - wanted).square().mean() / wanted.var())
    if not error > LEAST_ERROR:
        raise RefusedRequestError(
            "the local module that the server sent transforms next to nothing: its features would show the images"
        )


def check_published(config: Config, run_spec: RunSpec, weights: Tensors, names: tuple[str, ...], file: Path) -> None:
    """Refuse a local module that is not near the published one in a file of the device's owner."""
    model = config.model.model_copy(update={"weights": str(file)})
    net = build_net(
        config.model_copy(update={"model": model}), len(run_spec.classes), run_spec.channels, run_spec.image_size
    )
    published = net.initial_weights()
    difference = math.hypot(*(float((weights[name].cpu() - published[name]).norm()) for name in names))
    length = math.hypot(*(float(published[name].norm()) for name in names))
    if not difference <= FURTHEST * length:
        raise RefusedRequestError(
            f"the local module is not the published one: its distance is {difference / length:.2g}"
            f" of its length; this client's owner allows {FURTHEST} (vitfleet client --pretrained)"
        )


def _patches(images: Tensor, net: Net) -> Tensor:
    """Return the pixels of each patch, ``[images, patches, pixels]``."""
    side = net.image_size // math.isqrt(net.num_patches)
    cut = images.unfold(2, side, side).unfold(3, side, side)
    return cut.permute(0, 2, 3, 1, 4, 5).flatten(1, 2).flatten(2)
