"""Cost of FedViT's gradient integration: a step with k stored tasks against a plain step, by component.

Example::

    python benchmarks/fedvit_step.py --clients 8 --k 10 --stored 13

FedViT's six-layer ViT on random images, trained through the trainer as a run does it (clients stacked and captured in
a graph on a GPU). Each of four trainings adds one thing: plain; the gradients of k stored tasks, which are not used;
the integrator; two more tasks than k, ranked at every step. The time of a step is the difference of a long and a short
training divided by the difference of their steps, so that everything but steps cancels out; the median of several
repetitions is printed.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from vitfleet.config.schema import AugmentConfig, MachineConfig, ModelConfig, TrainConfig
from vitfleet.data.images import ImageSet, Shard
from vitfleet.message import Tensors, to_device
from vitfleet.methods.continual.projection import (
    GradientIntegrator,
    MostDissimilar,
    inner_products,
    solve_dual,
    to_chunks,
)
from vitfleet.models.zoo import build_model
from vitfleet.training.local_training import EpisodicMemory
from vitfleet.training.machine import set_up_machine
from vitfleet.training.stack_inputs import ClientTraining, RngContext
from vitfleet.training.step import Fit, Objective, ReferenceGradients, Step
from vitfleet.training.trainer import Trainer, preprocess_for

CLASSES = 100
SIDE = 32


@dataclass(frozen=True)
class IgnoreReferences:
    """Requests reference gradients, and applies the gradient unchanged."""

    counts: tuple[str, ...] = ()

    def __call__(
        self, gradients: Tensors, references: ReferenceGradients | None, step: Step
    ) -> tuple[Tensors, Tensors]:
        return gradients, {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1, help="clients that are stacked")
    parser.add_argument("--k", type=int, default=10, help="stored tasks of the integrator")
    parser.add_argument("--stored", type=int, default=32, help="samples per stored task")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=4, help="timed steps")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--dim", type=int, default=192)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compile", action="store_true", help="compile the model, as machine.compile does")
    parser.add_argument("--parts-at-once", type=int, help="stored tasks in one backward pass; default: as in a run")
    parser.add_argument("--restore-every", type=int, default=1, help="steps between two computations of the gradients")
    parser.add_argument("--reference-dtype", choices=("fp32", "bf16"), default="fp32", help="type of stored gradients")
    args = parser.parse_args()

    machine = replace(set_up_machine(MachineConfig(device=args.device, compile=args.compile)), cohort=args.clients)
    net = build_model(ModelConfig(dim=args.dim, depth=args.depth, heads=12, patch_size=4), CLASSES, 3, SIDE, 0)
    net = net.to(machine.device)
    config = TrainConfig(batch_size=args.batch, lr=5e-4, schedule="constant")
    tasks = (torch.arange(CLASSES) // 10).to(machine.device)
    trainer = Trainer(
        net, preprocess_for(net, machine.device), config, AugmentConfig(), 10, machine, tasks, args.parts_at_once
    )
    weights = [to_device(net.initial_weights(), machine.device) for _ in range(args.clients)]
    longest = (args.steps + 1) * args.batch
    random = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (longest, 3, SIDE, SIDE), generator=random, dtype=torch.uint8)
    images = ImageSet(pixels, torch.randint(0, CLASSES, (longest,), generator=random)).to(machine.device)

    def make_memory(parts: int) -> EpisodicMemory:
        index = torch.randint(0, longest, (parts, args.stored), generator=random).to(machine.device)
        sample_weight = torch.full((parts, args.stored), 1 / args.stored, device=machine.device)
        return EpisodicMemory(images.images[index], images.labels[index], sample_weight, (args.stored,) * parts)

    def seconds(objective: Objective, memories: list[EpisodicMemory | None], steps: int) -> float:
        shard = Shard(images, torch.arange(steps * args.batch, device=machine.device))
        group = [
            ClientTraining(Fit(start, objective, 1, memory=memory), shard, RngContext(0, 1, client))
            for client, (start, memory) in enumerate(zip(weights, memories, strict=True))
        ]
        started = time.perf_counter()
        trainer.train_together(group)
        if machine.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    body = net.anatomy.body
    dtype = torch.bfloat16 if args.reference_dtype == "bf16" else None
    restoring = Objective(body, transform=IgnoreReferences(), restore_every=args.restore_every, reference_dtype=dtype)
    integrating = replace(restoring, transform=GradientIntegrator())
    trainings = {
        "plain": (Objective(body), 0),
        "k gradients restored": (restoring, args.k),
        "and integrated": (integrating, args.k),
        "k + 2 ranked and integrated": (replace(integrating, selector=MostDissimilar(args.k)), args.k + 2),
    }
    memories = {
        name: [make_memory(parts) if parts else None for _ in range(args.clients)]
        for name, (_, parts) in trainings.items()
    }
    times: dict[str, list[float]] = {name: [] for name in trainings}
    for repetition in range(args.repeat + 1):  # in turns, so that load on the machine affects all of them
        for name, (objective, _) in trainings.items():
            long, short = (seconds(objective, memories[name], count) for count in (args.steps + 1, 1))
            if repetition:  # the first repetition warms up and captures
                times[name].append((long - short) / args.steps)
    steps = {name: statistics.median(repetitions) for name, repetitions in times.items()}

    qp = solve_seconds(args.clients, args.k, net.anatomy.count_parameters(body), machine.device, args.repeat)
    plain, whole = steps["plain"], steps["and integrated"]
    surgery = whole - steps["k gradients restored"]
    # The ranked step also computes two more gradients, which are not part of the cost of ranking.
    ranked = steps["k + 2 ranked and integrated"]
    gradient = (steps["k gradients restored"] - plain) / args.k
    print(
        f"\ndim {args.dim}, depth {args.depth}, batch {args.batch}, {args.clients} clients, k {args.k}, {args.stored} "
        f"samples per stored task, restored every {args.restore_every} steps, in {args.reference_dtype}; "
        f"{machine.device}, {'bf16' if machine.bf16 else 'fp32'}{', compiled' if args.compile else ''}, "
        f"torch {torch.__version__}, Python {platform.python_version()}\n"
    )
    print("| step | ms | × plain |")
    print("|---|---|---|")
    for name, step_seconds in steps.items():
        print(f"| {name} | {1e3 * step_seconds:.2f} | {step_seconds / plain:.2f} |")
    print(
        f"\nintegrated / plain: {whole / plain:.2f}, allowed {args.k + 1.5}; of an integrated step the integrator takes"
        f" {surgery / whole:.1%}, the QP alone {qp / whole:.1%} ({1e3 * qp:.2f} ms); of a ranked one the ranking takes"
        f" {max(0.0, ranked - whole - 2 * gradient) / ranked:.1%}"
    )


def solve_seconds(clients: int, k: int, parameters: int, device: torch.device, repeat: int) -> float:
    """Return the time of the quadratic programme alone; on a GPU it is captured in a CUDA graph, as steps are."""
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(clients, k, min(parameters, 10_000), generator=random).to(device)
    gradients = (torch.randn(rows.shape[0], rows.shape[2], generator=random).to(device)) - rows.mean(1)
    gram, slack, size = torch.vmap(
        lambda gradient, references: inner_products(to_chunks({"w": references}, {"w": gradient[None]}))
    )(gradients, rows)
    lifted = torch.vmap(lambda a, b, c: solve_dual(a, b, c).v)

    def solve() -> None:
        lifted(gram, slack, size)

    if device.type != "cuda":
        return statistics.median(_timed(solve, device) for _ in range(repeat))
    for _ in range(3):
        solve()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        solve()
    return statistics.median(_timed(graph.replay, device) for _ in range(10 * repeat))


def _timed(function: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
