"""The module that is exported, from pixels in 0…1 to logits, and the formats that hold it.

These are ONNX (also with eight-bit weights), torch.export's program, and ExecuTorch's, which runs on phones and
microcontrollers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitfleet.config.schema import ModelConfig
from vitfleet.errors import UserError
from vitfleet.inference.classifier import Classifier
from vitfleet.models.adapters import merged_weights
from vitfleet.models.zoo import build_model

INPUT, OUTPUT = "images", "logits"
METADATA_FILE = "vitfleet.json"  # inside a program of torch.export
BATCH = 32
REMEDY = "--to onnx needs packages that are not installed: pip install 'vitfleet[export]'"


@dataclass(frozen=True)
class ExportInfo:
    """What is written into an exported model beside its weights.

    The graph's input is ``[batch, channels, input_size, input_size]``, pixels in 0…1: an image is cropped to a square
    at its centre and resized to it. The normalisation is part of the graph.
    """

    classes: tuple[str, ...]  # names, in the order of the outputs
    channels: int
    input_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    model_size: int  # height and width of the network's own input; a smaller image is resized inside the graph


class ExportGraph(nn.Module):
    """A trained model as the graph that is exported.

    Low-rank factors are merged into the weights. Images smaller than the network's input are resized inside the graph,
    as in training; larger ones are expected to be resized before. The model must be on the CPU.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        info = model.info
        self.info = ExportInfo(
            classes=info.data.classes,
            channels=info.data.channels,
            input_size=min(info.data.image_size, info.input_size),
            mean=info.mean,
            std=info.std,
            model_size=info.input_size,
        )
        plain = plain_timm_model(model)
        self.is_plain = plain is not None  # timm's own module, or the plain ViT, which is the same
        self.network: nn.Module = AdaptedNetwork(model) if plain is None else plain
        self.register_buffer("mean", model.mean.detach().clone()[:, None, None])
        self.register_buffer("std", model.std.detach().clone()[:, None, None])
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of images in 0…1."""
        return self.with_network(self.network, images)

    def with_network(self, network: nn.Module, images: Tensor) -> Tensor:
        """Return the logits that another network computes instead of its own."""
        if self.info.input_size != self.info.model_size:
            size = (self.info.model_size, self.info.model_size)
            images = F.interpolate(images, size, mode="bilinear", antialias=False)
        logits: Tensor = network((images - self.mean) / self.std)
        return logits

    def prepare(self, pixels: Tensor) -> Tensor:
        """Return uint8 images ``[batch, channels, height, width]`` as the graph takes them."""
        images = pixels.float().div(255)
        size = self.info.input_size
        if images.shape[-1] == size:
            return images
        return F.interpolate(images, (size, size), mode="bilinear", antialias=images.shape[-1] > size)

    def example(self, batch: int = 2) -> Tensor:
        """Return images of the right form, the same every time."""
        size = self.info.input_size
        generator = torch.Generator().manual_seed(0)
        return torch.rand(batch, self.info.channels, size, size, generator=generator)


class AdaptedNetwork(nn.Module):
    """A ViT with parts that timm's own forward pass would ignore, such as prompts."""

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        """Return logits."""
        return self.model.logits(pixels)


def plain_timm_model(model: Classifier) -> nn.Module | None:
    """Return timm's module with the trained weights, low-rank factors merged; ``None`` if they have no place in it."""
    data = model.info.data
    config = ModelConfig.model_validate(model.info.model)
    net = build_model(config, len(data.classes), data.channels, data.image_size, 0)
    vit, weights = net.module.vit, merged_weights(model.vit)
    if vit.state_dict().keys() != weights.keys():
        return None
    vit.load_state_dict(weights)
    return vit.eval().requires_grad_(False)


