"""What a hostile server gets from a device: memory, time, local names, images.

``requests`` sends a device of every method requests that no honest server sends: configurations whose numbers lie at
the ends of what their keys allow, rounds and tasks that do not exist, messages of another form, evaluations without
end. Each is handled in a process of its own, by the code of a real device. A request is
refused, or it is answered: then it may have taken no more memory and time than the owner allows, and no answer may name
a folder or a file of the device. ``images`` asks methods that send features for them, with an honest local module and
with one that transforms nothing, and rebuilds the images with a decoder that it fits to public ones.

Examples::

    python benchmarks/attack_server.py requests
    python benchmarks/attack_server.py requests --methods fedavg mine --plugin mine.py --drawn 50
    python benchmarks/attack_server.py images

The exit code of ``requests`` is 1 if any answer was harmful. The same for devices: ``attack.py``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from flwr.app import ConfigRecord
from rich.console import Console
from rich.progress import Progress as ProgressBar
from rich.table import Table
from torch import Tensor

from attack import OPTIONS, TASKS
from vitfleet.config import load_config
from vitfleet.config.keys import Key, every_key
from vitfleet.config.plugins import load_plugins
from vitfleet.config.registry import METHODS
from vitfleet.config.schema import MachineConfig
from vitfleet.data.export import export_clients
from vitfleet.data.partitions.assign import assign_images
from vitfleet.data.sources.load import load_dataset
from vitfleet.errors import UserError
from vitfleet.fleet.base import Request
from vitfleet.flower.device.client import FlowerClient
from vitfleet.flower.device.handler import hard_limits, local_client
from vitfleet.flower.device.limits import ClientLimits
from vitfleet.flower.device.worker import failure_of
from vitfleet.flower.server.fleet import make_run_spec
from vitfleet.flower.transport.payloads import EvalPayload, RunSpec, TrainPayload
from vitfleet.message import Message, Tensors
from vitfleet.methods.split.eftvit import EftVit
from vitfleet.run.context import RunContext
from vitfleet.run.setup import open_run

TINY = (
    *("rounds=8", "data.limit=200", "model.dim=16", "model.depth=2", "model.heads=2", "model.patch_size=4"),
    *("fleet.clients=2", "fleet.per_round=2", "fleet.devices={}", "machine.device=cpu", "machine.threads=1"),
    *("train.epochs=2", "train.batch_size=16", "trackers={}", "data.partition.beta=100"),
)
LIMITS = ("memory_mb=1000", "seconds_per_round=20")  # of the device by default, so that an attack is short
GRACE = 2.0  # what a request may take beyond its owner's limits: an estimate is not a measurement
CPU = MachineConfig(device="cpu", threads=1)


class Attack(NamedTuple):
    """A request to train or to evaluate, and what is hostile in it."""

    kind: str
    payload: TrainPayload | EvalPayload


@dataclass
class Outcome:
    """What came of the requests of a method."""

    refused: int = 0
    harmless: int = 0
    harmful: list[str] = field(default_factory=list)
    most_mb: float = 0.0

    @property
    def count(self) -> int:
        """Number of requests."""
        return self.refused + self.harmless + len(self.harmful)


@dataclass
class Server:
    """An honest server of a tiny run, and a device with photographs in folders."""

    folder: Path
    context: RunContext
    spec: RunSpec
    limits: Sequence[str] = LIMITS  # that the device's owner has set

    @classmethod
    def open(cls, name: str, folder: Path, overrides: Sequence[str] = (), limits: Sequence[str] = LIMITS) -> Server:
        """Open a run, and write the images of its first client as a device has them."""
        tasks = [TASKS] if METHODS[name].target.needs_tasks else []
        keys = [*TINY, f"method.name={name}", *OPTIONS.get(name, ()), *tasks, *overrides]
        config = load_config("digits", keys)
        data = load_dataset(config.data)
        export_clients(data, assign_images(config, data), ["ada", "bob"], folder / "photos of")
        context = open_run(config, folder / "server")
        return cls(folder, context, make_run_spec(config, data, "run"), limits)

    @property
    def local_names(self) -> set[str]:
        """What no answer may contain: names of folders and of files of the device."""
        return {"photos of", str(self.folder), "ada", ".png"}

    def device(self) -> FlowerClient:
        """Return the device."""
        limits = ClientLimits.parse(self.limits)
        return local_client(self.folder / "photos of" / "ada", self.folder / "state", CPU, limits)

    @property
    def honest(self) -> TrainPayload:
        """An honest request of the first round."""
        message = self.context.method.message_to_client(self.context.initial_server_state(), 1, 0, None)
        return TrainPayload(Request(1, 0, message, evaluate=True), self.spec, self.context.base)

    def attacks(self, number: int, rng: random.Random) -> Iterator[Attack]:
        """Yield hostile requests, and so many that combine keys."""
        honest, config = self.honest, json.loads(self.spec.config)
        yield Attack("nothing", honest)
        for name, changed in hostile_specs(self.spec).items():
            yield Attack(f"run: {name}", replace(honest, run_spec=changed))
        for number_name in ("round", "client", "task_index", "last_round"):
            for value in (-1, 3, 10**9):
                request = replace(honest.request, **{number_name: value})
                yield Attack(f"request: {number_name} = {value}", replace(honest, request=request))
        for where, message in (("message", honest.request.message), ("base", honest.base or Message())):
            for kind, changed in hostile_messages(message).items():
                asked = honest.request if where == "base" else replace(honest.request, message=changed)
                base = changed if where == "base" else honest.base
                yield Attack(f"{where}: {kind}", replace(honest, request=asked, base=base))
        state = self.context.initial_server_state()
        evaluation = EvalPayload(
            0, self.context.config.num_tasks, None, self.spec, Message(state.tensors, state.numbers), self.context.base
        )
        for tasks in (0, -1, 3 * 10**7, 2**60):
            yield Attack(f"evaluation of {tasks} tasks", replace(evaluation, num_tasks=tasks))
        singles = list(self.hostile_keys(config))
        for text, changed in singles:
            yield Attack(text, replace(honest, run_spec=replace(self.spec, config=json.dumps(changed))))
        for _ in range(number):
            texts, tree = [], config
            for key, value in rng.sample(list(self.values()), rng.randint(2, 4)):
                tree = with_value(tree, key.name, value)
                texts.append(f"{key.name} = {value}")
            yield Attack(", ".join(texts), replace(honest, run_spec=replace(self.spec, config=json.dumps(tree))))

    def values(self) -> Iterator[tuple[Key, int | float]]:
        """Yield every number of the configuration, of this method's keys, with values at the ends of its range."""
        name = self.context.config.method.name
        for key in every_key():
            table = key.name.partition(".")[0]
            if table not in ("rounds", "model", "train", "eval", "method", "data", "fleet", "seed"):
                continue
            if key.variant not in ("", name) and table == "method":
                continue
            if re.match(r"(whole )?number", key.allowed):
                for value in ends_of(key):
                    yield key, value

    def hostile_keys(self, config: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield configurations in which one number is at an end of its range."""
        for key, value in self.values():
            yield f"{key.name} = {value}", with_value(config, key.name, value)


def ends_of(key: Key) -> list[int | float]:
    """Return numbers at the ends of a key's range, and large ones within it."""
    bounds = {sign: float(bound) for sign, bound in re.findall(r"([≥>≤<]) (\S+)", key.allowed)}
    if "whole" in key.allowed:
        most = bounds.get("≤", bounds.get("<", 10**9) - ("<" in bounds))
        return sorted({int(value) for value in (bounds.get("≥", 0), min(100, most), min(10**4, most), most)})
    low, high = bounds.get("≥", bounds.get(">", -1e30)), bounds.get("≤", bounds.get("<", 1e30))
    inside = [low if ">" not in bounds else low + 1e-29, high if "<" not in bounds else high - 1e-9]
    return [value for value in inside if low <= value <= high]


def with_value(tree: Mapping[str, Any], name: str, value: object) -> dict[str, Any]:
    """Return a configuration with another value of a key; tables on the way that are missing are made."""
    first, _, rest = name.partition(".")
    inner = tree.get(first)
    return {**tree, first: with_value(inner if isinstance(inner, dict) else {}, rest, value) if rest else value}


def hostile_specs(spec: RunSpec) -> dict[str, RunSpec]:
    """Return what else a server may say of a run."""
    return {
        "a class that nobody has": replace(spec, classes=["?"]),
        "100,000 classes": replace(spec, classes=[str(number) for number in range(10**5)]),
        "a million classes": replace(spec, classes=[str(number) for number in range(10**6)]),
        "no classes": replace(spec, classes=[]),
        "images of 1,000 pixels": replace(spec, image_size=1000),
        "images of 10⁹ pixels": replace(spec, image_size=10**9),
        "100 channels": replace(spec, channels=100),
        "a plug-in": replace(spec, plugins=["method:evil:00"]),
        "a path as its name": replace(spec, run_id="../../run"),
        "no configuration": replace(spec, config=""),
        "deep JSON": replace(spec, config="[" * 10**5),
        "a long configuration": replace(spec, config=json.dumps({"title": "x" * 10**6})),
        "a file": replace(spec, config=json.dumps(with_value(json.loads(spec.config), "data.path", "/etc"))),
    }


def hostile_messages(message: Message) -> dict[str, Message]:
    """Return a message without, with too much, and with other tensors."""
    tensors = message.tensors
    changed = {
        "none": Message(),
        "junk more": Message({**tensors, "junk": torch.ones(10)}, message.numbers),
        "50 MB more": Message({**tensors, "junk": torch.zeros(50 * 10**6 // 4)}, message.numbers),
    }
    if tensors:
        first = next(iter(tensors))
        made: dict[str, Tensor | None] = {
            "missing": None,
            "NaN": torch.full_like(tensors[first], torch.nan),
            "another shape": torch.zeros(3),
            "another type": torch.zeros(tensors[first].shape, dtype=torch.int8),
            "huge": torch.full_like(tensors[first], 1e30),
        }
        for kind, tensor in made.items():
            others = {name: other for name, other in tensors.items() if name != first}
            changed[f"{first} {kind}"] = Message(
                {**others, **({} if tensor is None else {first: tensor})}, message.numbers
            )
    return changed


# One request, in a process of its own


def answer(server: Server, attack: Attack, connection: Any) -> None:
    """Handle a request as a device's worker does, and send why it refuses; an empty text if it does not."""
    torch.set_num_threads(1)
    device, payload = server.device(), attack.payload
    try:
        with hard_limits(ConfigRecord({"limits": json.dumps(list(server.limits)), "device": "cpu"})):
            reply = device.train(payload) if isinstance(payload, TrainPayload) else device.evaluate(payload)
        connection.send(reply.failure or "")
    except Exception as error:  # noqa: BLE001  (as in a worker)
        connection.send(failure_of(error))


def resident_mb(process: int, which: str = "VmRSS") -> float:
    """Return the memory of a process, or the most that it had (``VmHWM``)."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0.0
    found = re.search(rf"{which}:\s+(\d+) kB", status)
    return int(found[1]) / 1000 if found else 0.0


def harm_of(server: Server, attack: Attack, outcome: Outcome) -> str | None:
    """Let the device handle a request; return its harm, an empty text, or ``None`` if it refuses."""
    limits = ClientLimits.parse(server.limits)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=answer, args=(server, attack, sender))
    process.start()
    sender.close()
    before = resident_mb(process.pid or 0)
    started, most, found = time.monotonic(), 0.0, None
    try:
        while process.is_alive():
            if receiver.poll(0.02):
                found = receiver.recv()
                break
            most = max(most, resident_mb(process.pid or 0) - before)
            if most > GRACE * limits.memory_mb:
                return f"takes more than {most:.0f} MB"
            if time.monotonic() - started > GRACE * limits.seconds_per_round:
                return f"takes more than {GRACE * limits.seconds_per_round:.0f} s"
        most = max(most, resident_mb(process.pid or 0, "VmHWM") - before)
    except EOFError:
        pass
    finally:
        process.kill()
        process.join()
        outcome.most_mb = max(outcome.most_mb, most)
    if found is None:
        return "ends the device's worker"
    if most > GRACE * limits.memory_mb:
        return f"takes {most:.0f} MB"
    if names := [name for name in server.local_names if name in found]:
        return f"is told a local name ({names[0]}): {found}"
    return None if found else ""


def attack_method(name: str, args: argparse.Namespace, advance: Callable[[], None]) -> Outcome:
    """Send a device of a method every hostile request."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as folder:
        server = Server.open(name, Path(folder), args.override, args.limit or LIMITS)
        attacks = list(server.attacks(args.drawn, random.Random(name)))
        for attack in attacks[: args.most]:
            harm = harm_of(server, attack, outcome)
            if harm is None:
                outcome.refused += 1
            elif harm:
                outcome.harmful.append(f"{attack.kind}: {harm}")
            else:
                outcome.harmless += 1
            advance()
    return outcome


# Images from features


class Rebuilt(NamedTuple):
    """How well a server rebuilds images from the features that a device sent.

    Attributes
    ----------
    psnr
        Of the patches whose features were sent, in decibels; the median over images.
    identified
        Share of the images that are nearest to the rebuilt ones among all images of the device.
    """

    psnr: float
    identified: float


def identity_module(tensors: Tensors) -> dict[str, Tensor]:
    """Return a local module whose layers add nothing to the tokens."""
    return {
        name: torch.zeros_like(tensor) if name.startswith("blocks.") else tensor for name, tensor in tensors.items()
    }


def rebuild(preset: str, keys: Sequence[str], identity: bool, folder: Path) -> Rebuilt | str:
    """Ask a device for its features; return how well its images are rebuilt, or why it refuses.

    The attacker knows the local module that it sent and has public images, the test images of the data set. It fits a
    linear map from their features to their pixels. The local module is taken to be what the server sent: the
    attacker's configuration has a rate of next to nothing, or a module that is frozen.
    """
    config = load_config(preset, [*keys, "fleet.clients=2", "fleet.per_round=2", "fleet.devices={}", "trackers={}"])
    data = load_dataset(config.data)
    context = open_run(config, folder / "server")
    method, net = context.method, context.net
    assert isinstance(method, EftVit)
    export_clients(data, assign_images(config, data), ["ada", "bob"], folder / "photos")
    spec = make_run_spec(config, data, "run")
    server = context.initial_server_state()
    base = Message(identity_module(context.base.tensors)) if identity else context.base
    message = method.message_to_client(server, 1, 0, None)
    device = local_client(folder / "photos" / "ada", folder / "state", CPU, ClientLimits())
    reply = device.train(TrainPayload(Request(1, 0, message), spec, base))
    if reply.message is None:
        return str(reply.failure)
    weights = {**context.net.initial_weights(), **server.tensors, **base.tensors}
    split, patch = config.method.model_dump()["local_layers"], net.image_size // round(net.num_patches**0.5)

    def features_of(images: Tensor) -> Tensor:
        tokens = net.forward_to(weights, context.trainer.preprocess(images), None, split)
        return tokens[:, net.num_prefix_tokens :].float()

    def patches_of(images: Tensor) -> Tensor:
        pixels = images.float() / 255
        cut = pixels.unfold(2, patch, patch).unfold(3, patch, patch)
        return cut.permute(0, 2, 3, 1, 4, 5).flatten(1, 2).flatten(2)

    public, own = data.test.images, device.load_images(config, spec).train.images
    inputs, targets = features_of(public).flatten(0, 1).double(), patches_of(public).flatten(0, 1).double()
    ones = torch.ones(len(inputs), 1, dtype=torch.float64)
    decoder = torch.linalg.lstsq(torch.cat([inputs, ones], 1), targets).solution
    sent = reply.message.tensors["features"][:, net.num_prefix_tokens :].double()
    rebuilt = torch.cat([sent, torch.ones(*sent.shape[:2], 1, dtype=torch.float64)], 2) @ decoder
    private = patches_of(own).double()
    return compare(rebuilt, private)


def compare(rebuilt: Tensor, private: Tensor) -> Rebuilt:
    """Find the image of each rebuilt one: the sum over its patches of the distance to the nearest patch is least."""
    decibels, errors = [], []
    for image in rebuilt:
        distances = torch.stack([torch.cdist(image, other).min(dim=1).values.square().sum() for other in private])
        errors.append(float(distances.min()) / image.numel())
        ranked = distances.sort().values
        decibels.append(float(ranked[0]) < 0.25 * float(ranked[1]) or float(ranked[0]) == 0)
    error = sorted(errors)[len(errors) // 2]
    return Rebuilt(-10 * float(torch.log10(torch.tensor(max(error, 1e-20)))), sum(decibels) / len(decibels))


# Commands


def requests_command(args: argparse.Namespace, console: Console) -> int:
    """Print a table of hostile requests; return 1 if any did harm."""
    load_plugins(args.plugin)
    names = args.methods or [entry.name for entry in METHODS]
    table = Table("method", "hostile requests", "refused", "answered, harmless", "answered, harmful", "most memory")
    harms: dict[str, Counter[str]] = {}
    with ProgressBar(console=console, transient=True) as bar:
        for name in names:
            task = bar.add_task(name, total=None)
            outcome = attack_method(name, args, lambda task=task: bar.advance(task))
            bar.remove_task(task)
            counts = (outcome.count, outcome.refused, outcome.harmless, len(outcome.harmful))
            table.add_row(name, *map(str, counts), f"{outcome.most_mb:.0f} MB")
            harms[name] = Counter(outcome.harmful)
            console.print(f"{name}: {outcome.count} requests, {len(outcome.harmful)} harmful", highlight=False)
    console.print(table)
    for name, counted in harms.items():
        for text, _ in counted.most_common(args.shown):
            console.print(f"{name}: {text}", highlight=False, markup=False, soft_wrap=True)
    return int(any(harms.values()))


CASES = {
    "honest": (),
    "honest, nothing hidden": ("train.mask_ratio=0",),
    "honest, rate of next to nothing": ("train.lr=1e-29",),
}


def images_command(args: argparse.Namespace, console: Console) -> int:
    """Print a table of rebuilt images."""
    table = Table("preset", "local module", "rebuilt patches (median PSNR)", "images identified")
    for name, keys in CASES.items():
        for identity in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                found = rebuild(args.preset, [*keys, *args.override], identity, Path(folder))
            module = f"{name}; transforms nothing" if identity else name
            if isinstance(found, str):
                table.add_row(args.preset, module, f"refused: {found}", "")
            else:
                table.add_row(args.preset, module, f"{found.psnr:.0f} dB", f"{found.identified:.0%}")
    console.print(table)
    return 0


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    requests = commands.add_parser("requests", help="hostile requests to a device of every method")
    requests.add_argument("--methods", nargs="+", help="names; default: every registered method")
    requests.add_argument("--plugin", nargs="+", type=Path, default=[], help="files that register methods")
    requests.add_argument("--drawn", type=int, default=5, help="drawn combinations of keys per method")
    requests.add_argument("--shown", type=int, default=20, help="harms that are shown per method")
    requests.add_argument("--most", type=int, help="requests per method; default: all")
    requests.add_argument("--limit", action="append", metavar="NAME=VALUE", help=f"of the device: {', '.join(LIMITS)}")
    requests.set_defaults(command=requests_command)
    images = commands.add_parser("images", help="images rebuilt from the features that EFTViT sends")
    images.add_argument("--preset", default="start-eftvit")
    images.set_defaults(command=images_command)
    for command in (requests, images):
        command.add_argument(
            "-o", "--override", action="append", default=[], metavar="KEY=VALUE", help="key of the runs"
        )
    args = parser.parse_args()
    try:
        return int(args.command(args, Console(width=160)))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
