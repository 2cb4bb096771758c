"""The estimate of a client's peak training memory against the measured peak, on the CPU or a GPU.

Example::

    OMP_NUM_THREADS=1 python benchmarks/memory.py --model vit_tiny_patch16_224 --batch 16
    python benchmarks/memory.py --device cuda --model vit_base_patch16_224

Every method is measured in a process of its own: a first round of one batch, for what the libraries keep to themselves
(threads, kernels, cuBLAS's workspace), then a client's second round of three steps. Methods that learn task after task
have samples stored of five tasks. On the CPU the peak is the kernel's high-water mark of resident memory, on a GPU that
of torch's allocator. Steps are not captured in graphs, and a client trains alone: that is what a device does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from vitfleet.config.schema import AugmentConfig, Config, MachineConfig, ModelConfig
from vitfleet.costs.flops import CostModel
from vitfleet.costs.memory import round_memory
from vitfleet.data.images import ImageSet, Shard
from vitfleet.message import State, to_device
from vitfleet.methods import ClientJob, ClientUpdate, MethodContext, adapt_model, make_method
from vitfleet.methods.episodic_memory import StoredSamples, memory_tensors
from vitfleet.models.zoo import build_model
from vitfleet.training.cohort_inputs import RngContext
from vitfleet.training.machine import Machine, set_up_machine
from vitfleet.training.trainer import ALL_PARTS, Trainer, preprocess_for

CLASSES, SIDE, ROUNDS, STEPS = 100, 224, 2, 3
TASKS, STORED = 5, 16  # learned before, and samples stored of each
OF_TASKS = ("fedvit", "gem", "a-gem")
METHODS = ("fed-full", "eftvit", "fed-head", "fed-lora", "fedbfpt", "transfl", "fedvit", "gem")
WITHIN = 0.15  # what an estimate may be off by


def measure(name: str, model: str, batch: int, device: str, precision: str) -> dict[str, float]:
    tree: dict[str, object] = {
        "method": {"name": name},
        "train": {"batch_size": batch, "mask_ratio": 0.75 if name == "eftvit" else 0.0, "epochs": 2},
    }
    if name in OF_TASKS:
        tree["data"] = {"tasks": {"count": TASKS + 1, "classes": 10}}
    config = Config.model_validate(tree)
    machine = set_up_machine(MachineConfig.model_validate({"device": device, "precision": precision, "graphs": False}))
    net = build_model(ModelConfig(name=model), CLASSES, 3, SIDE, 0, partial(adapt_model, config.method)).to(
        machine.device
    )

    def context(where: torch.device) -> MethodContext:
        return MethodContext.from_net(net, config.train, ROUNDS, 0, CLASSES, where, config.num_tasks)

    task_index = TASKS if name in OF_TASKS else 0
    labels = np.arange(STEPS * batch) % CLASSES
    cost_model = CostModel(make_method(config.method, context(torch.device("cpu"))), net, config.train)
    dry_run_result = cost_model.dry_run(1, 0, labels, task_index, {"stored": [STORED] * task_index})
    at_once = 1 if machine.device.type == "cpu" else ALL_PARTS
    estimate = round_memory(net, dry_run_result, config.train, machine.bf16, at_once)

    method = make_method(config.method, context(machine.device))
    weights = to_device(net.initial_weights(), machine.device)
    trainer = Trainer(net, preprocess_for(net, machine.device), config.train, AugmentConfig(), ROUNDS, machine)
    pixels = torch.zeros(STEPS * batch, 3, SIDE, SIDE, dtype=torch.uint8, device=machine.device)
    images = ImageSet(pixels, torch.from_numpy(labels).to(machine.device))
    server, base = method.initial_state(weights), method.base_message(weights).tensors

    def play(samples: int, own: State | None) -> tuple[ClientUpdate, int]:
        """Play a client's round; return its answer and its peak."""
        shard = Shard(images, torch.arange(samples, device=machine.device))
        work = method.client_update(
            ClientJob(1, 0, method.client_message(server, 1, 0, None), base, own, shard, task_index)
        )
        peak = 0
        try:
            fit = next(work)
            while True:
                fitted = trainer.fit(fit, shard, RngContext(0, 1, 0))
                peak = max(peak, _peak(machine))  # the trainer forgets it before every training on a GPU
                fit = work.send(fitted)
        except StopIteration as end:
            return end.value, peak

    first, _ = play(batch if machine.device.type == "cuda" else 1, None)
    own = first.client_state
    if task_index and own is not None:
        one = StoredSamples(pixels[:STORED].clone(), images.labels[:STORED].to(torch.int16))
        own = State({**own.tensors, **memory_tensors(dict.fromkeys(range(task_index), one))})
    del first
    before = _reset(machine)
    _, peak = play(STEPS * batch, own)
    held = [
        *method.client_message(server, 1, 0, None).tensors.values(),
        *base.values(),
        *(own.tensors.values() if own else ()),
    ]
    return {"estimate": estimate.total, "measured": peak - before + _bytes(held)}


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(one.numel() * one.element_size() for one in {id(one): one for one in tensors}.values())


def _reset(machine: Machine) -> int:
    """Forget the peak so far; return what is held now."""
    if machine.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak(machine: Machine) -> int:
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
        print(json.dumps(measure(args.one, args.model, args.batch, args.device, args.precision)))
        return
    # Blocks go back to the system when they are freed: what is resident is then what is in use.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    about = f"{args.model}, batch {args.batch}, {args.device}, {args.precision}"
    print(f"{about}, torch {torch.__version__}, Python {platform.python_version()}\n")
    print(f"| method | estimate, MiB | measured, MiB | ratio | within {WITHIN:.0%} |\n|---|---|---|---|---|")
    for method in args.methods:
        command = [sys.executable, __file__, *sys.argv[1:], "--one", method]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            print(f"| {method} | failed: {done.stderr.strip().splitlines()[-1]} | | | no |", flush=True)
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        estimate, measured = found["estimate"], found["measured"]
        ratio = estimate / measured
        evaluation = "yes" if abs(ratio - 1) <= WITHIN else "no"
        print(
            f"| {method} | {estimate / 2**20:.0f} | {measured / 2**20:.0f} | {ratio:.2f} | {evaluation} |", flush=True
        )


if __name__ == "__main__":
    main()
