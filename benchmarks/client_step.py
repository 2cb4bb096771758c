"""Cost of a client's training step: FLOPs, time and peak memory of EFTViT and the baselines against fed-full.

Example::

    python benchmarks/client_step.py --model vit_base_patch16_224 --methods fed-full eftvit fed-head fed-lora

Every method runs in a separate process, so that peak memory is measured separately. Weights are random, images have 224
pixels. FLOPs are those of forward and backward, per sample; the time of a step is a median.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from functools import partial

import torch

from vitfleet.config.schema import AugmentConfig, Config, MachineConfig, ModelConfig
from vitfleet.costs.cost_model import NO_LABELS, CostModel
from vitfleet.data.images import ImageSet, Shard
from vitfleet.message import State, to_device
from vitfleet.methods import ClientRoundInput, MethodContext, adapt_model, make_method
from vitfleet.models.zoo import build_model
from vitfleet.training.execution.settings import set_up_execution
from vitfleet.training.stacking.inputs import RngContext
from vitfleet.training.trainer import Trainer, preprocess_for

CLASSES = 100
ROUNDS = 2


def measure(method_name: str, model: str, batch: int, steps: int, device: str) -> dict[str, float]:
    masked = method_name == "eftvit"
    config = Config.model_validate(
        {
            "rounds": ROUNDS,
            "method": {"name": method_name},
            "train": {"batch_size": batch, "mask_ratio": 0.75 if masked else 0.0, "epochs": 1},
        }
    )
    machine = set_up_execution(MachineConfig(device=device))
    net = build_model(ModelConfig(name=model), CLASSES, 3, 224, 0, partial(adapt_model, config.method)).to(
        machine.device
    )
    context = MethodContext(config, net, CLASSES, machine.device)
    method = make_method(config.method, context)
    weights = to_device(net.initial_weights(), machine.device)
    trainer = Trainer(net, preprocess_for(net, machine.device), config.train, AugmentConfig(), ROUNDS, machine)

    count = (steps + 1) * batch
    pixels = torch.zeros(count, 3, 224, 224, dtype=torch.uint8, device=machine.device)
    images = ImageSet(pixels, torch.arange(count, device=machine.device) % CLASSES)

    def train(samples: int) -> None:
        shard = Shard(images, torch.arange(samples, device=machine.device))
        server: State = method.initial_state(weights)
        down, base = method.message_to_client(server, 1, 0, None), method.initial_broadcast(weights).tensors
        job = ClientRoundInput(1, 0, down, base, None, shard)
        trainer.train(next(method.client_update(job)), shard, RngContext(0, 1, 0))

    def seconds(samples: int) -> float:
        started = time.perf_counter()
        train(samples)
        if machine.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    before = _peak(machine.device)
    train(batch)  # warm-up
    peak = _peak(machine.device) - before
    train(count)  # captures the steps of the longer training
    # The difference of a long and a short training: everything but steps cancels out.
    times = [(seconds(count) - seconds(batch)) / steps for _ in range(3)]
    cost_model = CostModel(method, net, config.train)
    flops = cost_model.average(cost_model.dry_run(method.cost_round, 0, NO_LABELS))
    return {
        "train_gflops_per_sample": flops.training / 1e9,
        "step_seconds": statistics.median(times),
        "peak_bytes": peak,
        "trainable_params": net.parts.count_parameters(method.trainable),
    }


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--methods", nargs="+", default=["fed-full", "eftvit"])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--one", help="measure this method in this process, and print the result as JSON")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.model, args.batch, args.steps, args.device)))
        return
    costs: dict[str, dict[str, float]] = {}
    for method in args.methods:
        command = [sys.executable, __file__, *sys.argv[1:], "--one", method]
        process = subprocess.run(command, capture_output=True, text=True)
        if process.returncode:
            print(process.stderr[-2000:])
            continue
        costs[method] = json.loads(process.stdout.splitlines()[-1])
        print(method, json.dumps(costs[method]), flush=True)
    full = costs["fed-full"]
    print(f"\n{args.model}, batch {args.batch}, torch {torch.__version__}, Python {platform.python_version()}\n")
    print("| method | GFLOPs per sample | ratio | step, s | ratio | peak memory, MiB | ratio | trainable |")
    print("|---|---|---|---|---|---|---|---|")
    for method, cost in costs.items():
        cells = [
            f"{cost['train_gflops_per_sample']:.2f}",
            f"{full['train_gflops_per_sample'] / cost['train_gflops_per_sample']:.2f}",
            f"{cost['step_seconds']:.4f}",
            f"{full['step_seconds'] / cost['step_seconds']:.2f}",
            f"{cost['peak_bytes'] / 2**20:.0f}",
            f"{full['peak_bytes'] / cost['peak_bytes']:.2f}",
            f"{cost['trainable_params']:,}",
        ]
        print(f"| {method} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
