"""Draws of an epoch, batches and preprocessing, compared with a reference in NumPy for one image at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from vitfleet.config.schema import AugmentConfig
from vitfleet.data.batches import Batch, EpochDraws, draw_epoch, make_epoch_batches
from vitfleet.data.preprocess import Preprocess
from vitfleet.data.subsets import round_half_up

CPU = torch.device("cpu")
OFF = AugmentConfig()
ALL = AugmentConfig(crop=0.25, flip=True, brightness=0.4)
MEAN = (0.4, 0.5, 0.6)
STD = (0.2, 0.25, 0.3)


def draw(**changes: Any) -> EpochDraws:
    usual: dict[str, Any] = {
        "seed": 1,
        "round": 2,
        "client": 3,
        "epoch": 4,
        "samples": 50,
        "image_size": 16,
        "augment": OFF,
        "num_patches": 64,
        "num_kept": 64,
    }
    return draw_epoch(**{**usual, **changes})


def as_one_batch(draws: EpochDraws, kept: int = 64) -> Batch:
    """Return an epoch as one batch, in the order of the shard."""
    epoch_batches = make_epoch_batches(
        [replace(draws, order=np.arange(len(draws.order)))], len(draws.order), kept, CPU, stacked=False
    )
    return epoch_batches.batch(0, None)


def batch(**changes: Any) -> Batch:
    return as_one_batch(draw(**changes), changes.get("num_kept", 64))


def same(first: Any, second: Any) -> bool:
    """Whether two arrays, or all arrays of two draws, are equal."""
    if isinstance(first, EpochDraws) and isinstance(second, EpochDraws):
        return all(same(getattr(first, field.name), getattr(second, field.name)) for field in fields(EpochDraws))
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(same(value, second[name]) for name, value in first.items())
    if first is None or second is None:
        return first is second
    return np.array_equal(first, second)


def not_none(array: NDArray[Any] | None) -> NDArray[Any]:
    assert array is not None
    return array


def not_none_tensor(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def pixels(count: int = 50, channels: int = 3, image_size: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 256, (count, channels, image_size, image_size), generator=generator, dtype=torch.uint8)


def preprocess(image_size: int = 16, channels: int = 3) -> Preprocess:
    return Preprocess(image_size, torch.tensor(MEAN[:channels]), torch.tensor(STD[:channels]))


def reference_preprocess(image: NDArray[np.uint8], draws: EpochDraws, i: int) -> NDArray[np.float32]:
    """Shift, mirror, brighten and normalise one image, pixel by pixel."""
    channels, height, width = image.shape
    down, right = (0, 0) if draws.shift is None else (int(v) for v in draws.shift[i])
    mirrored = draws.flip is not None and bool(draws.flip[i])
    light = np.float32(1 if draws.brightness is None else float(draws.brightness[i]))
    out = np.zeros((channels, height, width), np.float32)
    for r in range(height):
        for c in range(width):
            row, column = r + down, (width - 1 - c if mirrored else c) + right
            if 0 <= row < height and 0 <= column < width:
                out[:, r, c] = image[:, row, column].astype(np.float32) / np.float32(255)
    out = np.clip(out * light, 0, 1)
    mean = np.array(MEAN[:channels], np.float32)[:, None, None]
    std = np.array(STD[:channels], np.float32)[:, None, None]
    return np.asarray((out - mean) / std, np.float32)


# Draws


@given(samples=st.integers(0, 200), seed=st.integers(0, 2**32))
@settings(deadline=None)
def test_order_is_a_permutation(samples: int, seed: int) -> None:
    order = draw(samples=samples, seed=seed).order
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(samples))


def test_without_augmentation_and_mask_only_the_order_is_drawn() -> None:
    draws = draw()
    assert (draws.shift, draws.flip, draws.brightness, draws.mask_noise) == (None, None, None, None)


@pytest.mark.parametrize("change", [{"seed": 9}, {"round": 9}, {"client": 9}, {"epoch": 9}], ids=str)
def test_draws_depend_on_every_part_of_the_address(change: dict[str, int]) -> None:
    usual: dict[str, Any] = {
        "augment": ALL,
        "num_kept": 16,
        "drawn": {"replay": (30, 2)},
        "random": ["noise"],
        "cached_views": 4,
    }
    base, other = draw(**usual), draw(**usual, **change)
    for field in fields(EpochDraws):
        assert not same(getattr(base, field.name), getattr(other, field.name))


def test_stored_samples_are_drawn_uniformly_and_leave_the_other_draws_alone() -> None:
    usual: dict[str, Any] = {"samples": 4000, "augment": ALL, "num_kept": 16}
    plain = draw(**usual)
    draws = draw(**usual, drawn={"replay": (7, 2)})
    replay = draws.drawn["replay"]
    assert same(replace(draws, drawn={}), plain)
    assert same(draws, draw(**usual, drawn={"replay": (7, 2)}))
    both = draw(**usual, drawn={"teachers": (7, 2), "replay": (7, 2)})
    assert same(both.drawn["replay"], replay), "sets do not share their draws"
    assert not same(both.drawn["teachers"].order, replay.order)
    counts = np.bincount(replay.order.flatten())
    expected = 8000 / 7
    assert len(counts) == 7
    assert ((counts - expected) ** 2 / expected).sum() < 22.5  # 99.9 % of a chi-squared with 6 degrees of freedom
    assert not same(replay.order[:, 0], replay.order[:, 1])
    for name in ("shift", "flip", "brightness", "mask_noise"):
        assert getattr(replay, name).shape[:2] == (4000, 2)
        assert not same(getattr(replay, name)[:, 0], getattr(draws, name)), "stored samples have their own"


def test_random_numbers_of_a_step_have_keys_of_their_own_and_leave_the_other_draws_alone() -> None:
    draws = draw(samples=11, augment=ALL, random=["noise", "dropout"])
    assert same(replace(draws, keys={}), draw(samples=11, augment=ALL))
    assert not set(draws.keys["noise"].tolist()) & set(draws.keys["dropout"].tolist())
    epoch_batches = make_epoch_batches([draws, draw(samples=6, random=["noise", "dropout"])], 4, 64, CPU, stacked=True)
    for step, active in enumerate(epoch_batches.active_clients):
        assert epoch_batches.batch(step, active).keys["noise"].tolist()[0] == draws.keys["noise"][step]


@pytest.mark.parametrize("name", ["order", "mask", "memory"])
def test_a_set_or_random_numbers_named_as_draws_of_ours_are_refused(name: str) -> None:
    for wrong in ({"drawn": {name: (7, 2)}}, {"random": [name]}):
        with pytest.raises(ValueError, match=f"random numbers '{name}': the name is taken"):
            draw(**wrong)


@pytest.mark.parametrize("stacked", [False, True])
def test_every_batch_has_the_replayed_samples_of_its_own_samples(stacked: bool) -> None:
    draws = [draw(samples=size, augment=ALL, num_kept=16, drawn={"replay": (7, 3)}) for size in (11, 6)[: 1 + stacked]]
    epoch_batches = make_epoch_batches(draws, 4, 16, CPU, stacked)
    for step, active in enumerate(epoch_batches.active_clients):
        drawn = epoch_batches.batch(step, active if stacked else None).drawn["replay"]
        for client in range(active):
            table, weight, flip = (
                (tensor[client] if stacked else tensor).flatten()
                for tensor in (drawn.image_indices, drawn.sample_weight, not_none_tensor(drawn.flip))
            )
            replay = draws[client].drawn["replay"]
            expected = replay.order[4 * step : 4 * step + 4].flatten()
            assert table[: len(expected)].tolist() == expected.tolist()
            assert flip[: len(expected)].tolist() == not_none(replay.flip)[4 * step : 4 * step + 4].flatten().tolist()
            assert float(weight.sum()) == pytest.approx(1)
            assert not weight[len(expected) :].any()


def test_draws_do_not_depend_on_global_generators() -> None:
    torch.manual_seed(0)
    first = draw(augment=ALL, num_kept=16)
    torch.manual_seed(1)
    np.random.seed(1)
    again = draw(augment=ALL, num_kept=16)
    for field in fields(EpochDraws):
        assert same(getattr(first, field.name), getattr(again, field.name))


def test_augmentation_does_not_change_order_and_masks() -> None:
    plain, augmented = draw(num_kept=16), draw(num_kept=16, augment=ALL)
    assert same(plain.order, augmented.order)
    assert same(plain.mask_noise, augmented.mask_noise)


def test_masking_does_not_change_order_and_augmentation() -> None:
    whole, masked = draw(augment=ALL), draw(augment=ALL, num_kept=16)
    for name in ("order", "shift", "flip", "brightness"):
        assert same(getattr(whole, name), getattr(masked, name))


@pytest.mark.parametrize("switched", ["crop", "flip", "brightness"])
def test_switching_one_augmentation_off_does_not_change_the_others(switched: str) -> None:
    on = draw(augment=ALL)
    off = draw(augment=AugmentConfig.model_validate({**ALL.model_dump(), switched: False if switched == "flip" else 0}))
    drawn = {"crop": "shift", "flip": "flip", "brightness": "brightness"}
    assert getattr(off, drawn.pop(switched)) is None
    for name in drawn.values():
        assert same(getattr(on, name), getattr(off, name)), f"{switched} changes {name}"


def test_largest_shift_does_not_change_flips() -> None:
    narrow = draw(augment=ALL, samples=500)
    wide = draw(augment=ALL.model_copy(update={"crop": 0.5}), samples=500)
    assert same(narrow.flip, wide.flip)
    assert same(narrow.brightness, wide.brightness)


def test_draws_fill_their_ranges() -> None:
    draws = draw(augment=ALL, samples=2000)
    shift, flip, light = not_none(draws.shift), not_none(draws.flip), not_none(draws.brightness)
    assert shift.shape == (2000, 2)
    assert sorted(set(shift.flatten().tolist())) == list(range(-4, 5))  # a quarter of 16, both ways
    assert flip.dtype == np.bool_
    assert 0.45 < flip.mean() < 0.55
    assert light.dtype == np.float32
    assert 0.6 <= float(light.min()) < 0.61
    assert 1.39 < float(light.max()) <= 1.4
    assert abs(float(light.mean()) - 1) < 0.02


@given(patches=st.integers(1, 100), data=st.data())
@settings(deadline=None)
def test_kept_patches_are_distinct_and_in_range(patches: int, data: st.DataObject) -> None:
    kept = data.draw(st.integers(1, patches))
    keep = batch(samples=9, num_patches=patches, num_kept=kept).keep
    if kept == patches:
        assert keep is None
        return
    assert keep is not None
    assert keep.shape == (9, kept)
    for row in keep.tolist():
        assert len(set(row)) == kept
        assert set(row) <= set(range(patches))


def test_every_patch_is_kept_equally_often() -> None:
    keep = batch(samples=4000, num_patches=64, num_kept=16).keep
    assert keep is not None
    often = torch.bincount(keep.flatten(), minlength=64) / 4000
    assert (often - 0.25).abs().max() < 0.035
    assert len({tuple(sorted(row)) for row in keep.tolist()}) == 4000


def test_model_without_patches_has_no_mask() -> None:
    assert draw(num_patches=0, num_kept=0).mask_noise is None


def test_draws_of_an_empty_client_are_empty() -> None:
    draws = draw(samples=0, augment=ALL, num_kept=16)
    assert len(draws.order) == len(not_none(draws.shift)) == len(not_none(draws.mask_noise)) == 0


def test_epoch_is_split_into_steps_with_a_shorter_last_one() -> None:
    draws = draw(augment=ALL, num_kept=16)
    epoch_batches = make_epoch_batches([draws], 20, 16, CPU, stacked=False)
    assert epoch_batches.batch_sizes == [20, 20, 10]  # the last batch is short
    last = epoch_batches.batch(2, None)
    assert np.array_equal(last.shard_positions, draws.order[40:])
    assert np.array_equal(not_none_tensor(last.shift), not_none(draws.shift)[40:])
    assert np.array_equal(
        not_none_tensor(last.keep), not_none(draws.mask_noise)[40:].argsort(axis=1, kind="stable")[:, :16]
    )
    assert last.sample_weight.tolist() == pytest.approx([0.1] * 10)
    assert float(last.active) == 1


def test_smaller_clients_are_padded_with_samples_of_weight_zero() -> None:
    draws = [draw(samples=samples, client=samples) for samples in (50, 21, 8)]
    epoch_batches = make_epoch_batches(draws, 20, 64, CPU, stacked=True)
    assert epoch_batches.batch_sizes == [20, 20, 10]
    assert epoch_batches.active_clients == [3, 2, 1]
    for client, client_draws in enumerate(draws):
        visited = [
            int(position)
            for step in range(3)
            for position, weight in zip(
                epoch_batches.batch(step, 3).shard_positions[client],
                epoch_batches.batch(step, 3).sample_weight[client],
                strict=True,
            )
            if weight > 0
        ]
        assert visited == client_draws.order.tolist(), "every sample once, in the client's order"
        for step, active in enumerate(epoch_batches.active_clients):
            assert float(epoch_batches.stacked.sample_weight[step, client].sum()) == pytest.approx(
                1.0 if client < active else 0.0
            )
            assert float(epoch_batches.stacked.active[step, client]) == (client < active)
        assert all(len(tensor) == 2 for tensor in epoch_batches.batch(1, 2).tensors()), (
            "only clients that have the step"
        )


@pytest.mark.parametrize(("samples", "width"), [(3, 8), (8, 8), (9, 16), (17, 20), (50, 20)])
def test_batch_width_is_rounded_up_to_a_multiple(samples: int, width: int) -> None:
    epoch_batches = make_epoch_batches([draw(samples=samples)], 20, 64, CPU, stacked=False, width_multiple=8)
    assert epoch_batches.stacked.shard_positions.shape[1] == width


@pytest.mark.parametrize(("value", "whole"), [(0, 0), (0.49, 0), (0.5, 1), (1.5, 2), (2.5, 3), (4.0, 4)])
def test_round_half_up_rounds_halves_upwards(value: float, whole: int) -> None:
    assert round_half_up(value) == whole


# Preprocessing


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "augment",
    [
        OFF,
        AugmentConfig(flip=True),
        AugmentConfig(crop=0.25),
        AugmentConfig(crop=0.5),
        AugmentConfig(brightness=0.9),
        AugmentConfig(crop=0.125, flip=True),
        ALL,
    ],
    ids=["nothing", "flip", "crop", "wide crop", "brightness", "crop and flip", "all"],
)
def test_preprocess_equals_the_reference_for_each_image(augment: AugmentConfig, channels: int) -> None:
    stored = pixels(channels=channels)
    draws = draw(augment=augment)
    got = preprocess(channels=channels)(stored, as_one_batch(draws))
    assert got.dtype == torch.float32
    for i, image in enumerate(stored.numpy()):
        np.testing.assert_allclose(got[i].numpy(), reference_preprocess(image, draws, i), rtol=1e-5, atol=1e-6)


def test_shift_fills_with_black() -> None:
    white = torch.full((2, 1, 8, 8), 255, dtype=torch.uint8)
    draws = as_one_batch(EpochDraws(np.arange(2), shift=np.array([[3, 0], [0, -8]])))
    plain = Preprocess(8, torch.zeros(1), torch.ones(1))
    got = plain(white, draws)
    assert got[0, 0, :5].eq(1).all()
    assert got[0, 0, 5:].eq(0).all()
    assert got[1].eq(0).all()  # shifted out of the image


def test_flip_mirrors_columns() -> None:
    plain = Preprocess(16, torch.zeros(3), torch.ones(3))
    flip = as_one_batch(EpochDraws(np.arange(50), flip=np.ones(50, dtype=bool)))
    once = plain(pixels(), flip)
    assert torch.equal(once.flip(-1), plain(pixels()))


def test_preprocess_normalises_per_channel() -> None:
    stored = torch.tensor([0, 51, 255], dtype=torch.uint8).view(3, 1, 1, 1).expand(3, 3, 2, 2)
    got = Preprocess(2, torch.tensor(MEAN), torch.tensor(STD))(stored)
    for i, value in enumerate((0.0, 0.2, 1.0)):
        for channel in range(3):
            expected = (value - MEAN[channel]) / STD[channel]
            torch.testing.assert_close(got[i, channel], torch.full((2, 2), expected))


@pytest.mark.parametrize("image_size", [8, 16, 32, 33])
def test_preprocess_resizes_to_the_models_size(image_size: int) -> None:
    stored = pixels(count=6)
    got = preprocess(image_size)(stored, batch(samples=6, augment=ALL))
    assert got.shape == (6, 3, image_size, image_size)
    assert torch.isfinite(got).all()
    plain = Preprocess(image_size, torch.zeros(3), torch.ones(3))(stored)
    assert plain.min() >= 0
    assert plain.max() <= 1
    torch.testing.assert_close(plain.mean((2, 3)), stored.float().mean((2, 3)) / 255, atol=0.06, rtol=0)


def test_resizing_keeps_constant_images_constant() -> None:
    stored = torch.full((1, 3, 16, 16), 102, dtype=torch.uint8)
    for image_size in (4, 7, 40):
        got = Preprocess(image_size, torch.zeros(3), torch.ones(3))(stored)
        torch.testing.assert_close(got, torch.full((1, 3, image_size, image_size), 0.4))


def test_shrinking_averages_over_all_pixels() -> None:
    """Without antialiasing, a checkerboard would become all black or all white."""
    board = (torch.arange(32)[:, None] + torch.arange(32)) % 2 * 255
    stored = board.to(torch.uint8).expand(1, 1, 32, 32)
    got = Preprocess(8, torch.zeros(1), torch.ones(1))(stored)
    assert (got - 0.5).abs().max() < 0.1


def test_preprocess_does_not_change_the_stored_pixels() -> None:
    stored = pixels()
    before = stored.clone()
    preprocess()(stored, batch(augment=ALL))
    assert torch.equal(stored, before)


def test_preprocess_of_an_empty_batch_is_empty() -> None:
    assert preprocess()(pixels(count=0)).shape == (0, 3, 16, 16)


def test_preprocess_of_stacked_clients_equals_each_client_alone() -> None:
    draws = [draw(augment=ALL, client=client, samples=12) for client in range(3)]
    stored = pixels(count=36).reshape(3, 12, 3, 16, 16)
    together = make_epoch_batches(draws, 12, 64, CPU, stacked=True).batch(0, len(draws))
    got = preprocess(image_size=24)(stored, together)
    for client in range(3):
        alone = make_epoch_batches([draws[client]], 12, 64, CPU, stacked=False).batch(0, None)
        assert torch.equal(got[client], preprocess(image_size=24)(stored[client], alone))
