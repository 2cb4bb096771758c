"""Random numbers depend only on their address."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitfleet.config.schema import AugmentConfig
from vitfleet.data.batches import draw_epoch
from vitfleet.randomness import Address, Purpose, own_purpose

ADDRESS = Address(3, Purpose.ORDER, round=5, client=7, epoch=11)
OTHER_ADDRESSES = [
    replace(ADDRESS, seed=4),
    replace(ADDRESS, purpose=Purpose.MASK),
    replace(ADDRESS, round=6),
    replace(ADDRESS, client=8),
    replace(ADDRESS, epoch=12),
    replace(ADDRESS, round=-1),
    replace(ADDRESS, client=-1),
    replace(ADDRESS, epoch=-1),
    replace(ADDRESS, round=7, client=5),  # the same numbers in other fields
    replace(ADDRESS, client=11, epoch=7),
    replace(ADDRESS, seed=35, round=-1),  # the same digits, split differently
    replace(ADDRESS, round=57, client=-1),
]

addresses = st.builds(
    Address,
    seed=st.integers(0, 2**70),
    purpose=st.sampled_from(Purpose),
    round=st.integers(-1, 10**6),
    client=st.integers(-1, 10**6),
    epoch=st.integers(-1, 10**6),
)


def draws(address: Address) -> list[float]:
    return [float(number) for number in address.generator().random(8)]


def test_equal_addresses_have_equal_draws() -> None:
    assert draws(ADDRESS) == draws(Address(3, Purpose.ORDER, 5, 7, 11)) == draws(ADDRESS)
    assert ADDRESS.torch_seed() == replace(ADDRESS).torch_seed()


@pytest.mark.parametrize("other", OTHER_ADDRESSES, ids=str)
def test_addresses_that_differ_in_a_field_have_other_draws(other: Address) -> None:
    assert other.key() != ADDRESS.key()
    assert other.torch_seed() != ADDRESS.torch_seed()
    assert not set(draws(other)) & set(draws(ADDRESS))


def test_purposes_do_not_share_draws() -> None:
    first = {draws(Address(0, purpose))[0] for purpose in Purpose}
    assert len(first) == len(Purpose)


@pytest.mark.parametrize("purpose", Purpose)
def test_own_draws_cannot_share_the_numbers_of_built_in_ones(purpose: Purpose) -> None:
    with pytest.raises(ValueError, match=f"random numbers '{purpose}': the name is taken by draws of vitfleet's own"):
        own_purpose(str(purpose))


def test_own_draws_have_numbers_of_their_own() -> None:
    names = ("noise", "replay", "order2")
    assert [own_purpose(name) for name in names] == list(names)
    first = {draws(Address(0, purpose))[0] for purpose in (*Purpose, *names)}
    assert len(first) == len(Purpose) + len(names)


@pytest.mark.parametrize("kind", ["drawn", "random"])
def test_an_epoch_is_not_drawn_with_a_name_that_is_taken(kind: str) -> None:
    names: dict[str, Any] = {"drawn": {"memory": (5, 2)}} if kind == "drawn" else {"random": ("mask",)}
    with pytest.raises(ValueError, match="choose another one"):
        draw_epoch(0, 1, 0, 0, 4, 8, AugmentConfig(), 4, 4, **names)


@given(st.lists(addresses, min_size=2, max_size=20, unique=True))
def test_different_addresses_have_different_keys(addresses: list[Address]) -> None:
    assert len({address.key() for address in addresses}) == len(addresses)


@given(st.lists(addresses, min_size=2, max_size=8, unique=True), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_draws_do_not_depend_on_the_order_of_use(addresses: list[Address], shuffle: random.Random) -> None:
    expected = {address: draws(address) for address in addresses}
    shuffled = list(addresses)
    shuffle.shuffle(shuffled)
    assert {address: draws(address) for address in shuffled} == expected


def test_interleaved_generators_are_independent() -> None:
    first, second = ADDRESS.generator(), OTHER_ADDRESSES[0].generator()
    pairs = [(first.random(), second.random()) for _ in range(8)]
    assert [number for number, _ in pairs] == draws(ADDRESS)
    assert [number for _, number in pairs] == draws(OTHER_ADDRESSES[0])


def test_draws_neither_use_nor_change_global_generators() -> None:
    np.random.seed(0)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = draws(ADDRESS)
    np.random.seed(1)
    assert draws(ADDRESS) == first
    assert torch.equal(torch.get_rng_state(), state)


@given(addresses)
def test_torch_accepts_every_seed(address: Address) -> None:
    assert 0 <= address.torch_seed() < 2**63
    torch.Generator().manual_seed(address.torch_seed())


def test_draws_are_the_same_in_every_release() -> None:
    """Runs are reproducible across releases only if these numbers do not change."""
    assert Address(0, Purpose.INIT).key() == 0x557533094CCD456844C601D11B228111
    assert Address(1, Purpose.ORDER, 2, 3, 4).generator().permutation(8).tolist() == [1, 3, 5, 4, 0, 7, 2, 6]
