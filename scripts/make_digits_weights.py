"""Pretrain the small ViT that vitfleet ships (``model.weights = "digits"``) on drawn digits; no real image is used.

Example: ``python scripts/make_digits_weights.py src/vitfleet/weights/digits.safetensors``

A server that starts a fleet usually has a pretrained model, but no images of its clients. Here it draws its own:
strokes with random widths, slants and bends, and characters of matplotlib's fonts. They are made as scikit-learn's
digits were from NIST's: 32 × 32 black and white pixels, counted in blocks of 4 × 4. The head is left out. It takes a
minute; a number of images after the file, for a trial, makes it shorter.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from vitfleet.config.schema import ModelConfig
from vitfleet.models.zoo import build_model

IMAGES, EPOCHS, BATCH, RATE = 8000, 10, 64, 2e-3
MODEL = ModelConfig(name="vit", patch_size=2, dim=32, depth=4, heads=4)
FONTS = ("DejaVuSans", "DejaVuSerif", "STIXGeneral", "cmr10", "cmss10", "cmtt10", "cmb10", "cmti10")
SIDE = 128  # pixels of a drawing
Points = Sequence[tuple[float, float]]
Canvas = NDArray[np.float32]
# Each digit as one of several ways to write it, each a list of strokes in the unit square.
STROKES: dict[int, list[list[Points]]] = {
    0: [[[(0.5, 0.05), (0.25, 0.3), (0.25, 0.7), (0.5, 0.95), (0.75, 0.7), (0.75, 0.3), (0.5, 0.05)]]],
    1: [
        [[(0.35, 0.25), (0.55, 0.05), (0.55, 0.95)]],
        [[(0.5, 0.05), (0.5, 0.95)]],
        [[(0.35, 0.22), (0.52, 0.05), (0.52, 0.95)], [(0.3, 0.95), (0.75, 0.95)]],
    ],
    2: [
        [
            [(0.25, 0.25), (0.35, 0.08), (0.6, 0.05), (0.75, 0.25), (0.65, 0.5), (0.25, 0.92)],
            [(0.25, 0.92), (0.8, 0.92)],
        ],
        [[(0.25, 0.2), (0.5, 0.05), (0.75, 0.22), (0.6, 0.55), (0.3, 0.8), (0.25, 0.92), (0.45, 0.85), (0.8, 0.95)]],
    ],
    3: [
        [
            [(0.25, 0.12), (0.55, 0.05), (0.72, 0.22), (0.62, 0.42), (0.42, 0.48)],
            [(0.42, 0.48), (0.68, 0.55), (0.75, 0.78), (0.5, 0.95), (0.22, 0.85)],
        ]
    ],
    4: [
        [[(0.6, 0.05), (0.2, 0.65)], [(0.2, 0.65), (0.85, 0.65)], [(0.65, 0.4), (0.6, 0.95)]],
        [[(0.3, 0.05), (0.25, 0.5)], [(0.25, 0.5), (0.75, 0.5)], [(0.75, 0.05), (0.7, 0.95)]],
    ],
    5: [
        [
            [(0.75, 0.06), (0.32, 0.06)],
            [(0.32, 0.06), (0.28, 0.45)],
            [(0.28, 0.45), (0.6, 0.42), (0.75, 0.65), (0.6, 0.92), (0.25, 0.9)],
        ]
    ],
    6: [[[(0.62, 0.05), (0.35, 0.4), (0.28, 0.72), (0.5, 0.95), (0.72, 0.75), (0.55, 0.52), (0.3, 0.68)]]],
    7: [
        [[(0.2, 0.08), (0.8, 0.08)], [(0.8, 0.08), (0.5, 0.5), (0.4, 0.95)]],
        [[(0.2, 0.08), (0.8, 0.08)], [(0.8, 0.08), (0.5, 0.5), (0.4, 0.95)], [(0.3, 0.5), (0.72, 0.5)]],
    ],
    8: [
        [
            [(0.5, 0.5), (0.3, 0.3), (0.5, 0.05), (0.7, 0.28), (0.5, 0.5)],
            [(0.5, 0.5), (0.27, 0.75), (0.5, 0.95), (0.73, 0.75), (0.5, 0.5)],
        ]
    ],
    9: [
        [[(0.7, 0.3), (0.5, 0.5), (0.3, 0.3), (0.5, 0.06), (0.7, 0.25), (0.66, 0.6), (0.55, 0.95)]],
        [[(0.7, 0.3), (0.5, 0.5), (0.3, 0.3), (0.5, 0.06), (0.7, 0.25), (0.68, 0.65), (0.5, 0.95), (0.3, 0.9)]],
    ],
}


def curve(points: NDArray[Any], steps: int = 8) -> NDArray[Any]:
    """Return a Catmull-Rom curve through points; a straight line stays one."""
    if len(points) < 3:
        return points
    p = np.vstack([2 * points[0] - points[1], points, 2 * points[-1] - points[-2]])
    found = []
    for i in range(1, len(p) - 2):
        a, b, c, d = p[i - 1 : i + 3]
        for t in np.linspace(0, 1, steps, endpoint=False):
            found.append(
                0.5 * (2 * b + (c - a) * t + (2 * a - 5 * b + 4 * c - d) * t**2 + (3 * b - a - 3 * c + d) * t**3)
            )
    return np.array([*found, p[-2]])


def random_slant(rng: np.random.Generator) -> NDArray[Any]:
    """Return a random rotation, shear and stretch."""
    angle, shear, stretch = math.radians(rng.normal(0, 8)), rng.normal(0, 0.2), math.exp(rng.normal(0, 0.2))
    rotation = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    return rotation @ np.array([[stretch, shear], [0, 1]])


def written(label: int, rng: np.random.Generator) -> Image.Image:
    """Draw a digit by strokes."""
    ways = STROKES[label]
    strokes = [np.array(stroke) for stroke in ways[rng.integers(len(ways))]]
    slant = random_slant(rng)
    curves = [curve(stroke + rng.normal(0, 0.045, stroke.shape)) @ slant.T for stroke in strokes]
    low, high = np.vstack(curves).min(0), np.vstack(curves).max(0)
    pen = int(rng.integers(10, 22))
    extent = np.maximum(high - low, 1e-3)
    height = SIDE - pen  # the digit fills the height
    width = min(extent[0] * height / extent[1], SIDE - pen - 4)
    left = float(np.clip((SIDE - width) / 2 + rng.normal(0, 5), pen / 2, SIDE - pen / 2 - width))
    image = Image.new("L", (SIDE, SIDE))
    draw = ImageDraw.Draw(image)
    for line in curves:
        scaled = (line - low) / extent * [width, height] + [left, pen / 2]
        points = [(float(x), float(y)) for x, y in scaled]
        draw.line(points, fill=255, width=pen, joint="curve")
        for x, y in (points[0], points[-1]):
            draw.ellipse((x - pen / 2, y - pen / 2, x + pen / 2, y + pen / 2), fill=255)
    return image


def printed(label: int, fonts: Sequence[ImageFont.FreeTypeFont], rng: np.random.Generator) -> Image.Image:
    """Draw a digit of a font."""
    image = Image.new("L", (SIDE, SIDE))
    font = fonts[rng.integers(len(fonts))]
    ImageDraw.Draw(image).text((SIDE / 2, SIDE / 2), str(label), fill=255, font=font, anchor="mm")
    m = np.linalg.inv(random_slant(rng))
    shift = np.full(2, SIDE / 2) - m @ np.full(2, SIDE / 2)
    image = image.transform(
        (SIDE, SIDE), Image.Transform.AFFINE, (m[0, 0], m[0, 1], shift[0], m[1, 0], m[1, 1], shift[1])
    )
    box = image.getbbox()
    assert box is not None
    width = int(np.clip(SIDE * (box[2] - box[0]) / (box[3] - box[1]), 24, SIDE - 16))
    canvas = Image.new("L", (SIDE, SIDE))
    canvas.paste(image.crop(box).resize((width, SIDE)), ((SIDE - width) // 2, 0))
    return canvas


def count_blocks(image: Image.Image) -> Canvas:
    """Return 8 × 8 values 0…16: the white pixels of each block of 4 × 4."""
    small = np.asarray(image.resize((32, 32), Image.Resampling.BOX)) > 127
    counts: Canvas = small.reshape(8, 4, 8, 4).sum((1, 3), dtype=np.float32)
    return counts


def pretrain(pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Train the model on images with values 0…1 and return its weights without the head."""
    net = build_model(MODEL, num_classes=10, channels=1, data_image_size=8, seed=0)
    vit = net.module.vit.requires_grad_(True).train()
    images = (pixels - net.mean[0]) / net.std[0]
    optimizer = torch.optim.AdamW(vit.parameters(), lr=RATE, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * math.ceil(len(images) / BATCH))
    generator = torch.Generator().manual_seed(0)
    for epoch in range(EPOCHS):
        losses = []
        for batch in torch.randperm(len(images), generator=generator).split(BATCH):
            loss = F.cross_entropy(vit(images[batch]), labels[batch], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        print(f"epoch {epoch + 1} of {EPOCHS}: loss {np.mean(losses):.3f}", flush=True)
    # Half precision: half the size in the package, no difference in what is learned from it.
    return {name: tensor.half() for name, tensor in vit.state_dict().items() if not name.startswith("head.")}


def main() -> None:
    """Draw the images, train, and write the file."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    files = sorted((Path(mpl.get_data_path()) / "fonts/ttf").glob("*.ttf"))
    chosen = [file for file in files if file.name.startswith(FONTS) and "Display" not in file.name]
    fonts = [ImageFont.truetype(str(file), 80) for file in chosen]
    count = int(sys.argv[2]) if len(sys.argv) > 2 else IMAGES
    labels = rng.integers(0, 10, count)
    drawings = [
        written(int(label), rng) if index % 4 else printed(int(label), fonts, rng) for index, label in enumerate(labels)
    ]
    images = np.stack([count_blocks(drawing) for drawing in drawings])
    pixels = torch.from_numpy(np.round(images * (255 / 16)) / 255).float().unsqueeze(1)
    save_file(pretrain(pixels, torch.from_numpy(labels)), sys.argv[1])


if __name__ == "__main__":
    main()
