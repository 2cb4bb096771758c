"""Normal numbers that a step draws: SplitMix64 and Box-Muller by hand, their moments, the same for stacked clients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from vitfleet.randomness import Address
from vitfleet.training.random_numbers import _mix, _signed, normal_numbers

GAMMA, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
# The first outputs of SplitMix64 of two seeds, as published with the generator's reference implementation.
PUBLISHED = {
    0: [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC],
    1234567: [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ],
}


def splitmix64(seed: int, place: int) -> int:
    """Return one output of SplitMix64 in integers of Python."""
    bits = (seed + place * GAMMA) & MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK
    return bits ^ (bits >> 31)


@pytest.mark.parametrize("seed", PUBLISHED)
def test_hashes_are_those_of_splitmix64(seed: int) -> None:
    published = PUBLISHED[seed]
    places = torch.arange(1, len(published) + 1)
    hashes = _mix(torch.tensor(seed) + places * _signed(GAMMA))
    assert [int(number) & MASK for number in hashes] == published
    assert [splitmix64(seed, place) for place in places.tolist()] == published


def test_numbers_are_those_of_box_and_muller_by_hand() -> None:
    for key in (0, 1, 2**62 + 12345):
        shapes = {"a": torch.Size((2, 3)), "b": torch.Size(()), "c": torch.Size((5,))}
        numbers = torch.cat([part.flatten() for part in normal_numbers(torch.tensor(key), shapes).values()])
        uniform = [((splitmix64(key, place) >> 40) + 1) / 2**24 for place in range(1, 25)]
        expected = [
            math.sqrt(-2 * math.log(radius)) * math.cos(2 * math.pi * angle)
            for radius, angle in zip(uniform[:12], uniform[12:], strict=True)
        ]
        np.testing.assert_allclose(numbers.numpy(), expected, rtol=1e-4, atol=1e-5)


def test_moments_and_distribution_are_those_of_a_standard_normal() -> None:
    count = 400_000
    numbers = normal_numbers(torch.tensor(7), {"a": torch.Size((count,))})["a"].double().numpy()
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3), (6, 15)):
        spread = math.sqrt(math.prod(range(1, 2 * power, 2)) / count)  # of the mean of x^power, at most
        assert abs((numbers**power).mean() - moment) < 4 * spread
    assert kstest(numbers, "norm").pvalue > 0.01
    assert np.isfinite(numbers).all()
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 4 / math.sqrt(count)


def test_keys_of_neighbouring_addresses_have_unrelated_numbers() -> None:
    count, shapes = 100_000, {"a": torch.Size((100_000,))}
    addresses = [
        Address(0, "noise", 1, 0, 0),
        Address(0, "noise", 1, 0, 1),
        Address(0, "noise", 1, 1, 0),
        Address(0, "noise", 2, 0, 0),
        Address(1, "noise", 1, 0, 0),
        Address(0, "other", 1, 0, 0),
    ]
    keys = [key for address in addresses for key in address.generator().integers(2**63 - 1, size=2).tolist()]
    rows = torch.stack([normal_numbers(torch.tensor(key), shapes)["a"] for key in (*keys, 0, 1)])
    correlations = np.corrcoef(rows.numpy()) - np.eye(len(rows))
    assert np.abs(correlations).max() < 5 / math.sqrt(count)
    assert len({row[0].item() for row in rows}) == len(rows)


def test_numbers_of_stacked_keys_are_those_of_each_key() -> None:
    shapes = {"a": torch.Size((3, 4)), "b": torch.Size((5,))}
    keys = torch.tensor([0, 5, 2**63 - 2])
    stacked = torch.vmap(lambda key: normal_numbers(key, shapes))(keys)
    for client, key in enumerate(keys):
        for name, tensor in normal_numbers(key, shapes).items():
            assert torch.equal(stacked[name][client], tensor)
            assert tensor.dtype == torch.float32


def test_numbers_do_not_depend_on_the_shapes_they_are_cut_into() -> None:
    key = torch.tensor(99)
    whole = normal_numbers(key, {"all": torch.Size((20,))})["all"]
    parts = normal_numbers(key, {"a": torch.Size((2, 5)), "b": torch.Size((10,))})
    assert torch.equal(torch.cat([parts["a"].flatten(), parts["b"]]), whole)
