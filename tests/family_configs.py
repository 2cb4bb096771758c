"""The smallest model of every family, for tests that train all of them."""

from __future__ import annotations

from vitfleet.config.schema import ModelConfig
from vitfleet.models.net import Net
from vitfleet.models.zoo import build_model

IMAGE_SIZE = 32
TINY_FAMILIES = {
    "vit": ModelConfig(patch_size=8, dim=16, depth=2, heads=2),
    "deit": ModelConfig(name="deit", patch_size=8, params={"dim": 16, "depth": 2, "heads": 2}),
    "cait": ModelConfig(name="cait", patch_size=8, params={"dim": 16, "depth": 2, "class_depth": 1, "heads": 2}),
    "cvt": ModelConfig(name="cvt", params={"dims": [8, 16], "depths": [1, 1], "heads": [1, 2]}),
    "levit": ModelConfig(
        name="levit",
        params={"dims": [16, 24], "depths": [1, 1], "heads": [2, 2], "key_dim": 8, "stem_stride": 8},
    ),
    "pvt": ModelConfig(
        name="pvt",
        params={"dims": [8, 16], "depths": [1, 1], "heads": [1, 2], "mlp_ratios": [2, 2], "reductions": [2, 1]},
    ),
    "pit": ModelConfig(
        name="pit", patch_size=8, params={"head_dims": [8, 8], "depths": [1, 1], "heads": [1, 2], "stride": 8}
    ),
    "swin": ModelConfig(name="swin", patch_size=8, params={"dim": 8, "depths": [2, 1], "heads": [1, 2], "window": 2}),
    "t2t": ModelConfig(name="t2t", params={"dim": 16, "depth": 2, "heads": 2, "token_dim": 8}),
}
WITH_BATCH_NORM = ("cvt", "levit")
WITH_TOKEN_DROPPING = ("vit", "deit", "cait", "t2t")
WITH_UNIFORM_BLOCKS = ("vit", "deit", "t2t")


def tiny_family(name: str, num_classes: int = 4, channels: int = 1) -> Net:
    return build_model(TINY_FAMILIES[name], num_classes, channels, IMAGE_SIZE, seed=0)
