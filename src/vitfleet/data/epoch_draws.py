"""The random numbers of one client's epoch, drawn on the host in bulk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vitfleet.config.schema import AugmentConfig
from vitfleet.data.subsets import round_half_up
from vitfleet.randomness import Address, Purpose, own_purpose

Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True)
class EpochDraws:
    """All random numbers of one client's epoch, one row per sample, on the host.

    Attributes
    ----------
    order
        Positions in the shard, in the order in which the samples are visited.
    shift
        Rows and columns by which each visited image is shifted, ``[samples, 2]``.
    flip, brightness
        Whether each image is mirrored, and the factor of its brightness.
    mask_noise
        One number per patch, ``[samples, patches]``: the patches with the smallest numbers are kept.
    drawn
        The stored samples that are drawn with each visited sample, by the name of their set, ``[samples, draws, …]``:
        ``order`` holds their positions in the client's set.
    keys
        Of random numbers that steps compute themselves: more keys than there are steps, by name, ``[samples]``.
    """

    order: Array
    shift: Array | None = None
    flip: Array | None = None
    brightness: Array | None = None
    mask_noise: Array | None = None
    drawn: Mapping[str, EpochDraws] = field(default_factory=dict)
    keys: Mapping[str, Array] = field(default_factory=dict)


def draw_epoch(
    seed: int,
    round: int,
    client: int,
    epoch: int,
    samples: int,
    image_size: int,
    augment: AugmentConfig,
    num_patches: int,
    num_kept: int,
    drawn: Mapping[str, tuple[int, int]] | None = None,
    random: Sequence[str] = (),
) -> EpochDraws:
    """Draw one client's epoch from its random addresses.

    Parameters
    ----------
    samples, image_size
        Number of the client's images, and their height and width in pixels.
    num_patches, num_kept
        Patches per image, and how many of them are kept. They are equal if nothing is masked.
    drawn
        Of each set of stored samples: how many samples it has, and how many are drawn with each image, uniformly, with
        replacement, with an augmentation and a mask of their own. The set's name is their purpose.
    random
        Names of random numbers that steps compute themselves, each a purpose of its own.
    """

    def generator(purpose: str) -> np.random.Generator:
        return Address(seed, purpose, round, client, epoch).generator()

    def draw(order: Array, augment_by: str, mask_by: str) -> EpochDraws:
        """Draw the augmentation and the mask of every sample of an order."""
        shift = flip = brightness = mask_noise = None
        if augment.active:
            rng = generator(augment_by)
            # All three are always drawn, the shift last (an empty range consumes nothing), so that switching one of
            # them on does not change the numbers of the others.
            max_shift = round_half_up(augment.crop * image_size)
            drawn_flip = rng.random(order.shape, dtype=np.float32) < 0.5
            drawn_brightness = 1 + augment.brightness * (2 * rng.random(order.shape, dtype=np.float32) - 1)
            drawn_shift = rng.integers(-max_shift, max_shift + 1, size=(*order.shape, 2))
            shift = drawn_shift if max_shift else None
            flip = drawn_flip if augment.flip else None
            brightness = drawn_brightness if augment.brightness else None
        if num_kept < num_patches:
            mask_noise = generator(mask_by).random((*order.shape, num_patches), dtype=np.float32)
        return EpochDraws(order, shift, flip, brightness, mask_noise)

    drawn_sets = {
        name: draw(
            generator(own_purpose(name)).integers(stored, size=(samples, draws)), f"{name}-augment", f"{name}-mask"
        )
        for name, (stored, draws) in (drawn or {}).items()
    }
    keys = {name: generator(own_purpose(name)).integers(2**63 - 1, size=samples) for name in random}
    batches = draw(generator(Purpose.ORDER).permutation(samples), Purpose.AUGMENT, Purpose.MASK)
    return replace(batches, drawn=drawn_sets, keys=keys)
