"""build_model: sizes, seeds, pretrained weights, errors."""

from __future__ import annotations

import hashlib
import pickle
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitfleet.config.schema import ModelConfig
from vitfleet.errors import ConfigError, UserError
from vitfleet.models.net import Net
from vitfleet.models.zoo import build_model

SMALL = ModelConfig(dim=16, depth=2, heads=2)
SHIPPED_DIGITS_SHA256 = "4e24d1b78d37789bea46e9b12ab27b0faf3dce33732ff3d1d8cc7ed3850f5639"
REAL_NAME = "vit_tiny_patch16_224"
REAL = Path(__file__).parents[2].parent / "shared" / "weights" / f"{REAL_NAME}.safetensors"

real = pytest.mark.real


def make(config: ModelConfig, num_classes: int = 5, channels: int = 3, side: int = 32, seed: int = 0) -> Net:
    net = build_model(config, num_classes, channels, side, seed)
    net.module.eval()
    return net


def with_weights(path: Path, config: ModelConfig = SMALL) -> ModelConfig:
    return config.model_copy(update={"weights": str(path)})


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def config_error_of(config: ModelConfig, key: str, num_classes: int = 5, channels: int = 3) -> str:
    with pytest.raises(ConfigError) as caught:
        make(config, num_classes, channels)
    text = str(caught.value)
    assert caught.value.key == key
    assert text.startswith(f"{key} = ")
    assert len(text.splitlines()) == 1
    return text


# Sizes


def test_plain_vit_has_the_configured_sizes() -> None:
    net = make(ModelConfig(image_size=24, patch_size=6, dim=24, depth=3, heads=3, mlp_ratio=2), num_classes=7)
    assert (net.image_size, net.num_patches, net.anatomy.depth) == (24, 16, 3)
    shapes = net.anatomy.shapes
    assert shapes["patch_embed.proj.weight"] == (24, 3, 6, 6)
    assert shapes["pos_embed"] == (1, 17, 24)
    assert shapes["blocks.0.mlp.fc1.weight"] == (48, 24)
    assert shapes["head.weight"] == (7, 24)


def test_plain_vit_has_the_datas_image_size_by_default() -> None:
    net = make(ModelConfig(patch_size=2), channels=1, side=8)
    assert (net.image_size, net.num_patches) == (8, 16)
    assert net.anatomy.shapes["patch_embed.proj.weight"][1:] == (1, 2, 2)
    assert (net.mean, net.std) == ((0.5,), (0.5,))


def test_timm_model_has_its_own_image_size_and_normalisation() -> None:
    net = make(ModelConfig(name="deit_tiny_patch16_224", depth=1), num_classes=3)
    assert (net.image_size, net.num_patches) == (224, 196)
    assert net.mean == pytest.approx((0.485, 0.456, 0.406))
    assert net.std == pytest.approx((0.229, 0.224, 0.225))
    assert make(ModelConfig(name=REAL_NAME, depth=1)).mean == (0.5, 0.5, 0.5)


def test_net_accepts_images_of_its_image_size() -> None:
    for config in (SMALL, ModelConfig(name=REAL_NAME, image_size=48, patch_size=8, depth=1)):
        net = make(config)
        assert net(net.initial_weights(), torch.zeros(2, 3, net.image_size, net.image_size)).shape == (2, 5)


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig(image_size=30, patch_size=4),
        ModelConfig(image_size=8, patch_size=16),
        ModelConfig(patch_size=5),
        ModelConfig(name=REAL_NAME, image_size=30, patch_size=4, depth=1),
        ModelConfig(name=REAL_NAME, image_size=8, patch_size=16, depth=1),
        ModelConfig(name=REAL_NAME, image_size=40, depth=1),
    ],
    ids=["30 by 4", "8 by 16", "the data's 32 by 5", "timm, 30 by 4", "timm, 8 by 16", "timm, 40 by its 16"],
)
def test_patch_size_must_divide_the_image_size(config: ModelConfig) -> None:
    """Otherwise the pixels at the edge would be ignored without an error."""
    with pytest.raises(UserError, match=r"model\.patch_size") as caught:
        make(config)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("vit_tinny_patch16_224", REAL_NAME),
        ("deit_tiny_patch16_24", "deit_tiny_patch16_224"),
        ("vitt", "vit"),
    ],
)
def test_unknown_name_is_rejected_with_a_suggestion(name: str, suggestion: str) -> None:
    text = config_error_of(ModelConfig(name=name), "model.name")
    assert repr(name) in text
    assert suggestion in text


