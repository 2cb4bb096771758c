"""The estimate of a client's peak training memory against the measured peak, on the CPU or a GPU.

Example::

    OMP_NUM_THREADS=1 python benchmarks/memory.py --model vit_tiny_patch16_224 --batch 32
    python benchmarks/memory.py --device cuda --model vit_base_patch16_224

Every method is measured in a process of its own: a small training first, for what the libraries keep to themselves,
then three steps of a real one. On the CPU the peak is the kernel's high-water mark of resident memory, on a GPU that of
torch's allocator.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch

from vitfleet.config.schema import AugmentConfig, Config, MachineConfig, ModelConfig
from vitfleet.data.images import ImageSet, Shard
from vitfleet.methods import Job, Setting, adapt, make_method
from vitfleet.models.zoo import build
from vitfleet.run.costs import Costing
from vitfleet.run.memory import training_memory
from vitfleet.train.cohort import Place
from vitfleet.train.machine import Machine, set_up
from vitfleet.train.trainer import Trainer, preprocess_for

CLASSES, SIDE, ROUNDS, STEPS = 100, 224, 2, 3
METHODS = ("fed-full", "eftvit", "fed-head", "fed-lora", "fedbfpt", "fed-prompt", "fed-bias", "transfl")


def measure(name: str, model: str, batch: int, device: str) -> dict[str, float]:
    mask = 0.75 if name == "eftvit" else 0.0
    config = Config.model_validate(
        {"method": {"name": name}, "train": {"batch_size": batch, "mask_ratio": mask, "epochs": 1}}
    )
    machine = set_up(MachineConfig(device=device))
    net = build(ModelConfig(name=model), CLASSES, 3, SIDE, 0, partial(adapt, config.method)).to(machine.device)
    host = make_method(config.method, Setting.of(net, config.train, ROUNDS, 0, CLASSES, torch.device("cpu")))
    labels = np.arange(STEPS * batch) % CLASSES
    (fit, *_) = Costing(host, net, config.train).rehearse(1, 0, labels).fits
    estimate = training_memory(net, fit, config.train, machine.bf16)

    method = make_method(config.method, Setting.of(net, config.train, ROUNDS, 0, CLASSES, machine.device))
    weights = {key: tensor.to(machine.device) for key, tensor in net.initial_weights().items()}
    trainer = Trainer(net, preprocess_for(net, machine.device), config.train, AugmentConfig(), ROUNDS, machine)
    pixels = torch.zeros(STEPS * batch, 3, SIDE, SIDE, dtype=torch.uint8, device=machine.device)
    images = ImageSet(pixels, torch.from_numpy(labels).to(machine.device))

    def train(samples: int) -> None:
        shard = Shard(images, torch.arange(samples, device=machine.device))
        down = method.instruct(method.start(weights), 1, 0, None)
        job = Job(1, 0, down, method.base(weights).tensors, None, shard)
        trainer.fit(next(method.work(job)), shard, Place(0, 1, 0))

    train(1)
    before = _reset(machine)
    train(STEPS * batch)
    received = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    return {"estimate": estimate.total, "measured": _peak(machine) - before + received}


def _reset(machine: Machine) -> int:
    """Forget the peak so far; return what is held now."""
    if machine.device.type == "cuda":
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
    parser.add_argument("--one", help="measure this method here and print it as JSON")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.model, args.batch, args.device)))
        return
    # Blocks go back to the system when they are freed: what is resident is then what is in use.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    print(f"{args.model}, batch {args.batch}, torch {torch.__version__}, Python {platform.python_version()}\n")
    print("| method | estimate, MiB | measured, MiB | estimate / measured |\n|---|---|---|---|")
    for method in args.methods:
        command = [sys.executable, __file__, *sys.argv[1:], "--one", method]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            print(f"| {method} | failed: {done.stderr.strip().splitlines()[-1]} | | |")
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        estimate, measured = found["estimate"], found["measured"]
        print(f"| {method} | {estimate / 2**20:.0f} | {measured / 2**20:.0f} | {estimate / measured:.2f} |", flush=True)


if __name__ == "__main__":
    main()
