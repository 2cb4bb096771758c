"""Training speed of every model family: a stacked round against an eager loop over the clients, in one run.

Examples::

    python benchmarks/families.py --out results                                # the small configurations, 20 clients
    python benchmarks/families.py --image-size 224 --clients 10 --samples 64   # the standard ones
    python benchmarks/families.py --clients 2 --samples 8 --batch 4 --repeats 1 --families cvt swin --device cpu

The ways are those of speed.py. *eager*: the family's own module with torch's batch norms, `torch.optim`, one client
after the other. *graph*: vitfleet, one client at a time in CUDA graphs. *stacked*: all clients stacked, in CUDA graphs.
The column `times eager` is the ratio to the eager loop of the same family.
"""

from __future__ import annotations

import argparse
import csv
import platform
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch

from speed import SEED, Task, eager_round, measure_seconds, vitfleet_round
from vitfleet.config.registry import MODELS
from vitfleet.config.schema import Config, MachineConfig, ModelConfig, TrainConfig
from vitfleet.data.images import ImageSet
from vitfleet.methods import MethodContext
from vitfleet.methods.averaging.fedavg import FedAvg, FedAvgParams
from vitfleet.models.families.request import ModelRequest
from vitfleet.models.zoo import build_model
from vitfleet.training.execution.settings import ExecutionSettings, set_up_execution

FAMILIES = ("vit", "deit", "cait", "cvt", "levit", "pvt", "pit", "swin", "t2t")
# The plain ViT is that of FedViT's experiments; the other families have sizes of their own.
PLAIN_VIT = ModelConfig(dim=192, depth=6, heads=12)
CLASSES, CHANNELS, IMAGES = 10, 3, 4096


def model_config(family: str, image_size: int) -> ModelConfig:
    if family != "vit":
        return ModelConfig(name=family, image_size=image_size)
    return PLAIN_VIT.model_copy(update={"image_size": image_size, "patch_size": image_size // 8})


def make_task(family: str, image_size: int, batch: int, epochs: int, machine: ExecutionSettings) -> Task:
    net = build_model(model_config(family, image_size), CLASSES, CHANNELS, image_size, SEED).to(machine.device)
    train = TrainConfig(epochs=epochs, batch_size=batch, lr=1e-4)
    method = FedAvg(FedAvgParams(), MethodContext(Config(train=train, seed=SEED), net, CLASSES, machine.device))
    count = IMAGES if image_size <= 64 else IMAGES // 8
    shape = (count, CHANNELS, image_size, image_size)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, device=machine.device)
    labels = torch.randint(0, CLASSES, (count,), device=machine.device)
    return Task(family, method, net, train, ImageSet(pixels, labels), machine)


def own_module(family: str, image_size: int, device: torch.device) -> torch.nn.Module:
    """Return the family's module as its builder makes it."""
    config = model_config(family, image_size)
    params = MODELS.validate(config.name, config.params)
    module, _ = MODELS[config.name].target(params, ModelRequest(config, CLASSES, CHANNELS, image_size))
    return module.to(device)


def measure(family: str, way: str, machine: ExecutionSettings, args: argparse.Namespace) -> dict[str, object]:
    task = make_task(family, args.image_size, args.batch, args.epochs, machine)
    if way == "eager":
        module = own_module(family, args.image_size, machine.device)
        run_round = eager_round(task, args.clients, args.samples, module)
    else:
        run_round = vitfleet_round(task, args.clients, args.samples)
    on_gpu = machine.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    warm_up, best = measure_seconds(run_round, machine.device, args.repeats)
    parts = task.net.parts
    return {
        "family": family,
        "parameters": parts.count_parameters(parts.whole),
        "way": way,
        "stacking": task.net.stacking if machine.stack_size > 1 else "",
        "samples/s": round(args.clients * args.samples * args.epochs / best),
        "times eager": "",
        "memory MiB": round(torch.cuda.max_memory_allocated() / 2**20) if on_gpu else "",
        "warm-up s": round(warm_up, 1),
        "round s": round(best, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--samples", type=int, default=256, help="images per client")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=["eager", "graph", "stacked"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    base = replace(set_up_execution(MachineConfig(device=args.device, precision=args.precision)), compile=False)
    on_gpu = base.device.type == "cuda"
    device = torch.cuda.get_device_name() if on_gpu else f"{torch.get_num_threads()} CPU threads"
    versions = f"torch {torch.__version__}, timm {version('timm')}, Python {platform.python_version()}"
    print(f"{device}, {'bf16' if base.bf16 else 'fp32'}; {versions}", flush=True)
    machines = {
        "eager": replace(base, graphs=False, stack_size=1),
        "graph": replace(base, graphs=on_gpu, stack_size=1),
        "stacked": replace(base, graphs=on_gpu, stack_size=args.clients),
    }
    rows: list[dict[str, object]] = []
    for family in args.families:
        eager: object = None
        for way in args.ways:
            row = measure(family, way, machines[way], args)
            eager = row["samples/s"] if way == "eager" else eager
            if isinstance(eager, int) and isinstance(row["samples/s"], int):
                row["times eager"] = round(row["samples/s"] / eager, 2)
            rows.append(row)
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            if args.out:
                args.out.mkdir(parents=True, exist_ok=True)
                with (args.out / "families.csv").open("w", newline="") as file:
                    writer = csv.DictWriter(file, list(row))
                    writer.writeheader()
                    writer.writerows(rows)


if __name__ == "__main__":
    main()