def test_unknown_name_without_a_similar_one_points_to_timms_list() -> None:
    assert "timm.list_models()" in config_error_of(ModelConfig(name="%%%%%%%%"), "model.name")


@pytest.mark.parametrize("name", ["resnet18", "mobilevit_xxs"])
def test_model_that_is_not_a_vit_is_rejected(name: str) -> None:
    with pytest.raises(UserError, match=r"model\.name"):
        make(ModelConfig(name=name))


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig(name="pvt_v2_b0", patch_size=4),
        ModelConfig(name="levit_128s", depth=2),
        ModelConfig(name="pit_ti_224", depth=2),
        ModelConfig(name="swin_tiny_patch4_window7_224", image_size=32, depth=3),
    ],
    ids=lambda config: config.name,
)
def test_size_that_a_family_does_not_have_is_rejected(config: ModelConfig) -> None:
    with pytest.raises(UserError, match="model") as caught:
        make(config)
    assert len(str(caught.value).splitlines()) == 1


# The seed


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        ModelConfig(name=REAL_NAME, image_size=32, patch_size=8, depth=1),
        ModelConfig(name="levit_128s"),
    ],
    ids=lambda config: config.name,
)
def test_initial_weights_depend_on_the_seed_only(config: ModelConfig) -> None:
    torch.manual_seed(1)
    first = make(config, seed=3).initial_weights()
    torch.manual_seed(2)
    torch.rand(5)
    assert same(make(config, seed=3).initial_weights(), first)
    assert not same(make(config, seed=4).initial_weights(), first)


def test_build_model_does_not_change_the_global_generator() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    make(SMALL)
    assert torch.equal(torch.get_rng_state(), before)


# Weights from a file, made here


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "vit.safetensors"
    save_file(make(SMALL, seed=1).initial_weights(), path)
    return path


def test_weights_of_a_file_do_not_depend_on_the_seed(saved: Path) -> None:
    assert same(make(with_weights(saved), seed=2).initial_weights(), load_file(saved))


@pytest.mark.parametrize("name", ["deit_tiny_distilled_patch16_224", "pit_ti_224", "levit_128s"])
def test_initial_weights_saved_to_a_file_can_be_loaded(name: str, tmp_path: Path) -> None:
    """A family with batch norm also has step counters, which are not weights."""
    config = ModelConfig(name=name, image_size=32)
    weights = make(config, seed=1).initial_weights()
    save_file(weights, tmp_path / "own.safetensors")
    assert same(make(with_weights(tmp_path / "own.safetensors", config), seed=2).initial_weights(), weights)


def test_weights_folder_holds_files_named_after_models(saved: Path) -> None:
    assert same(make(with_weights(saved.parent), seed=2).initial_weights(), load_file(saved))


def test_head_for_other_classes_keeps_its_initial_weights(saved: Path) -> None:
    fresh = make(SMALL, num_classes=9, seed=2).initial_weights()
    net = make(with_weights(saved), num_classes=9, seed=2)
    loaded = net.initial_weights()
    given = load_file(saved)
    assert all(torch.equal(loaded[name], fresh[name]) for name in net.anatomy.head)
    assert all(torch.equal(loaded[name], given[name]) for name in net.anatomy.body)


def test_file_without_a_head_is_accepted(saved: Path) -> None:
    given = {name: tensor for name, tensor in load_file(saved).items() if not name.startswith("head.")}
    save_file(given, saved)
    fresh = make(SMALL, seed=2).initial_weights()
    loaded = make(with_weights(saved), seed=2).initial_weights()
    assert torch.equal(loaded["head.weight"], fresh["head.weight"])
    assert torch.equal(loaded["cls_token"], given["cls_token"])


def test_half_precision_file_is_loaded_as_float32(saved: Path) -> None:
    halves = {name: tensor.half() for name, tensor in load_file(saved).items()}
    save_file(halves, saved)
    loaded = make(with_weights(saved)).initial_weights()
    assert all(tensor.dtype == torch.float32 for tensor in loaded.values())
    assert torch.equal(loaded["cls_token"], halves["cls_token"].float())


