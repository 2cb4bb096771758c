"""The weights as other libraries load them: timm's files, and low-rank factors as an adapter of Hugging Face's `peft`.

A model is loaded with ``timm.create_model("local-dir:FOLDER", pretrained=True)``. An adapter lies beside the frozen
model that it adapts. vitfleet adapts q and v alone, timm has q, k and v in one layer; one low-rank update of that layer
is the same: the factors A below each other, the factors B in the rows of their slice.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitfleet.config.schema import ModelConfig
from vitfleet.errors import UserError
from vitfleet.exporters.graph import ExportGraph
from vitfleet.files import write_atomically
from vitfleet.inference.classifier import Classifier
from vitfleet.models.adapters import LowRankLinear
from vitfleet.models.families.vit import DEFAULT_DEPTH, DEFAULT_PATCH_SIZE, PLAIN_VIT
from vitfleet.models.parts import LORA_PREFIX
from vitfleet.models.zoo import build_model
from vitfleet.wire import safetensors_chunks

# A plain ViT of any size is one of timm's with other arguments.
PLAIN_ARCHITECTURE = "vit_base_patch16_224"
ADAPTER_FOLDER = "adapter"
BASE_FILE = "base.safetensors"
HEAD = "head"


def write_timm(model: Classifier, graph: ExportGraph, folder: Path) -> nn.Module:
    """Write ``model.safetensors`` and ``config.json`` in timm's form; return the model that timm builds from them."""
    import timm

    if not graph.is_plain:
        name = model.info.method["name"]
        added = f"{name} adds parts" if model.info.head is None else "its head sees features"
        raise UserError(f"--to timm: {added} that timm's model does not have; use --to onnx or torch-export")
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


def has_lora(model: Classifier) -> bool:
    """Return whether a model has low-rank factors."""
    return any(isinstance(module, LowRankLinear) for module in model.vit.modules())


def write_peft_adapter(model: Classifier, folder: Path) -> None:
    """Write the adapter and the head as ``adapter/``, and the frozen weights as ``base.safetensors``."""
    from peft import LoraConfig, get_peft_model

    layers = {path: module for path, module in model.vit.named_modules() if isinstance(module, LowRankLinear)}
    base = frozen_base(model)
    weights = {name: tensor for name, tensor in base.state_dict().items() if not name.startswith(f"{HEAD}.")}
    write_atomically(folder / BASE_FILE, safetensors_chunks(weights, {"format": "pt"}))
    ranks = {path: layer.joint_factors()[0].shape[0] for path, layer in layers.items()}
    any_path = next(iter(layers))
    config = LoraConfig(
        r=ranks[any_path],
        lora_alpha=layers[any_path].scale * ranks[any_path],
        target_modules=list(layers),
        rank_pattern=ranks,
        # peft scales by alpha / rank.
        alpha_pattern={path: layer.scale * ranks[path] for path, layer in layers.items()},
        modules_to_save=[HEAD],
    )
    adapted: Any = get_peft_model(base, config)
    with torch.no_grad():
        for path, layer in layers.items():
            target = adapted.base_model.model.get_submodule(path)
            a, b = layer.joint_factors()
            target.lora_A["default"].weight.copy_(a)
            target.lora_B["default"].weight.copy_(b)
        adapted.base_model.model.get_submodule(HEAD).modules_to_save["default"].load_state_dict(
            model.vit.get_submodule(HEAD).state_dict()
        )
    adapted.peft_config["default"].base_model_name_or_path = str(model.info.model["name"])
    adapted.save_pretrained(folder / ADAPTER_FOLDER, save_embedding_layers=False)  # True would ask the hub


def frozen_base(model: Classifier) -> nn.Module:
    """Return timm's module with the weights that were frozen in training, without the low-rank updates."""
    data = model.info.data
    net = build_model(
        ModelConfig.model_validate(model.info.model), len(data.classes), data.channels, data.image_size, 0
    )
    weights = model.vit.state_dict().items()
    net.module.vit.load_state_dict(
        {name: tensor for name, tensor in weights if not name.rpartition(".")[2].startswith(LORA_PREFIX)}
    )
    return net.module.vit.eval()
