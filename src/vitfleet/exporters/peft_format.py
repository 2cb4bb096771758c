"""Low-rank factors as an adapter of Hugging Face's `peft`, beside the frozen model that it adapts.

vitfleet adapts q and v alone, timm has q, k and v in one layer. One low-rank update of that layer is the same: the
factors A below each other, the factors B in the rows of their slice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitfleet.config.schema import ModelConfig
from vitfleet.errors import UserError
from vitfleet.files import write_atomically
from vitfleet.inference.classifier import Classifier
from vitfleet.models.adapters import LowRankLinear
from vitfleet.models.parts import LORA_PREFIX
from vitfleet.models.zoo import build_model
from vitfleet.wire import safetensors_chunks

ADAPTER_FOLDER = "adapter"
BASE_FILE = "base.safetensors"
HEAD = "head"


def has_lora(model: Classifier) -> bool:
    """Return whether a model has low-rank factors."""
    return any(isinstance(module, LowRankLinear) for module in model.vit.modules())


def write_peft_adapter(model: Classifier, folder: Path) -> None:
    """Write the adapter and the head as ``adapter/``, and the frozen weights as ``base.safetensors``."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise UserError("the adapter of a LoRA model needs peft: pip install 'vitfleet[export]'") from None
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