def test_position_embeddings_are_interpolated(saved: Path) -> None:
    config = with_weights(saved, SMALL.model_copy(update={"image_size": 48}))
    loaded = make(config).initial_weights()["pos_embed"]
    given = load_file(saved)["pos_embed"]
    assert loaded.shape == (1, 1 + 12 * 12, 16)
    assert torch.equal(loaded[:, :1], given[:, :1])  # the class token's position is not interpolated
    old, new = given[0, 1:].view(8, 8, 16), loaded[0, 1:].view(12, 12, 16)
    torch.testing.assert_close(new.mean((0, 1)), old.mean((0, 1)), atol=0.01, rtol=0)


def test_colour_weights_are_summed_for_greyscale_images(saved: Path) -> None:
    config = with_weights(saved)
    coloured, grey = make(config), make(config, channels=1)
    picture = torch.randn(2, 1, 32, 32)
    torch.testing.assert_close(
        grey(grey.initial_weights(), picture),
        coloured(coloured.initial_weights(), picture.expand(-1, 3, -1, -1)),
    )
    assert len(grey.mean) == len(grey.std) == 1


def test_greyscale_file_fits_a_greyscale_model_only(tmp_path: Path) -> None:
    path = tmp_path / "grey.safetensors"
    weights = make(SMALL, channels=1, seed=1).initial_weights()
    save_file(weights, path)
    assert same(make(with_weights(path), channels=1, seed=2).initial_weights(), weights)
    assert "patch_embed.proj.weight" in config_error_of(with_weights(path), "model.weights", channels=3)


def test_missing_file_is_rejected(tmp_path: Path) -> None:
    text = config_error_of(with_weights(tmp_path / "nowhere.safetensors"), "model.weights")
    assert "nowhere.safetensors" in text
    assert "no such file" in text
    assert "vit.safetensors" in config_error_of(with_weights(tmp_path), "model.weights")  # expected in the folder


def damage(whole: bytes, how: str) -> bytes:
    return {
        "empty": b"",
        "cut": whole[: len(whole) // 2],
        "cut header": whole[:20],
        "noise": bytes(range(256)) * 8,
        "text": b"<html>not found</html>",
        "pickle": pickle.dumps({"weights": [1, 2, 3]}),
    }[how]


@pytest.mark.parametrize("how", ["empty", "cut", "cut header", "noise", "text", "pickle"])
def test_damaged_file_is_rejected(saved: Path, how: str) -> None:
    saved.write_bytes(damage(saved.read_bytes(), how))
    text = config_error_of(with_weights(saved), "model.weights")
    assert "not a readable safetensors file" in text
    assert "vit.safetensors" in text


@pytest.mark.parametrize(
    ("change", "first"),
    [
        ({"dim": 24, "heads": 3}, "cls_token"),
        ({"depth": 3}, "blocks.2."),
        ({"mlp_ratio": 2.0}, "blocks.0.mlp"),
    ],
    ids=["wider", "deeper", "narrower mlp"],
)
def test_file_of_other_sizes_is_rejected(saved: Path, change: dict[str, object], first: str) -> None:
    config = ModelConfig.model_validate({**SMALL.model_dump(), **change})
    text = config_error_of(with_weights(saved, config), "model.weights")
    assert "does not fit" in text
    assert first in text


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"something": torch.zeros(3)},
        {"pos_embed": torch.zeros(1, 12, 16)},
        {"patch_embed.proj.weight": torch.zeros(16, 5)},
        {"patch_embed.proj.weight": torch.zeros(16, 3, 8)},
        {"patch_embed.proj.weight": torch.zeros(16)},
    ],
    ids=["empty", "other names", "positions of no square", "odd patches", "three axes", "one axis"],
)
def test_file_of_another_model_is_rejected(saved: Path, given: dict[str, Tensor]) -> None:
    whole = load_file(saved) if given and "something" not in given else {}
    save_file({**whole, **given}, saved)
    assert "does not fit" in config_error_of(with_weights(saved), "model.weights")


def test_plain_vit_rejects_hub_weights() -> None:
    text = config_error_of(SMALL.model_copy(update={"weights": "hub"}), "model.weights")
    assert "model.name" in text


# Weights from a file, real


@pytest.fixture
def real_file() -> Path:
    if not REAL.is_file():
        pytest.skip(f"needs the pretrained weights {REAL.name} in ../shared/weights")
    return REAL


