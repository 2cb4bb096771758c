"""The formats that hold a graph: ONNX (also with eight-bit weights), torch.export's program, and ExecuTorch's.

ExecuTorch's programs run on phones and microcontrollers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitfleet.errors import UserError
from vitfleet.exporters.graph import ExportGraph

INPUT, OUTPUT = "images", "logits"
METADATA_FILE = "vitfleet.json"  # inside a program of torch.export
BATCH = 32
REMEDY = "--to onnx needs packages that are not installed: pip install 'vitfleet[export]'"


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
