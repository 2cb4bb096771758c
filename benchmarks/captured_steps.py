"""Find the trainings of a run whose captured steps go wrong, and what about them is wrong.

Example, on a GPU::

    python benchmarks/captured_steps.py fedvit-layers-cifar100 -o machine.compile=true --data-dir data --stop-after 25

A training whose results are not finite is repeated from the same inputs: with the same captured steps; with steps that
are captured anew; with the steps that would be captured, run one by one; compiled, but not in the shapes of captured
steps; with plain steps of all clients together; and with plain steps of one client at a time. Where only the first is
wrong again, something has written into the memory of captured steps; where the first two are, the capture is wrong;
where the first three are, the compiled code is. Where none is, the fault passed; where all are, training diverges. With
``--all`` every training is also compared with plain steps, and the largest difference of each kind is printed.

Before that, each captured step is replayed and then run uncaptured from the same tensors: what differs is printed, with
the clients concerned. Rounds in which steps were captured or memory was full are named. To run with a part of the GPU's
memory, set the variable VITFLEET_GPU_SHARE, for example to 0.06.

With ``--poison`` the memory that torch holds and no tensor uses is filled with NaN before each captured step: a step
that reads what it has not written is not finite then. That is how the missing barriers of
:mod:`vitfleet.training.execution.compiler_barriers` were found.

The repeated trainings take time and memory, so nothing else can be learned from such a run.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from vitfleet.config import load_config
from vitfleet.data.batches import EpochBatches
from vitfleet.message import all_finite
from vitfleet.run.callbacks import Callback, StopRun
from vitfleet.run.context import RunContext
from vitfleet.run.loop import run_rounds
from vitfleet.run.records import RoundRecord
from vitfleet.run.setup import open_run
from vitfleet.run.state import RunState
from vitfleet.training.capture.cache import RunnerCache
from vitfleet.training.capture.runner import CudaGraphRunner, StepKind, step_kinds
from vitfleet.training.local_training import LocalResult
from vitfleet.training.stacking.inputs import ClientTraining
from vitfleet.training.trainer import Trainer

train_group = Trainer._train


@dataclass(frozen=True)
class UncapturedStep:
    """Takes the place of a captured step, and runs the step itself."""

    runner: CudaGraphRunner
    kind: StepKind

    def replay(self) -> None:
        self.runner._step(self.kind)


@dataclass(frozen=True)
class RawMemory:
    """A part of the GPU's memory, as torch makes a tensor of it."""

    address: int
    size: int

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"data": (self.address, False), "shape": (self.size,), "typestr": "|u1", "version": 3}


@dataclass(frozen=True)
class PoisonedGraph:
    """Fills torch's free memory with NaN, and replays a captured step."""

    graph: torch.cuda.CUDAGraph

    def replay(self) -> None:
        for segment in torch.cuda.memory_snapshot():
            for block in segment["blocks"]:
                if block["state"] == "inactive":
                    torch.as_tensor(RawMemory(block["address"], block["size"]), device="cuda").fill_(0xFF)
        self.graph.replay()


@dataclass
class Rounds(Callback):
    """Prints what happened to captured steps and to memory in a round, and stops the run after one."""

    stop_after: int
    events: dict[str, int] = field(default_factory=dict)

    def on_run_start(self, context: RunContext, state: RunState) -> None:
        self.trainer = context.trainer

    def on_round_end(self, state: RunState, record: RoundRecord) -> StopRun | None:
        events, before = count_events(self.trainer.runners), self.events
        changes = [
            f"{count - before.get(name, 0)} {name}" for name, count in events.items() if count != before.get(name, 0)
        ]
        if changes:
            print(f"round {record.round}: {', '.join(changes)}", flush=True)
        self.events = events
        return StopRun("--stop-after") if record.round == self.stop_after else None


def count_events(runners: RunnerCache) -> dict[str, int]:
    """Return how often steps were captured so far, and how often memory was full."""
    stats = torch.cuda.memory_stats() if torch.cuda.is_available() else {}
    return {
        "steps captured": runners.execution.summary.captured_steps,
        "captured steps without tensors": len(runners._dropped_graphs),
        "allocations repeated with a smaller cache": stats.get("num_alloc_retries", 0),
        "allocations failed": stats.get("num_ooms", 0),
    }


