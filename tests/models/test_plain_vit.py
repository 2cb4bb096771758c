"""The plain ViT against timm's: names, initial weights and logits are the same, bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer

from vitfleet.config.schema import ModelConfig
from vitfleet.config.train import HUB_WEIGHTS
from vitfleet.errors import ConfigError
from vitfleet.models.families.request import ModelRequest
from vitfleet.models.families.vit import NAMED_VITS, PatchEmbed, PlainViT, build_named_vit, init_normal_
from vitfleet.models.zoo import build_model

SMALL = ModelConfig(dim=16, depth=2, heads=2)
HALF = (0.5, 0.5, 0.5)


@pytest.mark.parametrize(("channels", "qkv_bias", "ratio"), [(1, True, 2.5), (3, False, 4.0)])
def test_weights_and_logits_are_those_of_timm(channels: int, qkv_bias: bool, ratio: float) -> None:
    torch.manual_seed(3)
    theirs: Any = VisionTransformer(
        img_size=16,
        patch_size=4,
        in_chans=channels,
        num_classes=7,
        embed_dim=24,
        depth=3,
        num_heads=3,
        mlp_ratio=ratio,
        qkv_bias=qkv_bias,
    )
    after_theirs = torch.rand(1)
    torch.manual_seed(3)
    ours = PlainViT(PatchEmbed(16, 4, channels, 24), 7, 24, 3, 3, ratio, qkv_bias)
    assert torch.equal(torch.rand(1), after_theirs)  # as many draws
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, weight in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], weight), name
    images = torch.randn(5, channels, 16, 16)
    assert torch.equal(ours(images), theirs(images))
    assert torch.equal(ours.forward_features(images), theirs.forward_features(images))


@pytest.mark.parametrize("name", [name for name in NAMED_VITS if "." not in name])
def test_sizes_under_timms_names_are_timms(name: str) -> None:
    with torch.device("meta"):
        theirs: Any = timm.create_model(name, num_classes=1000)
        ours: Any
        ours, _ = build_named_vit(ModelRequest(ModelConfig(name=name), 1000, 3, 32))
    assert {key: weight.shape for key, weight in ours.state_dict().items()} == {
        key: weight.shape for key, weight in theirs.state_dict().items()
    }
    assert [block.attn.num_heads for block in ours.blocks] == [block.attn.num_heads for block in theirs.blocks]


def test_images_under_timms_names_are_timms() -> None:
    """Their size and normalisation, with every tag that timm has of those that are accepted."""
    known = NAMED_VITS.keys() & {*timm.list_models("vit_*"), *timm.list_pretrained("vit_*")}
    assert len(known) > 25
    for name in known:
        declared, (*_, size) = timm.models.get_pretrained_cfg(name), NAMED_VITS[name]
        assert (declared.input_size, declared.mean, declared.std) == ((3, size, size), HALF, HALF), name


def test_model_under_a_name_of_timm_is_timms() -> None:
    torch.manual_seed(3)
    theirs = timm.create_model("vit_tiny_patch16_224", num_classes=7, img_size=48, patch_size=8, depth=2, in_chans=1)
    torch.manual_seed(3)
    config = ModelConfig(name="vit_tiny_patch16_224", image_size=48, patch_size=8, depth=2)
    ours, _ = build_named_vit(ModelRequest(config, 7, 1, 32))
    for name, weight in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], weight), name
    images = torch.randn(5, 1, 48, 48)
    assert torch.equal(ours(images), theirs(images))


def test_initial_numbers_are_normal() -> None:
    """Moments of 10⁶ draws; their errors are about 10⁻³ of the standard deviation."""
    drawn = torch.empty(1_000_000)
    torch.manual_seed(0)
    init_normal_(drawn, 0.02)
    assert abs(drawn.mean().item()) < 1e-4
    assert drawn.std().item() == pytest.approx(0.02, rel=5e-3)
    assert (drawn.abs() < 0.02).float().mean().item() == pytest.approx(0.6827, abs=3e-3)


@pytest.fixture
def without_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ("timm", "torchvision")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setitem(sys.modules, "torchvision", None)


@pytest.mark.usefixtures("without_timm")
@pytest.mark.parametrize("name", ["vit", "cvt", "t2t"])
def test_model_of_ours_needs_no_timm(name: str, tmp_path: Path) -> None:
    net = build_model(SMALL.model_copy(update={"name": name, "depth": None}), 5, 3, 32, 0)
    save_file(net.initial_weights(), tmp_path / "weights.safetensors")
    weights = {"name": name, "depth": None, "weights": str(tmp_path / "weights.safetensors")}
    again = build_model(SMALL.model_copy(update=weights), 5, 3, 32, 1)
    for key, weight in net.initial_weights().items():
        assert torch.equal(again.initial_weights()[key], weight)


@pytest.mark.usefixtures("without_timm")
def test_models_of_the_papers_need_no_timm() -> None:
    assert build_model(ModelConfig(name="vit_tiny_patch16_224", depth=1), 5, 3, 32, 0).image_size == 224
    with pytest.raises(ConfigError, match="needs timm"):
        build_model(ModelConfig(name="vit_tiny_patch16_224", weights=HUB_WEIGHTS), 5, 3, 32, 0)


@pytest.mark.usefixtures("without_timm")
@pytest.mark.parametrize("name", ["deit", "cait", "levit", "pvt", "pit", "swin", "deit_tiny_patch16_224"])
def test_model_of_timm_says_what_to_install(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.name = '{name}': needs timm.*pip install 'vitfleet\[timm\]'"):
        build_model(ModelConfig(name=name), 5, 3, 32, 0)


@pytest.mark.usefixtures("without_timm")
def test_weights_of_another_size_say_what_to_install(tmp_path: Path) -> None:
    save_file(build_model(SMALL, 5, 3, 16, 0).initial_weights(), tmp_path / "weights.safetensors")
    config = SMALL.model_copy(update={"weights": str(tmp_path / "weights.safetensors")})
    with pytest.raises(ConfigError, match=r"model\.weights = .*needs timm"):
        build_model(config, 5, 3, 32, 0)
