"""The problem that every contestant of peers.py solves: images, shards, clients per round, order of images, weights.

The problem is stored in a folder as plain tensors, so that a contestant needs nothing of vitfleet except the repair of
a broken torchvision. A contestant is a script, ``python CONTESTANT.py FOLDER PROCESSES THREADS``. It runs the rounds
and writes ``result.json`` (seconds of each round) and ``result.safetensors`` (the final weights) to the folder.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class ProblemSpec:
    """The hyperparameters of a problem."""

    clients: int
    per_round: int
    rounds: int
    epochs: int
    batch: int
    lr: float
    weight_decay: float
    bf16: bool
    device: str
    seed: int
    data_dir: str
    images: int | None
    beta: float


class Problem:
    """A problem, read from its folder.

    Attributes
    ----------
    round_clients
        The clients of each round, from the first round on.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        description = json.loads((folder / "problem.json").read_text())
        self.spec = ProblemSpec(**description["spec"])
        self.round_clients: list[list[int]] = description["round_clients"]
        self.device = torch.device(self.spec.device)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        return load_file(self.folder / "problem.safetensors")

    @cached_property
    def images(self) -> Tensor:
        return self.tensors["images"].to(self.device)

    @cached_property
    def labels(self) -> Tensor:
        return self.tensors["labels"].to(self.device)

    def epoch_orders(self, round: int, client: int) -> Tensor:
        """Return a client's images in a round in the order of training, ``[epochs, samples]``."""
        return self.tensors[f"order-{round}-{client}"].to(self.device)

    def samples(self) -> list[int]:
        """Return the number of samples that each round trains on."""
        return [
            sum(self.tensors[f"order-{round}-{client}"].numel() for client in clients)
            for round, clients in enumerate(self.round_clients, start=1)
        ]

    def model(self) -> Vit:
        """Return the model with its initial weights."""
        model = Vit()
        model.vit.load_state_dict(load_file(self.folder / "weights.safetensors"))
        return model.to(self.device)

    def autocast(self) -> torch.autocast:
        """Return the problem's precision."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.spec.bf16)

    def optimizer(self, parameters: Any, lr: float | None = None) -> torch.optim.Optimizer:
        """Return the problem's optimizer, in torch's fastest implementation."""
        rate = self.spec.lr if lr is None else lr
        return torch.optim.AdamW(parameters, lr=rate, weight_decay=self.spec.weight_decay, fused=True)


def save_problem(
    folder: Path,
    spec: ProblemSpec,
    round_clients: list[list[int]],
    tensors: dict[str, Tensor],
    weights: dict[str, Tensor],
) -> None:
    """Write a problem to its folder."""
    save_file(tensors, folder / "problem.safetensors")
    save_file(weights, folder / "weights.safetensors")
    (folder / "problem.json").write_text(json.dumps({"spec": asdict(spec), "round_clients": round_clients}))


class Vit(nn.Module):
    """TransFL's six-layer ViT, built by timm; its input are pixels as they are stored."""

    def __init__(self) -> None:
        super().__init__()
        import vitfleet  # noqa: F401  (makes timm importable with a CPU build of torch)

        # isort: split
        from timm.models.vision_transformer import VisionTransformer

        self.vit = VisionTransformer(
            img_size=32, patch_size=4, embed_dim=256, depth=6, num_heads=8, mlp_ratio=4.0, num_classes=10
        )

    def forward(self, pixels: Tensor) -> Tensor:
        return self.vit((pixels.float() / 255 - 0.5) / 0.5)


def train(model: Vit, problem: Problem, round: int, client: int) -> int:
    """Train a client with a plain PyTorch loop and return its number of samples."""
    orders = problem.epoch_orders(round, client)
    optimizer = problem.optimizer(model.parameters())
    model.train()
    for order in orders:
        for index in torch.split(order, problem.spec.batch):
            with problem.autocast():
                loss = F.cross_entropy(model(problem.images[index]), problem.labels[index])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    return orders.shape[1]


class Stopwatch:
    """Measures the time of each round and writes the result."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.seconds: list[float] = []
        self.ends: list[float] = []
        self.last = 0.0

    def start(self) -> None:
        (self.problem.folder / "started").touch()  # peers.py measures memory from here on
        self.last = self._now()

    def lap(self) -> None:
        now = self._now()
        self.seconds.append(now - self.last)
        self.ends.append(time.time())
        self.last = now

    def _now(self) -> float:
        if self.problem.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def finish(self, weights: dict[str, Tensor]) -> None:
        on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        save_file(on_cpu, self.problem.folder / "result.safetensors")
        (self.problem.folder / "result.json").write_text(json.dumps({"seconds": self.seconds, "ends": self.ends}))


def arguments() -> tuple[Path, int, int]:
    """Return the folder, the number of processes, and the CPU threads of each."""
    folder, processes, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    return Path(folder), int(processes), int(threads)
