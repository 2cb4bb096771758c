"""torch.export's program, and ExecuTorch's, which phones and microcontrollers run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitfleet.errors import UserError
from vitfleet.exporters.graph import ExportGraph

METADATA_FILE = "vitfleet.json"


def write_torch_export(graph: ExportGraph, path: Path) -> None:
    """Write the graph as ``torch.export.load`` reads it, for any number of images, with ``vitfleet.json`` inside."""
    torch.export.save(
        _program(graph, batched=True), path, extra_files={METADATA_FILE: json.dumps(graph.info.as_json())}
    )


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
        constant_methods={"vitfleet": json.dumps(graph.info.as_json())},
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