def random_images(side: int, channels: int = 3) -> Tensor:
    return torch.randn(2, channels, side, side, generator=torch.Generator().manual_seed(0))


def timm_model(file: Path, **sizes: int) -> Any:
    """Return the model as timm builds and loads it."""
    return timm.create_model(
        REAL_NAME, pretrained=True, pretrained_cfg_overlay={"file": str(file), "custom_load": False}, **sizes
    ).eval()


def assert_same_logits(net: Net, module: Any, inputs: Tensor) -> None:
    with torch.no_grad():
        logits = net(net.initial_weights(), inputs)
        torch.testing.assert_close(logits, module(inputs), rtol=1e-4, atol=1e-4)
    assert logits.std() > 0.5  # trained weights tell classes apart


@real
def test_pretrained_logits_equal_timms(real_file: Path) -> None:
    for weights in (real_file, real_file.parent):
        net = make(ModelConfig(name=REAL_NAME, weights=str(weights)), num_classes=1000)
        assert_same_logits(net, timm_model(real_file), random_images(224))
        assert (net.mean, net.std) == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@real
def test_pretrained_with_another_head(real_file: Path) -> None:
    config = ModelConfig(name=REAL_NAME, weights=str(real_file))
    net = make(config, num_classes=21, seed=5)
    fresh = make(ModelConfig(name=REAL_NAME), num_classes=21, seed=5).initial_weights()
    given = load_file(real_file)
    loaded = net.initial_weights()
    assert loaded["head.weight"].shape == (21, 192)
    assert all(torch.equal(loaded[name], fresh[name]) for name in net.anatomy.head)
    assert all(torch.equal(loaded[name], given[name]) for name in net.anatomy.body)


@real
def test_pretrained_at_another_size(real_file: Path) -> None:
    net = make(ModelConfig(name=REAL_NAME, image_size=96, weights=str(real_file)), num_classes=1000)
    assert (net.image_size, net.num_patches) == (96, 36)
    assert_same_logits(net, timm_model(real_file, img_size=96), random_images(96))


@real
def test_pretrained_on_grey_pictures(real_file: Path) -> None:
    config = ModelConfig(name=REAL_NAME, image_size=96, weights=str(real_file))
    net = make(config, num_classes=1000, channels=1)
    assert_same_logits(net, timm_model(real_file, img_size=96, in_chans=1), random_images(96, channels=1))


def test_too_many_patches_are_rejected() -> None:
    with pytest.raises(
        ConfigError, match=r"model\.patch_size = 2: cuts an image of 256 x 256 pixels .* 16,384 patches"
    ):
        build_model(ModelConfig(patch_size=2), 3, 3, 256, 0)


def test_file_with_more_blocks_than_the_model_is_rejected(tmp_path: Path) -> None:
    deep = build_model(ModelConfig(name="vit_tiny_patch16_224", depth=2), 5, 3, 224, 0)
    save_file(deep.initial_weights(), tmp_path / "deep.safetensors")
    config = ModelConfig(name="vit_tiny_patch16_224", depth=1, weights=str(tmp_path / "deep.safetensors"))
    with pytest.raises(ConfigError, match=r"model\.weights .* has 12 weights that .* does not have"):
        build_model(config, 5, 3, 224, 0)


def test_shipped_weights_are_those_of_the_package_and_fit_only_their_model() -> None:
    file = files("vitfleet") / "weights" / "digits.safetensors"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == SHIPPED_DIGITS_SHA256
    config = ModelConfig(patch_size=2, dim=32, depth=4, heads=4, weights="digits")
    pretrained = build_model(config, num_classes=10, channels=1, data_image_size=8, seed=0).initial_weights()
    fresh = build_model(
        config.model_copy(update={"weights": None}), num_classes=10, channels=1, data_image_size=8, seed=0
    ).initial_weights()
    stored = load_file(str(file))
    for name, tensor in pretrained.items():
        expected = fresh[name] if name.startswith("head.") else stored[name].float()
        assert torch.equal(tensor, expected), name
    with pytest.raises(ConfigError, match=r"model.weights.*digits.*does not fit model.name = 'vit'"):
        build_model(config.model_copy(update={"dim": 16}), num_classes=10, channels=1, data_image_size=8, seed=0)