@dataclass
class Check:
    """Checks the results of every captured training.

    Attributes
    ----------
    compare_all
        Whether trainings with finite results are compared with plain ones too.
    differences
        The largest relative difference of weights, by kind of training.
    """

    compare_all: bool
    checked: int = 0
    differences: dict[str, float] = field(default_factory=dict)

    def __call__(self, trainer: Trainer, group: Sequence[ClientTraining]) -> list[LocalResult]:
        results = train_group(trainer, group)
        if not trainer.machine.graphs or not len(group[0]):
            return results
        self.checked += 1
        if not is_finite(results):
            report(trainer, group, results)
        elif self.compare_all:
            plain = train_group(plain_trainer(trainer), group)
            kind = describe(group)
            self.differences[kind] = max(self.differences.get(kind, 0.0), largest_difference(results, plain))
        return results


def report(trainer: Trainer, group: Sequence[ClientTraining], results: Sequence[LocalResult]) -> None:
    """Print what went wrong, and repeat the training in other ways."""
    print(f"round {group[0].rng.round}: {describe(group)}; clients {[client.rng.client for client in group]}")
    for member, result in zip(group, results, strict=True):
        wrong = [name for name, tensor in result.weights.items() if not all_finite([tensor])]
        losses = f"loss {float(result.loss):.4g}, {float(result.finite_steps):.0f} of {result.steps} steps finite"
        right = [name for name in result.weights if name not in wrong]
        few = f"{wrong}" if len(wrong) <= len(right) else f"all but {right}"
        print(f"  client {member.rng.client}: {losses}, {len(wrong)} tensors not finite: {few}")
    if torch.cuda.is_available():  # the repeated trainings need more than the share of a run among several
        torch.cuda.set_per_process_memory_fraction(1.0)
    compiled = replace(trainer, runners=RunnerCache(), machine=replace(trainer.machine, graphs=False))
    plain = plain_trainer(trainer)
    ways: dict[str, Callable[[], list[LocalResult]]] = {
        "the same captured steps": lambda: train_group(trainer, group),
        "captured anew": lambda: train_group(replace(trainer, runners=RunnerCache()), group),
        "the same steps, one by one": lambda: train_uncaptured(trainer, group),
        "compiled, in other shapes": lambda: train_group(compiled, group),
        "plain, clients together": lambda: train_group(plain, group),
        "plain, clients alone": lambda: [train_group(plain, [member])[0] for member in group],
    }
    train_step_by_step(trainer, group)
    for name, train in ways.items():
        finite = [is_finite([result]) for result in train()]
        print(f"  {name}: {sum(finite)} of {len(finite)} clients finite", flush=True)


def train_step_by_step(trainer: Trainer, group: Sequence[ClientTraining]) -> None:
    """Replay each captured step of the training, repeat it uncaptured from the same tensors, and compare."""
    run_epoch = CudaGraphRunner.run_epoch
    CudaGraphRunner.run_epoch = compare_epoch  # type: ignore[method-assign]
    try:
        train_group(trainer, group)
    finally:
        CudaGraphRunner.run_epoch = run_epoch  # type: ignore[method-assign]


def compare_epoch(runner: CudaGraphRunner, epoch_batches: EpochBatches, epoch: int) -> None:
    """Run the steps of an epoch as they are uncaptured, and print how the captured ones differ from them."""
    runner.epoch_number.fill_(epoch)
    for step, kind in enumerate(step_kinds(runner.stack, epoch_batches, captured=True)):
        if step % runner.buffered_steps == 0:
            runner._load_batches(epoch_batches, step)
        if kind not in runner.graphs:
            print(f"  step {step}, {kind.num_clients} clients: was never captured", flush=True)
            runner._step(kind)
            continue
        tensors = changing_tensors(runner)
        before = copies(tensors)
        runner.graphs[kind].replay()
        captured = copies(tensors)
        write(tensors, before)
        runner.graphs[kind].replay()
        again = copies(tensors)
        write(tensors, before)
        runner._step(kind)
        uncaptured = copies(tensors)
        print(f"  step {step}, {kind.num_clients} clients, rate {float(runner.stack.optimizer.lr):.3g}:", flush=True)
        print(f"    against the uncaptured step: {differing(captured, uncaptured)}")
        print(f"    against itself, replayed again: {differing(captured, again)}", flush=True)


