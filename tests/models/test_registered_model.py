"""A model that a user's file registers, used in a whole run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import vitfleet
from vitfleet.config import load_config
from vitfleet.errors import ConfigError, UserError
from vitfleet.models.zoo import build_model

PLUGIN = '''
from pydantic import Field
from timm.models.vision_transformer import VisionTransformer

from vitfleet import register_model
from vitfleet.config.base import Table


class NarrowParams(Table):
    """A ViT that pools the mean of its patches."""

    width: int = Field(16, ge=8, description="embedding width")


@register_model("narrow", NarrowParams)
def narrow(params, request):
    vit = VisionTransformer(
        img_size=request.data_image_size, patch_size=2, in_chans=request.channels, num_classes=request.num_classes,
        embed_dim=params.width, depth=2, num_heads=2, class_token=False, global_pool="avg",
    )
    return vit, request.data_image_size
'''
SMALL: dict[str, Any] = {"fleet.clients": 4, "fleet.per_round": 2, "rounds": 2, "data.limit": 200, "model.depth": None}


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    return path


def test_run_with_a_registered_model(plugin: Path, tmp_path: Path) -> None:
    keys = {"model.name": "narrow", "model.params.width": 24, "method.name": "transfl", "method.k": 1}
    run = vitfleet.train("digits", overrides={**SMALL, **keys}, plugins=[plugin], out=tmp_path / "run")
    model = run.model()
    assert torch.isfinite(model(torch.zeros(2, 1, 8, 8))).all()
    assert run.finished


def test_registered_model_is_stacked_masked_and_seeded(plugin: Path) -> None:
    config = load_config("digits", {"model.name": "narrow", "model.depth": None}, plugins=[plugin]).model
    net = build_model(config, num_classes=3, channels=1, data_image_size=8, seed=1)
    assert net.stackable
    assert (net.image_size, net.num_patches, net.embed_dim, net.anatomy.depth) == (8, 16, 16, 2)
    weights, again = net.initial_weights(), build_model(config, 3, 1, 8, seed=1).initial_weights()
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    keep = torch.tensor([[0, 3, 5]])
    assert net(weights, torch.zeros(1, 1, 8, 8), keep).shape == (1, 3)


def test_parameters_of_a_registered_model_are_validated(plugin: Path) -> None:
    with pytest.raises(UserError, match=r"model\.params\.widht.*no such key; 'narrow' has the parameters width"):
        load_config("digits", {"model.name": "narrow", "model.params.widht": 9}, plugins=[plugin])


def test_registered_model_that_is_not_a_vit_is_rejected(plugin: Path) -> None:
    plugin.write_text(
        PLUGIN.replace("    return vit,", "    import torch\n    vit = torch.nn.Linear(2, 2)\n    return vit,")
    )
    config = load_config("digits", {"model.name": "narrow", "model.depth": None}, plugins=[plugin]).model
    with pytest.raises(ConfigError, match=r"model\.name = 'narrow': is not a vision transformer"):
        build_model(config, 3, 1, 8, seed=0)
