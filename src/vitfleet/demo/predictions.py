"""What the page shows for one image: each model's prediction, and where it looks."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from vitfleet.data.decode import UNREADABLE, fit_image
from vitfleet.errors import UserError
from vitfleet.inference.attention import attention_rollout
from vitfleet.inference.classifier import Classifier

TOP = 5
SHOWN_SIZE = 320  # pixels of the image on the page
OVERLAY_COLOUR = (255, 96, 0)
OVERLAY_OPACITY = 0.8


def predict_views(models: Mapping[str, Classifier], data: bytes) -> dict[str, Any]:
    """Return the page's content for an image file: the image as the models see it, and a view per model."""
    first = next(iter(models.values()))
    try:
        with Image.open(io.BytesIO(data)) as image:
            shown = fit_image(image, SHOWN_SIZE, 3)
            pixels = torch.from_numpy(fit_image(image, first.image_size, first.channels).copy())[None]
    except UNREADABLE as error:
        raise UserError(f"this is not an image that can be read ({type(error).__name__})") from None
    views = [{"title": title, **_view(model, pixels)} for title, model in models.items()]
    return {"image": _data_url(Image.fromarray(shown.transpose(1, 2, 0))), "models": views}


def _view(model: Classifier, pixels: torch.Tensor) -> dict[str, Any]:
    """Return the most probable classes, and the attention rollout as an image; ``None`` if the model has none."""
    prediction = model.prediction(model.probabilities(pixels)[0].tolist())
    rollout = attention_rollout(model, pixels)
    overlay = None if rollout is None else _data_url(overlay_image(rollout[0].cpu().numpy()))
    return {"top": prediction.top(TOP), "overlay": overlay}


def overlay_image(shares: NDArray[np.float32]) -> Image.Image:
    """Return the patches' shares as a transparent image: the more opaque, the larger the share."""
    low, high = float(shares.min()), float(shares.max())
    heat = (shares - low) / (high - low) if high > low else np.zeros_like(shares)
    alpha = Image.fromarray((255 * OVERLAY_OPACITY * heat).astype(np.uint8))
    alpha = alpha.resize((SHOWN_SIZE, SHOWN_SIZE), Image.Resampling.BICUBIC)
    overlay = Image.new("RGBA", alpha.size, (*OVERLAY_COLOUR, 0))
    overlay.putalpha(alpha)
    return overlay


def _data_url(image: Image.Image) -> str:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"
