"""Runs and image folders that the tests of inference share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

import vitfleet
from vitfleet.config import load_config
from vitfleet.run.loop import run_rounds
from vitfleet.run.setup import open_run


def make_run(folder: Path, *overrides: str) -> vitfleet.Run:
    """Train a tiny run on digits and return it."""
    config = load_config("digits", overrides)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config.model_dump_json())
    run_rounds(open_run(config, folder))
    return vitfleet.load_run(folder)


def draw_photos(
    folder: Path, class_names: tuple[str, ...], per_class: int = 6, size: tuple[int, int] = (20, 16)
) -> None:
    """Write colour photos, one subfolder per class: each class has a colour of its own."""
    random = torch.Generator().manual_seed(0)
    for label, name in enumerate(class_names):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(per_class):
            pixels = torch.randint(0, 60, (size[1], size[0], 3), generator=random, dtype=torch.uint8)
            pixels[..., label % 3] += 190
            Image.fromarray(pixels.numpy()).save(folder / name / f"{number}.png")


@pytest.fixture(scope="session")
def photo_run(tmp_path_factory: pytest.TempPathFactory, tiny_overrides: tuple[str, ...]) -> vitfleet.Run:
    """Return a run on photos of three classes, which a tiny model learns, with EFTViT's local modules."""
    root = tmp_path_factory.mktemp("photos")
    draw_photos(root / "train", ("grass", "roof", "sea"), 20)
    keys = ("method.name=eftvit", "method.local_layers=1", "train.mask_ratio=0.5", "train.lr=3e-3", "train.epochs=3")
    sizes = ("fleet.clients=3", "fleet.per_round=3", "data.partition.kind=iid", "data.limit=60")
    tiny = [override for override in tiny_overrides if not override.startswith(("fleet", "data", "train.epochs"))]
    return make_run(root / "run", *tiny, f"data.path={root / 'train'}", "fleet.devices={}", *keys, *sizes)
