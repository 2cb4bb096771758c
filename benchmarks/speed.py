"""Training speed in samples per second: an eager loop over clients against vitfleet, in one run.

Examples, the tables of docs/benchmarks.md::

    python benchmarks/speed.py vit --batch 32 64 --clients 20 --out results      # the 6-layer ViT of TransFL
    python benchmarks/speed.py eftvit --batch 32 --clients 10 --out results      # EFTViT's client, ViT-B/16 at 224

Every variant trains the same model from the same weights on the same number of images, which are on the device, with
AdamW, for whole local trainings: the time includes loading the weights, drawing the epochs and reading the result. The
eager loop is what a user of Flower or pfl-research writes: timm's module, `torch.optim`, one client after the other.
Utilisation is relative to a matrix product measured in the same run.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from vitfleet.config.schema import AugmentConfig, Config, MachineConfig, ModelConfig, TrainConfig
from vitfleet.costs.cost_model import NO_LABELS, CostModel
from vitfleet.data.images import ImageSet, Shard
from vitfleet.message import to_device
from vitfleet.methods import Method, MethodContext
from vitfleet.methods.averaging.fedavg import FedAvg, FedAvgParams
from vitfleet.methods.base import ClientRoundInput
from vitfleet.methods.split.eftvit import EftVit, EftVitParams
from vitfleet.models.net import Net
from vitfleet.models.zoo import build_model
from vitfleet.training.driver import PendingUpdate, run_updates
from vitfleet.training.execution.settings import ExecutionSettings, set_up_execution
from vitfleet.training.stacking.inputs import RngContext
from vitfleet.training.trainer import Trainer, preprocess_for

SEED = 0


@dataclass(frozen=True)
class Task:
    """A method, a model and images to train."""

    name: str
    method: Method[FedAvgParams] | Method[EftVitParams]
    net: Net
    train: TrainConfig
    images: ImageSet
    machine: ExecutionSettings

    def shard(self, client: int, samples: int) -> Shard:
        index = (torch.arange(samples, device=self.machine.device) + client * samples) % len(self.images)
        return Shard(self.images, index)


def make_task(name: str, model_name: str, batch: int, epochs: int, machine: ExecutionSettings) -> Task:
    eftvit = name == "eftvit"
    model = ModelConfig(name=model_name) if eftvit else ModelConfig(dim=256, depth=6, heads=8, patch_size=4)
    classes, image_size, count = (100, 224, 2048) if eftvit else (10, 32, 20000)
    net = build_model(model, classes, 3, image_size, SEED).to(machine.device)
    train = TrainConfig(epochs=epochs, batch_size=batch, lr=1e-4, mask_ratio=0.75 if eftvit else 0.0)
    context = MethodContext(Config(train=train, seed=SEED), net, classes, machine.device)
    method = EftVit(EftVitParams(), context) if eftvit else FedAvg(FedAvgParams(), context)
    pixels = torch.randint(0, 256, (count, 3, image_size, image_size), dtype=torch.uint8, device=machine.device)
    labels = torch.randint(0, classes, (count,), device=machine.device)
    return Task(name, method, net, train, ImageSet(pixels, labels), machine)


def vitfleet_round(task: Task, clients: int, samples: int) -> Callable[[], None]:
    """Return a function that trains the clients of one round as the simulation does."""
    trainer = Trainer(
        task.net,
        preprocess_for(task.net, task.machine.device),
        task.train,
        AugmentConfig(),
        10,
        task.machine,
    )
    initial = to_device(task.net.initial_weights(), task.machine.device)
    method = task.method
    base = method.initial_broadcast(initial).tensors
    server = method.initial_state(initial)

    def run_round() -> None:
        for start in range(0, clients, task.machine.stack_size):
            updates = []
            for client in range(start, min(clients, start + task.machine.stack_size)):
                shard = task.shard(client, samples)
                job = ClientRoundInput(
                    1,
                    client,
                    method.message_to_client(server, 1, client, None),
                    base,
                    None,
                    shard,
                )
                updates.append(PendingUpdate(method.client_update(job), shard, RngContext(SEED, 1, client)))
            run_updates(updates, trainer)

    return run_round


def eager_round(task: Task, clients: int, samples: int, module: torch.nn.Module | None = None) -> Callable[[], None]:
    """Return a function that trains one client after the other with timm's module and torch's optimiser."""
    device = task.machine.device
    module = task.net.module.vit if module is None else module
    initial = to_device(task.net.initial_weights(), device)
    trainable = set(task.net.parts.trainable(task.method.trainable))
    mean, std = (torch.tensor(values, device=device)[:, None, None] for values in (task.net.mean, task.net.std))
    num_kept = task.net.num_kept_patches(task.train.mask_ratio)

    def forward(images: Tensor) -> Tensor:
        if task.name != "eftvit":
            return module(images)
        tokens = module.patch_embed(images) + module.pos_embed[:, 1:]
        keep = torch.rand(tokens.shape[:2], device=device).argsort(dim=1)[:, :num_kept]
        tokens = tokens.gather(1, keep[..., None].expand(-1, -1, tokens.shape[-1]))
        token = (module.cls_token + module.pos_embed[:, :1]).expand(len(tokens), -1, -1)
        return module.forward_head(module.norm(module.blocks(torch.cat([token, tokens], dim=1))))

    def run_round() -> None:
        module.train()
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in trainable)
        for client in range(clients):
            module.load_state_dict(initial, strict=False)  # batch norms count their batches besides
            weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
            optimizer = torch.optim.AdamW(weights, lr=1e-4, weight_decay=0.05, fused=True)
            shard = task.shard(client, samples)
            total = torch.zeros((), device=device)
            for _ in range(task.train.epochs):
                order = shard.index[torch.randperm(samples, device=device)]
                for index in torch.split(order, task.train.batch_size):
                    images = (task.images.images[index].float() / 255 - mean) / std
                    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=task.machine.bf16):
                        loss = F.cross_entropy(forward(images), task.images.labels[index])
                    optimizer.zero_grad(set_to_none=True)
                    loss.backward()
                    optimizer.step()
                    total += loss.detach()
            float(total)
        for parameter in module.parameters():
            parameter.requires_grad_(False)

    return run_round


def measure_seconds(function: Callable[[], None], device: torch.device, repeats: int) -> tuple[float, float]:
    """Return how much longer the first call took than the fastest later one, and the time of that one."""

    def once() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    first = once()
    best = min(once() for _ in range(repeats))
    return first - best, best


def show_kernels(run_round: Callable[[], None], device: torch.device, count: int) -> None:
    """Print the kernels that take most of a round's time on the device, including those of captured steps."""
    activity = torch.profiler.ProfilerActivity.CUDA if device.type == "cuda" else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity], acc_events=True) as profiled:
        run_round()
        if device.type == "cuda":
            torch.cuda.synchronize()
    # Raw events, because torch's own table first builds a tree of hundreds of thousands of events, which takes minutes.
    times: dict[str, list[float]] = {}
    for event in profiled.profiler.kineto_results.events():
        entry = times.setdefault(event.name(), [0.0, 0])
        entry[0] += event.duration_ns() / 1e6
        entry[1] += 1
    total = sum(milliseconds for milliseconds, _ in times.values())
    print(f"kernels: {total:.1f} ms in total")
    for name, (milliseconds, calls) in sorted(times.items(), key=lambda item: -item[1][0])[:count]:
        print(f"  {milliseconds / total:6.1%}  {milliseconds:9.2f} ms  {calls:6d} ×  {name[:100]}", flush=True)