def changing_tensors(runner: CudaGraphRunner) -> dict[str, Tensor]:
    """Return the tensors that steps of the runner share, by name: their inputs, and all that they write."""
    stack = runner.stack
    inputs, optimizer = stack.inputs, stack.optimizer
    found = {"position": runner.position, "loss": stack.loss_sum, "finite": stack.finite_steps}
    found |= {"step counts": optimizer.step_counts, "rate": optimizer.lr}
    for number, moment in enumerate(optimizer.moments):
        found |= {f"moment {number + 1} of {name}": tensor for name, tensor in moment.items()}
    groups = {"weight": inputs.weights, "constant": inputs.constants, "kept": inputs.kept, "scratch": inputs.scratch}
    groups |= {f"set {name}": samples for name, samples in inputs.sets.items()}
    for group, stacked in groups.items():
        found |= {f"{group} {name}": tensor.detach() for name, tensor in stacked.tensors.items()}
    return found


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def write(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Write values into tensors."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(values[name])


def differing(tensors: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> str:
    """Say which tensors differ most from others, relative to their length, and of which clients."""
    found = []
    for name, tensor in tensors.items():
        one, other = tensor.double(), others[name].double()
        if not one.dim():
            one, other = one[None], other[None]
        distance = (one - other).flatten(1 if one.dim() > 1 else 0).norm(dim=-1).reshape(-1)
        length = other.flatten(1 if other.dim() > 1 else 0).norm(dim=-1).reshape(-1)
        ratio = torch.nan_to_num(distance / length.clamp(min=1e-30), nan=1e30)
        found.append((float(ratio.max()), name, (ratio > 0.2).nonzero().flatten().tolist()))
    found.sort(reverse=True)
    count = sum(ratio > 0.2 for ratio, _, _ in found)
    largest = "; ".join(f"{name} {ratio:.1e} {clients}" for ratio, name, clients in found[:6])
    return f"{count} of {len(found)} differ by more than a fifth: {largest}"


def train_uncaptured(trainer: Trainer, group: Sequence[ClientTraining]) -> list[LocalResult]:
    """Run the training with the steps that would be captured, without capturing them."""
    capture = CudaGraphRunner._capture
    CudaGraphRunner._capture = lambda runner, kind: UncapturedStep(runner, kind)  # type: ignore[assignment, method-assign]
    try:
        return train_group(replace(trainer, runners=RunnerCache()), group)
    finally:
        CudaGraphRunner._capture = capture  # type: ignore[method-assign]


def plain_trainer(trainer: Trainer) -> Trainer:
    """Return the trainer without captured and compiled steps."""
    return replace(trainer, runners=RunnerCache(), machine=replace(trainer.machine, graphs=False, compile=False))


def describe(group: Sequence[ClientTraining]) -> str:
    """Return what kind of training it is."""
    training = group[0].training
    sets = "".join(f", {len(samples)} parts of the set {name}" for name, samples in training.sets.items())
    step = getattr(training.step, "__name__", type(training.step).__name__)
    return f"{len(training.trainable)} tensors train, step {step}{sets}"


def is_finite(results: Sequence[LocalResult]) -> bool:
    """Whether the losses and the weights of all results are finite."""
    return all(all_finite([result.loss, *result.weights.values()]) for result in results)


def largest_difference(results: Sequence[LocalResult], reference: Sequence[LocalResult]) -> float:
    """Return the largest distance of a client's weights from the reference's, relative to their length."""
    ratios = []
    for result, expected in zip(results, reference, strict=True):
        pairs = [(result.weights[name].double(), expected.weights[name].double()) for name in result.weights]
        distance = sum(float((one - other).square().sum()) for one, other in pairs)
        ratios.append((distance / sum(float(other.square().sum()) for _, other in pairs)) ** 0.5)
    return max(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset")
    parser.add_argument("-o", dest="overrides", action="append", default=[], metavar="key=value")
    parser.add_argument("--data-dir")
    parser.add_argument("--stop-after", type=int, metavar="ROUND", default=0)
    parser.add_argument("--all", action="store_true", help="compare every training with plain steps")
    parser.add_argument("--poison", action="store_true", help="fill free memory with NaN before captured steps")
    args = parser.parse_args()
    if args.poison:
        capture = CudaGraphRunner._capture
        CudaGraphRunner._capture = lambda runner, kind: PoisonedGraph(capture(runner, kind))  # type: ignore[assignment, method-assign, return-value]
    config = load_config(args.preset, args.overrides, {"data.dir": args.data_dir})
    check = Check(args.all)
    Trainer._train = lambda trainer, group: check(trainer, group)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        context = open_run(config, Path(folder))
        run_rounds(context, callbacks=[Rounds(args.stop_after)])
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{check.checked} captured trainings checked; {device}, torch {torch.__version__}")
    print(context.trainer.execution_summary())
    for kind, difference in check.differences.items():
        print(f"{difference:.2e} largest difference: {kind}")


if __name__ == "__main__":
    main()
