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
from vitfleet.methods.continual.gradients.fedvit import StoredGradients
from vitfleet.methods.continual.gradients.projection import solve_dual, to_chunks, zero_counts
from vitfleet.methods.continual.gradients.restorer import IntegratedStep, Restorer
from vitfleet.methods.continual.stored_samples import MEMORY
from vitfleet.models.zoo import build_model
from vitfleet.training.execution.settings import set_up_execution
from vitfleet.training.local_training import LocalTraining, SampleSet
from vitfleet.training.samples import Samples, cross_entropy
from vitfleet.training.stacking.inputs import ClientTraining, RngContext
from vitfleet.training.step import StepView
from vitfleet.training.trainer import Trainer, preprocess_for

CLASSES = 100
SIDE = 32


@dataclass(frozen=True)
class RestoringStep:
    """Computes the gradients of stored tasks, and applies the gradient of the batch unchanged."""

    restorer: Restorer

    def kind(self, index: int) -> str:
        return self.restorer.kind(index)

    def __call__(self, view: StepView, batch: Samples) -> Tensors:
        gradients = view.grad(cross_entropy, batch)
        self.restorer.references(view, batch, gradients, StoredGradients(self.restorer.dtype))
        return gradients


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
    parser.add_argument("--recompute", type=int, default=1, help="steps between two computations of the gradients")
    parser.add_argument("--reference-dtype", choices=("fp32", "bf16"), default="fp32", help="type of stored gradients")
    args = parser.parse_args()

    machine = replace(
        set_up_execution(MachineConfig(device=args.device, compile=args.compile)), stack_size=args.clients
    )
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

    body, bf16 = net.parts.body, args.reference_dtype == "bf16"

    def make_trainings(parts: int, integrate: bool) -> list[LocalTraining]:
        """Return the training of each client, with so many stored tasks."""
        plain = [LocalTraining(start, body, 1) for start in weights]
        if not parts:
            return plain
        restorer = Restorer(parts, args.k, recompute=args.recompute, bf16=bf16)
        step = IntegratedStep(restorer, StoredGradients(restorer.dtype)) if integrate else RestoringStep(restorer)
        scratch = restorer.scratch(net.parts.trainable(body).take(weights[0]))
        made = []
        for training in plain:
            index = torch.randint(0, longest, (parts, args.stored), generator=random).to(machine.device)
            memory = SampleSet(images.images[index], images.labels[index], (args.stored,) * parts)
            counts = zero_counts(machine.device)
            made.append(replace(training, step=step, sets={MEMORY: memory}, kept=counts, scratch=scratch))
        return made

    def seconds(trainings: list[LocalTraining], steps: int) -> float:
        shard = Shard(images, torch.arange(steps * args.batch, device=machine.device))
        group = [ClientTraining(training, shard, RngContext(0, 1, client)) for client, training in enumerate(trainings)]
        started = time.perf_counter()
        trainer.train_together(group)
        if machine.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    trainings = {
        "plain": make_trainings(0, integrate=False),
        "k gradients restored": make_trainings(args.k, integrate=False),
        "and integrated": make_trainings(args.k, integrate=True),
        "k + 2 ranked and integrated": make_trainings(args.k + 2, integrate=True),
    }
    times: dict[str, list[float]] = {name: [] for name in trainings}
    for repetition in range(args.repeat + 1):  # in turns, so that load on the machine affects all of them
        for name, of_clients in trainings.items():
            long, short = (seconds(of_clients, count) for count in (args.steps + 1, 1))
            if repetition:  # the first repetition warms up and captures
                times[name].append((long - short) / args.steps)
    steps = {name: statistics.median(repetitions) for name, repetitions in times.items()}

    qp = solve_seconds(args.clients, args.k, net.parts.count_parameters(body), machine.device, args.repeat)
    plain, whole = steps["plain"], steps["and integrated"]
    surgery = whole - steps["k gradients restored"]
    # The ranked step also computes two more gradients, which are not part of the cost of ranking.
    ranked = steps["k + 2 ranked and integrated"]
    gradient = (steps["k gradients restored"] - plain) / args.k
    print(
        f"\ndim {args.dim}, depth {args.depth}, batch {args.batch}, {args.clients} clients, k {args.k}, {args.stored} "
        f"samples per stored task, computed every {args.recompute} steps, in {args.reference_dtype}; "
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
    make_chunks = torch.vmap(lambda gradient, references: to_chunks({"w": references}, {"w": gradient[None]}))
    chunks = make_chunks(gradients, rows)
    products = (chunks @ chunks.mT).sum(1)
    solve_each = torch.vmap(lambda gram, slack, squared_norm: solve_dual(gram, slack, squared_norm).v)

    def solve() -> None:
        solve_each(products[:, :-1, :-1], products[:, :-1, -1], products[:, -1, -1])

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
