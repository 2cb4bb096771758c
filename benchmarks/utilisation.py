"""The fraction of a machine's matrix-product speed that a ViT's training step reaches; it calibrates hardware profiles.

Example::

    OMP_NUM_THREADS=1 python benchmarks/utilisation.py
    python benchmarks/utilisation.py --device cuda --model vit_base_patch16_224 --batch 256
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from vitfleet.config.schema import AugmentConfig, Config, MachineConfig, ModelConfig
from vitfleet.costs.flops import full_flops
from vitfleet.data.images import ImageSet, Shard
from vitfleet.message import to_device
from vitfleet.models.zoo import build_model
from vitfleet.training.execution.settings import ExecutionSettings, set_up_execution
from vitfleet.training.local_training import LocalTraining
from vitfleet.training.stacking.inputs import RngContext
from vitfleet.training.trainer import Trainer, preprocess_for

CLASSES, SIDE, TRIES = 100, 224, 3


def matrix_rate(machine: ExecutionSettings, size: int) -> float:
    """Return the FLOP/s of a large matrix product, the best of several tries."""
    left, right = (torch.randn(size, size, device=machine.device) for _ in range(2))
    best = 0.0
    for _ in range(TRIES):
        _synchronize(machine)
        started = time.perf_counter()
        with machine.autocast():
            left @ right
        _synchronize(machine)
        best = max(best, 2 * size**3 / (time.perf_counter() - started))
    return best


def training_rate(machine: ExecutionSettings, model: str, batch: int, steps: int) -> float:
    """Return the FLOP/s of full training, the median of several tries."""
    config = Config.model_validate({"train": {"batch_size": batch}})
    net = build_model(ModelConfig(name=model), CLASSES, 3, SIDE, 0).to(machine.device)
    trainer = Trainer(net, preprocess_for(net, machine.device), config.train, AugmentConfig(), 2, machine)
    weights = to_device(net.initial_weights(), machine.device)
    pixels = torch.zeros(steps * batch, 3, SIDE, SIDE, dtype=torch.uint8, device=machine.device)
    images = ImageSet(pixels, torch.arange(len(pixels), device=machine.device) % CLASSES)
    flops = full_flops(net).training

    def seconds(samples: int) -> float:
        _synchronize(machine)
        started = time.perf_counter()
        shard = Shard(images, torch.arange(samples, device=machine.device))
        trainer.train(LocalTraining(weights, net.parts.whole, 1), shard, RngContext(0, 1, 0))
        _synchronize(machine)
        return time.perf_counter() - started

    seconds(batch)
    # The difference of a long and a short training: everything but steps cancels out.
    times = [seconds(steps * batch) - seconds(batch) for _ in range(TRIES)]
    return flops * (steps - 1) * batch / statistics.median(times)


def _synchronize(machine: ExecutionSettings) -> None:
    if machine.device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--size", type=int, default=2048, help="size of the square matrices")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    machine = set_up_execution(MachineConfig(device=args.device))
    product = matrix_rate(machine, args.size)
    training = training_rate(machine, args.model, args.batch, args.steps)
    print(f"{args.model}, batch {args.batch}, {machine.device}, torch {torch.__version__}")
    print(
        f"matrix product {product / 1e9:.1f} GFLOP/s, training {training / 1e9:.1f} GFLOP/s: {training / product:.2f}"
    )


if __name__ == "__main__":
    main()
