"""Draws depend on their address and on nothing else."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitfleet.randomness import Address, Purpose

HERE = Address(3, Purpose.ORDER, round=5, client=7, epoch=11)
ELSEWHERE = [
    replace(HERE, seed=4),
    replace(HERE, purpose=Purpose.MASK),
    replace(HERE, round=6),
    replace(HERE, client=8),
    replace(HERE, epoch=12),
    replace(HERE, round=-1),
    replace(HERE, client=-1),
    replace(HERE, epoch=-1),
    replace(HERE, round=7, client=5),  # the same numbers in other places
    replace(HERE, client=11, epoch=7),
    replace(HERE, seed=35, round=-1),  # the same digits, cut otherwise
    replace(HERE, round=57, client=-1),
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


def test_the_same_address_gives_the_same_draws() -> None:
    assert draws(HERE) == draws(Address(3, Purpose.ORDER, 5, 7, 11)) == draws(HERE)
    assert HERE.torch_seed() == replace(HERE).torch_seed()


@pytest.mark.parametrize("other", ELSEWHERE, ids=str)
def test_any_other_field_gives_other_draws(other: Address) -> None:
    assert other.key() != HERE.key()
    assert other.torch_seed() != HERE.torch_seed()
    assert not set(draws(other)) & set(draws(HERE))


def test_no_two_purposes_share_numbers() -> None:
    first = {draws(Address(0, purpose))[0] for purpose in Purpose}
    assert len(first) == len(Purpose)


@given(st.lists(addresses, min_size=2, max_size=20, unique=True))
def test_different_addresses_never_meet(places: list[Address]) -> None:
    assert len({place.key() for place in places}) == len(places)


@given(st.lists(addresses, min_size=2, max_size=8, unique=True), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_the_order_of_use_changes_nothing(places: list[Address], shuffle: random.Random) -> None:
    once = {place: draws(place) for place in places}
    again = list(places)
    shuffle.shuffle(again)
    assert {place: draws(place) for place in again} == once


def test_interleaved_generators_do_not_disturb_each_other() -> None:
    here, there = HERE.generator(), ELSEWHERE[0].generator()
    mixed = [(here.random(), there.random()) for _ in range(8)]
    assert [one for one, _ in mixed] == draws(HERE)
    assert [other for _, other in mixed] == draws(ELSEWHERE[0])


def test_global_generators_are_neither_read_nor_moved() -> None:
    np.random.seed(0)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = draws(HERE)
    np.random.seed(1)
    assert draws(HERE) == first
    assert torch.equal(torch.get_rng_state(), state)


@given(addresses)
def test_torch_takes_every_seed(address: Address) -> None:
    assert 0 <= address.torch_seed() < 2**63
    torch.Generator().manual_seed(address.torch_seed())


def test_draws_are_the_same_in_every_release() -> None:
    """A run can be repeated only as long as these numbers stay."""
    assert Address(0, Purpose.INIT).key() == 0x557533094CCD456844C601D11B228111
    assert Address(1, Purpose.ORDER, 2, 3, 4).generator().permutation(8).tolist() == [1, 3, 5, 4, 0, 7, 2, 6]