def write_onnx(graph: ExportGraph, path: Path) -> None:
    """Write the graph, for any number of images at a time, with the class names and the input's form as metadata."""
    try:
        import onnx
        import onnxscript  # noqa: F401  (torch's exporter needs it)
    except ImportError:
        raise UserError(REMEDY) from None
    batch = torch.export.Dim("batch")
    program = torch.onnx.export(
        graph,
        (graph.example(),),
        input_names=[INPUT],
        output_names=[OUTPUT],
        dynamic_shapes={"images": {0: batch}},
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    model: Any = program.model_proto
    _set_metadata(model, graph)
    onnx.checker.check_model(model)
    onnx.save(model, str(path))


def quantise_onnx(source: Path, path: Path) -> None:
    """Write a copy whose matrix products have eight-bit weights; activations are quantised as they are computed."""
    try:
        import onnx
        from onnxruntime.quantization import QuantType, quantize_dynamic
    except ImportError:
        raise UserError(REMEDY) from None
    model = onnx.load(str(source))
    # The exporter's shapes of intermediate values would contradict those that the quantiser infers.
    del model.graph.value_info[:]
    logging.getLogger().addFilter(_no_advice)
    try:
        quantize_dynamic(model, str(path), weight_type=QuantType.QInt8, per_channel=True)
    finally:
        logging.getLogger().removeFilter(_no_advice)


def onnx_logits(path: Path, images: Tensor) -> Tensor:
    """Return the logits that onnxruntime computes on the CPU."""
    try:
        import onnxruntime
    except ImportError:
        raise UserError(REMEDY) from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    batches = np.array_split(images.numpy().astype(np.float32), -(-len(images) // BATCH))
    return torch.from_numpy(np.concatenate([session.run([OUTPUT], {INPUT: batch})[0] for batch in batches]))


def _no_advice(record: logging.LogRecord) -> bool:
    """Drop the quantiser's advice to simplify the graph first: torch's exporter has done that."""
    return "pre-processing before quantization" not in record.getMessage()


def _set_metadata(model: Any, graph: ExportGraph) -> None:
    for key, value in {**asdict(graph.info), "input": "pixels in 0…1, [batch, channels, height, width]"}.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = f"vitfleet.{key}", value if isinstance(value, str) else json.dumps(value)


def write_torch_export(graph: ExportGraph, path: Path) -> None:
    """Write the graph as ``torch.export.load`` reads it, for any number of images, with ``vitfleet.json`` inside."""
    torch.export.save(_program(graph, batched=True), path, extra_files={METADATA_FILE: json.dumps(asdict(graph.info))})


def torch_export_logits(path: Path, images: Tensor) -> Tensor:
    """Return the logits of a program that was written."""
    with torch.inference_mode():
        logits: Tensor = torch.export.load(path).module()(images)
    return logits


def write_executorch(graph: ExportGraph, path: Path) -> None:
    """Write a program for ExecuTorch's XNNPACK backend, for one image at a time; classes are a method of it."""
    try:
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower
    except ImportError as error:
        raise UserError(
            f"--to executorch: pip install executorch first ({error}), or use --to torch-export, which ExecuTorch takes"
        ) from None
    lowered = to_edge_transform_and_lower(
        _program(graph, batched=False),
        partitioner=[XnnpackPartitioner()],
        constant_methods={"vitfleet": json.dumps(asdict(graph.info))},
    )
    path.write_bytes(lowered.to_executorch().buffer)


def executorch_logits(path: Path, images: Tensor) -> Tensor:
    """Return the logits that ExecuTorch's runtime computes, one image after the other."""
    from executorch.runtime import Runtime

    forward: Any = Runtime.get().load_program(path).load_method("forward")
    return torch.cat([forward.execute([image[None].contiguous()])[0].clone() for image in images])


def _program(graph: ExportGraph, batched: bool) -> torch.export.ExportedProgram:
    shapes = {"images": {0: torch.export.Dim("batch")}} if batched else None
    return torch.export.export(graph, (graph.example(2 if batched else 1),), dynamic_shapes=shapes)


#: The file of each format, the function that writes it, and the one that computes logits from it.
GRAPH_FORMATS: dict[str, tuple[str, Callable[[ExportGraph, Path], None], Callable[[Path, Tensor], Tensor]]] = {
    "onnx": ("model.onnx", write_onnx, onnx_logits),
    "executorch": ("model.pte", write_executorch, executorch_logits),
    "torch-export": ("model.pt2", write_torch_export, torch_export_logits),
}
