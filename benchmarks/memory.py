"""Compare the estimate of a client's peak training memory with the measured peak, on the CPU or a GPU.

Example::

    OMP_NUM_THREADS=1 python benchmarks/memory.py --model vit_tiny_patch16_224 --batch 16
    python benchmarks/memory.py --device cuda --model vit_base_patch16_224

Every method is measured in a process of its own. A first round of one batch allocates what the libraries keep (threads,
kernels, cuBLAS's workspace). Then a client's second round of three steps is measured. For methods of continual learning
the client has samples of five tasks. On the CPU the peak is the kernel's high-water mark of resident memory, on a
GPU that of torch's allocator. Steps are not captured in CUDA graphs and a client trains alone, as on a device.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitfleet.config.schema import AugmentConfig, Config, MachineConfig, ModelConfig
from vitfleet.costs.cost_model import CostModel
from vitfleet.costs.memory import round_memory
from vitfleet.data.images import ImageSet, Shard
from vitfleet.message import State, to_device
from vitfleet.methods import ClientRoundInput, ClientUpdate, Method, MethodContext, adapt_model, make_method
from vitfleet.methods.continual.stored_samples import StoredSamples, memory_tensors
from vitfleet.models.net import Net
from vitfleet.models.zoo import build_model
from vitfleet.training.execution.settings import ExecutionSettings, set_up_execution
from vitfleet.training.stacking.inputs import RngContext
from vitfleet.training.trainer import ALL_PARTS, Trainer, preprocess_for

CLASSES, IMAGE_SIZE, ROUNDS, STEPS = 100, 224, 2, 3
NUM_STORED_TASKS, STORED_PER_TASK = 5, 16
TASK_METHODS = ("fedvit", "gem", "a-gem")
METHODS = ("fed-full", "eftvit", "fed-head", "fed-lora", "fedbfpt", "transfl", "fedvit", "gem")
TOLERANCE = 0.15  # largest relative error of an estimate that counts as right


@dataclass(frozen=True)
class Setup:
    """A method and the model, data and trainer of its client."""

    config: Config
    machine: ExecutionSettings
    net: Net
    labels: NDArray[np.int64]

    @property
    def task_index(self) -> int:
        return NUM_STORED_TASKS if self.config.method.name in TASK_METHODS else 0

    def method(self, device: torch.device) -> Method[Any]:
        return make_method(self.config.method, MethodContext(self.config, self.net, CLASSES, device))


def set_up(name: str, model: str, batch: int, device: str, precision: str) -> Setup:
    tree: dict[str, object] = {
        "method": {"name": name},
        "train": {"batch_size": batch, "mask_ratio": 0.75 if name == "eftvit" else 0.0, "epochs": 2},
    }
    if name in TASK_METHODS:
        tree["data"] = {"tasks": {"count": NUM_STORED_TASKS + 1, "classes": 10}}
    else:
        tree["rounds"] = ROUNDS
    config = Config.model_validate(tree)
    machine = set_up_execution(
        MachineConfig.model_validate({"device": device, "precision": precision, "graphs": False})
    )
    adapt = partial(adapt_model, config.method)
    net = build_model(ModelConfig(name=model), CLASSES, 3, IMAGE_SIZE, 0, adapt).to(machine.device)
    return Setup(config, machine, net, np.arange(STEPS * batch) % CLASSES)


def estimate(setup: Setup) -> int:
    """Return the estimated peak in bytes."""
    train, machine = setup.config.train, setup.machine
    cost_model = CostModel(setup.method(torch.device("cpu")), setup.net, train)
    reported = {"stored": [STORED_PER_TASK] * setup.task_index}
    dry_run = cost_model.dry_run(1, 0, setup.labels, setup.task_index, reported)
    parts_at_once = 1 if machine.device.type == "cpu" else ALL_PARTS
    return round_memory(setup.net, dry_run, train, machine.bf16, parts_at_once).total


def measure(setup: Setup) -> int:
    """Return the measured peak in bytes of a client's second round."""
    machine, net, train = setup.machine, setup.net, setup.config.train
    method = setup.method(machine.device)
    weights = to_device(net.initial_weights(), machine.device)
    trainer = Trainer(net, preprocess_for(net, machine.device), train, AugmentConfig(), ROUNDS, machine)
    pixels = torch.zeros(len(setup.labels), 3, IMAGE_SIZE, IMAGE_SIZE, dtype=torch.uint8, device=machine.device)
    images = ImageSet(pixels, torch.from_numpy(setup.labels).to(machine.device))
    message = method.message_to_client(method.initial_state(weights), 1, 0, None)
    base = method.initial_broadcast(weights).tensors

    def run_client(samples: int, state: State | None) -> tuple[ClientUpdate, int]:
        """Run a client's round; return its update and its peak."""
        shard = Shard(images, torch.arange(samples, device=machine.device))
        generator = method.client_update(ClientRoundInput(1, 0, message, base, state, shard, setup.task_index))
        peak = 0
        try:
            training = next(generator)
            while True:
                result = trainer.train(training, shard, RngContext(0, 1, 0))
                peak = max(peak, _peak(machine))  # on a GPU the trainer resets it before every training
                training = generator.send(result)
        except StopIteration as end:
            return end.value, peak

    first_update, _ = run_client(train.batch_size if machine.device.type == "cuda" else 1, None)
    state = first_update.client_state
    if setup.task_index and state is not None:
        stored = StoredSamples(pixels[:STORED_PER_TASK].clone(), images.labels[:STORED_PER_TASK].to(torch.int16))
        state = State({**state.tensors, **memory_tensors(dict.fromkeys(range(setup.task_index), stored))})
    del first_update
    before = _reset(machine)
    _, peak = run_client(len(setup.labels), state)
    inputs = [*message.tensors.values(), *base.values(), *(state.tensors.values() if state else ())]
    return peak - before + _bytes(inputs)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of different tensors."""
    different = {id(tensor): tensor for tensor in tensors}.values()
    return sum(tensor.numel() * tensor.element_size() for tensor in different)


def _reset(machine: ExecutionSettings) -> int:
    """Reset the peak; return the bytes that are in use now."""
    if machine.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak(machine: ExecutionSettings) -> int:
    return torch.cuda.max_memory_allocated() if machine.device.type == "cuda" else _status("VmHWM")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto", choices=["auto", "bf16", "fp32"])
    parser.add_argument("--one", help="measure this method here and print it as JSON")
    args = parser.parse_args()
    if args.one:
        setup = set_up(args.one, args.model, args.batch, args.device, args.precision)
        print(json.dumps({"estimate": estimate(setup), "measured": measure(setup)}))
        return
    # Freed blocks return to the system at once, so that resident memory is memory in use.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    setting = f"{args.model}, batch {args.batch}, {args.device}, {args.precision}"
    print(f"{setting}, torch {torch.__version__}, Python {platform.python_version()}\n")
    print(f"| method | estimate, MiB | measured, MiB | ratio | within {TOLERANCE:.0%} |\n|---|---|---|---|---|")
    for method in args.methods:
        command = [sys.executable, __file__, *sys.argv[1:], "--one", method]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            print(f"| {method} | failed: {done.stderr.strip().splitlines()[-1]} | | | no |", flush=True)
            continue
        peaks = json.loads(done.stdout.splitlines()[-1])
        ratio = peaks["estimate"] / peaks["measured"]
        cells = [f"{peaks['estimate'] / 2**20:.0f}", f"{peaks['measured'] / 2**20:.0f}", f"{ratio:.2f}"]
        print(f"| {' | '.join([method, *cells, 'yes' if abs(ratio - 1) <= TOLERANCE else 'no'])} |", flush=True)


if __name__ == "__main__":
    main()
