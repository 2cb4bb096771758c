"""A model as timm loads it: ``timm.create_model("local-dir:FOLDER", pretrained=True)``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from vitfleet.config.schema import ModelConfig
from vitfleet.errors import UserError
from vitfleet.exporters.graph import ExportGraph
from vitfleet.files import write_atomically
from vitfleet.inference.classifier import Classifier
from vitfleet.models.families.vit import DEFAULT_DEPTH, DEFAULT_PATCH_SIZE, PLAIN_VIT
from vitfleet.wire import safetensors_chunks

# A plain ViT of any size is one of timm's with other arguments.
PLAIN_ARCHITECTURE = "vit_base_patch16_224"


def write_timm(model: Classifier, graph: ExportGraph, folder: Path) -> nn.Module:
    """Write ``model.safetensors`` and ``config.json`` in timm's form, and return the model as timm builds it from them.

    Raises
    ------
    UserError
        The model has parts that timm's does not have (prompts), or is not one that timm can build.
    """
    import timm

    if not graph.is_plain:
        name = model.info.method["name"]
        raise UserError(f"--to timm: {name} adds parts that timm's model does not have; use --to onnx or torch-export")
    architecture, arguments = timm_arguments(model)
    weights = graph.network.state_dict()
    write_atomically(folder / "model.safetensors", safetensors_chunks(weights, {"format": "pt"}))
    write_atomically(folder / "config.json", json.dumps(_config(model, architecture, arguments), indent=2).encode())
    # Through the file: what was written is what is checked.
    from safetensors.torch import load_file

    built: nn.Module = timm.create_model(architecture, num_classes=len(model.classes), **arguments)
    built.load_state_dict(load_file(folder / "model.safetensors"))
    return built.eval().requires_grad_(False)


def timm_arguments(model: Classifier) -> tuple[str, dict[str, Any]]:
    """Return the name of the architecture in timm, and the arguments of ``timm.create_model`` besides the classes."""
    import timm

    config = ModelConfig.model_validate(model.info.model)
    common = {"in_chans": model.channels, "drop_path_rate": 0.0}
    if config.name == PLAIN_VIT:
        return PLAIN_ARCHITECTURE, {
            **common,
            "img_size": model.info.input_size,
            "patch_size": config.patch_size or DEFAULT_PATCH_SIZE,
            "embed_dim": config.dim,
            "depth": config.depth or DEFAULT_DEPTH,
            "num_heads": config.heads,
            "mlp_ratio": config.mlp_ratio,
        }
    if not timm.is_model(config.name):
        raise UserError(f"--to timm: the model {config.name} is not one of timm's; export to onnx or torch-export")
    sizes = {"img_size": config.image_size, "patch_size": config.patch_size, "depth": config.depth}
    return config.name, {**common, **{key: value for key, value in sizes.items() if value is not None}}


def _config(model: Classifier, architecture: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return ``config.json`` as timm writes it for the Hugging Face hub."""
    size = model.info.input_size
    return {
        "architecture": architecture,
        "num_classes": len(model.classes),
        "num_features": model.net.embed_dim,
        "label_names": list(model.classes),
        "model_args": arguments,
        "pretrained_cfg": {
            "input_size": [model.channels, size, size],
            "fixed_input_size": True,
            "interpolation": "bilinear",
            "crop_pct": 1.0,
            "crop_mode": "center",
            "mean": list(model.info.mean),
            "std": list(model.info.std),
            "num_classes": len(model.classes),
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }
