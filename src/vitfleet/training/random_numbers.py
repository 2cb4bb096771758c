"""Normal random numbers that a step draws itself, on the device, as a function of a key.

Numbers of a model's size for every step would be too many to draw on the host and copy. So the host draws one key per
step, from the client's random address, and the device computes the numbers: each is a hash of the key and of its place
(SplitMix64; Steele, Lea and Flood, 2014), turned into a normal one (Box and Muller, 1958). The hashes are the same on
every device; logarithm and cosine may differ in the last bit. This is no generator for cryptography.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_BITS = 24  # that a float32 holds


def normal_numbers(key: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Return standard normal numbers in float32, in several shapes. The key is an int64 scalar."""
    total = sum(math.prod(shape) for shape in shapes.values())
    place = torch.arange(1, 2 * total + 1, device=key.device)
    hashes = _mix(key + place * _signed(_GOLDEN_GAMMA))
    # In (0, 1], so that the logarithm is finite.
    uniform = (_shift(hashes, 64 - _BITS) + 1).to(torch.float32) * 2.0**-_BITS
    radius, angle = (-2 * uniform[:total].log()).sqrt(), 2 * math.pi * uniform[total:]
    parts = torch.split(radius * angle.cos(), [math.prod(shape) for shape in shapes.values()])
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def _mix(bits: Tensor) -> Tensor:
    for shift, factor in _MIX:
        bits = (bits ^ _shift(bits, shift)) * _signed(factor)
    return bits ^ _shift(bits, 31)


def _shift(bits: Tensor, count: int) -> Tensor:
    """Shift to the right and fill with zeros: torch's shift of int64 repeats the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _signed(number: int) -> int:
    """Return the int64 with the bits of an unsigned number: products wrap around as unsigned ones do."""
    return number - (1 << 64) if number >= 1 << 63 else number