def matmul_peak(machine: ExecutionSettings) -> float:
    """Return the FLOP/s of a large matrix product in the precision of the run."""
    side = 8192 if machine.device.type == "cuda" else 1024
    dtype = torch.bfloat16 if machine.bf16 else torch.float32
    left, right = (torch.randn(side, side, dtype=dtype, device=machine.device) for _ in range(2))

    def multiply() -> None:
        for _ in range(20 if machine.device.type == "cuda" else 3):
            left @ right

    _, best = measure_seconds(multiply, machine.device, 3)
    return 2 * side**3 * (20 if machine.device.type == "cuda" else 3) / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["vit", "eftvit"])
    parser.add_argument("--model", default="vit_base_patch16_224", help="name of EFTViT's model in timm")
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--samples", type=int, default=512, help="images per client")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--ways", nargs="+", default=["eager", "solo", "graph", "captured", "compiled"])
    parser.add_argument("--stack-sizes", type=int, nargs="+", help="clients per stack; default: all clients")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--kernels", type=int, default=0, help="show this many of the kernels that take most time")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    base = set_up_execution(MachineConfig(device=args.device, precision=args.precision))
    device_name = (
        torch.cuda.get_device_name() if base.device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    )
    versions = f"torch {torch.__version__}, timm {version('timm')}, Python {platform.python_version()}"
    print(f"{device_name}, {'bf16' if base.bf16 else 'fp32'}; {versions}")
    peak = matmul_peak(base)
    print(f"a matrix product of {8192 if base.device.type == 'cuda' else 1024}²: {peak / 1e12:.3g} TFLOP/s", flush=True)
    ways = {
        "eager": [replace(base, graphs=False, compile=False, stack_size=1)],
        "solo": [replace(base, graphs=False, compile=False, stack_size=1)],
        "graph": [replace(base, graphs=True, compile=False, stack_size=1)],
        "stacked": [
            replace(base, graphs=False, compile=False, stack_size=n) for n in args.stack_sizes or [args.clients]
        ],
        "captured": [
            replace(base, graphs=True, compile=False, stack_size=n) for n in args.stack_sizes or [args.clients]
        ],
        "compiled": [
            replace(base, graphs=True, compile=True, stack_size=n) for n in args.stack_sizes or [args.clients]
        ],
        "compiled-solo": [replace(base, graphs=True, compile=True, stack_size=1)],
    }
    rows = []
    for batch, way in itertools.product(args.batch, args.ways):
        for machine in ways[way]:
            task = make_task(args.task, args.model, batch, args.epochs, machine)
            run_round = (eager_round if way == "eager" else vitfleet_round)(task, args.clients, args.samples)
            if base.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            warm_up, best = measure_seconds(run_round, base.device, args.repeats)
            memory = torch.cuda.max_memory_allocated() / 2**20 if base.device.type == "cuda" else float("nan")
            rate = args.clients * args.samples * args.epochs / best
            cost_model = CostModel(task.method, task.net, task.train)
            flops = cost_model.average(cost_model.dry_run(task.method.cost_round, 0, NO_LABELS)).training
            reference = next(
                (other["samples/s"] for other in rows if other["batch"] == batch and other["way"] == "eager"), rate
            )
            row = {
                "task": args.task,
                "model": args.model if args.task == "eftvit" else "6 layers, width 256",
                "batch": batch,
                "way": way,
                "stack size": machine.stack_size,
                "clients": args.clients,
                "samples/s": round(rate),
                "times eager": round(rate / reference, 2),
                "of peak": f"{rate * flops / peak:.1%}",
                "memory MiB": round(memory) if memory == memory else "",
                "warm-up s": round(warm_up, 1),
                "round s": round(best, 3),
            }
            rows.append(row)
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            if args.kernels:
                show_kernels(run_round, base.device, args.kernels)
            if args.out:
                args.out.mkdir(parents=True, exist_ok=True)
                with (args.out / f"speed-{args.task}.csv").open("w", newline="") as file:
                    writer = csv.DictWriter(file, list(row))
                    writer.writeheader()
                    writer.writerows(rows)


if __name__ == "__main__":
    main()
