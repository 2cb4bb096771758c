"""Fixtures that many tests share: a tiny model, tiny images, a trainer on the CPU, a tiny run, the command."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from hypothesis import HealthCheck, settings

from vitfleet.cli import main
from vitfleet.cli.base import console
from vitfleet.config import load_config, plugins
from vitfleet.config import registry as registry_module
from vitfleet.config.schema import AugmentConfig, Config, ModelConfig, TrainConfig
from vitfleet.data.images import ImageSet, Shard
from vitfleet.fleet.base import ClientTask, EvalResult
from vitfleet.fleet.client_runtime import ClientRuntime
from vitfleet.fleet.simulation import SimulatedFleet
from vitfleet.message import State, Tensors
from vitfleet.methods import Method, MethodContext
from vitfleet.models.net import Net
from vitfleet.models.zoo import build_model
from vitfleet.run.callbacks import Callback
from vitfleet.run.records import RoundRecord
from vitfleet.run.state import RunState
from vitfleet.training.execution import cpu_bf16
from vitfleet.training.execution.settings import ExecutionSettings
from vitfleet.training.trainer import Trainer, preprocess_for

# A slow test on a busy machine is not a failure.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# Background jobs of a shell may ignore SIGINT, and so would the processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Where the CPU's matrix instructions do not work, tests of bfloat16 use its other ones.
if not cpu_bf16.bf16_runs():
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
    cpu_bf16.product_runs.cache_clear()

pytest_plugins = [
    "emulated_compiler",
    "emulated_graphs",
    "made_photos",
    "made_runs",
    "made_sets",
    "projection_angles",
    "shared_work",
]  # modules of fixtures

CLASSES = 5
SIDE = 8
ROUNDS = 10

NO_IMAGES = Shard(
    ImageSet(torch.empty(0, 1, SIDE, SIDE, dtype=torch.uint8), torch.empty(0, dtype=torch.long)),
    torch.empty(0, dtype=torch.long),
)

MakeTrainer: TypeAlias = Callable[..., Trainer]
MakeContext: TypeAlias = Callable[..., MethodContext]
MakeFleet: TypeAlias = Callable[..., SimulatedFleet]
MakeShard: TypeAlias = Callable[[int, int], Shard]
MakeConfig: TypeAlias = Callable[..., Config]
Command: TypeAlias = Callable[..., subprocess.CompletedProcess[str]]
RecordProperty: TypeAlias = Callable[[str, object], None]


class InterruptAfter(Callback):
    """Interrupts a run when the record of a round is written and its checkpoint is not."""

    def __init__(self, round: int) -> None:
        self.round = round

    def on_round_end(self, state: RunState, record: RoundRecord) -> None:
        if record.round == self.round:
            raise KeyboardInterrupt


# Files that take longest, in the order in which they are started: at the end of a run all cores should be busy.
SLOW_FILES = (
    "flower/test_fleet_commands.py",
    "flower/test_real_fleet.py",
    "test_scripts.py",
    "test_documented_environments.py",
    "training/test_client_stack.py",
    "run/test_continual.py",
    "test_example_methods.py",
    "test_cli.py",
    "flower/test_flower_fleet.py",
    "run/test_solved_head.py",
    "methods/test_closed_form.py",
    "test_docs.py",
    "fleet/test_distributed.py",
    "models/test_net.py",
    "test_notebooks.py",
    "training/test_part_gradients.py",
    "costs/test_flops.py",
    "run/test_server_optimizer.py",
    "run/test_loop.py",
    "report/test_page.py",
    "flower/test_faults.py",
    "flower/test_worker.py",
)


def long_but(cases: Iterable[str], *quick: str) -> list[ParameterSet]:
    """Return cases that are long but for a few: those of mechanisms that the others share."""
    cases = list(cases)
    assert set(quick) <= set(cases)
    return [pytest.param(case, marks=[] if case in quick else pytest.mark.long) for case in cases]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slowest files first."""
    tests = Path(__file__).parent
    ranks = {tests / name: rank for rank, name in enumerate(SLOW_FILES)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests counted (`record_property`): with several processes their own output is not shown."""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, value in report.user_properties:
                terminalreporter.write_line(f"{name}: {value}")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread: more do not speed up tiny tensors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _own_trust(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Remember trusted plug-ins in a folder of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def _registries() -> Iterator[None]:
    """Forget what a test registered."""
    before = {registry: {entry.name: entry for entry in registry} for registry in registry_module.ALL}
    loaded = dict(plugins._loaded)
    yield
    changed = [registry for registry, entries in before.items() if registry._entries != entries]
    for registry in changed:
        registry._entries = before[registry]
    if changed:
        plugins._loaded.clear()
        plugins._loaded.update(loaded)


@pytest.fixture
def tiny_net() -> Net:
    """Return a plain ViT of two layers, 16 wide, on 8 x 8 grey images cut into four patches."""
    return build_model(ModelConfig(dim=16, depth=2, heads=2, patch_size=4), CLASSES, 1, SIDE, seed=0)


@pytest.fixture
def tiny_images() -> ImageSet:
    """Return 40 random grey images of five classes."""
    random = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (40, 1, SIDE, SIDE), generator=random, dtype=torch.uint8)
    labels = torch.randint(0, CLASSES, (40,), generator=random)
    return ImageSet(pixels, labels)


@pytest.fixture
def make_shard(tiny_images: ImageSet) -> MakeShard:
    """Return a function that makes a shard of the images from ``start`` to ``stop``."""

    def make(start: int, stop: int) -> Shard:
        return Shard(tiny_images, torch.arange(start, stop))

    return make


@pytest.fixture
def make_trainer(tiny_net: Net) -> MakeTrainer:
    """Return a function that makes a trainer on the CPU; its arguments are keys of the table ``train``."""

    def make(augment: AugmentConfig | None = None, rounds: int = ROUNDS, **train: object) -> Trainer:
        config = TrainConfig.model_validate(train)
        cpu = torch.device("cpu")
        preprocess = preprocess_for(tiny_net, cpu)
        return Trainer(
            tiny_net, preprocess, config, augment or AugmentConfig(), rounds, ExecutionSettings(cpu, bf16=False)
        )

    return make


def context_of(
    net: Net,
    train: Mapping[str, object] | TrainConfig | None = None,
    num_classes: int = CLASSES,
    rounds: int = ROUNDS,
    num_tasks: int = 1,
    **tables: object,
) -> MethodContext:
    """Return the context of a run on the CPU.

    Parameters
    ----------
    train
        The table ``train``.
    rounds
        Of the run; with several tasks, as many as divide evenly.
    num_tasks
        Tasks of one class each.
    tables
        Further tables and keys of the configuration.
    """
    config: dict[str, object] = {"train": train or {}, **tables}
    if num_tasks > 1:
        tasks = {"count": num_tasks, "classes": 1, "per_client": (1, 1), "rounds_per_task": rounds // num_tasks}
        config["data"] = {"tasks": tasks}
    if "data" not in config:
        config["rounds"] = rounds
    return MethodContext(Config.model_validate(config), net, num_classes, torch.device("cpu"))


@pytest.fixture
def make_context(tiny_net: Net) -> MakeContext:
    """Return a function that makes a method's context: of a number of tasks, and keys of the table ``train``."""

    def make(num_tasks: int = 1, **train: object) -> MethodContext:
        return context_of(tiny_net, train, num_tasks=num_tasks)

    return make


def _evaluate_tasks(weights: Tensors, tasks: Sequence[ClientTask]) -> list[EvalResult]:
    """Return results that depend on the client alone."""
    return [EvalResult(task.client, 10) for task in tasks]


@pytest.fixture
def make_fleet() -> MakeFleet:
    """Return a function that makes a fleet in this process."""

    def make(
        method: Method[Any],
        trainer: Trainer,
        shard: Callable[[int], Shard],
        base: Tensors | None = None,
        client_states: Mapping[int, State] | None = None,
        seed: int = 0,
    ) -> SimulatedFleet:
        return SimulatedFleet(
            runtime=ClientRuntime(method, trainer, seed, _evaluate_tasks),
            shard=lambda client, task_index: shard(client),
            base_weights=base or {},
            stored_state=(client_states or {}).get,
        )

    return make


TINY = (
    "rounds=3",
    "data.limit=300",
    "model.dim=16",
    "model.depth=2",
    "model.heads=2",
    "model.patch_size=4",
    "train.epochs=1",
    "train.batch_size=16",
    "fleet.clients=6",
    "fleet.per_round=3",
    "fleet.devices={}",
    "machine.device=cpu",
    "machine.threads=1",
)


#: The model that the shipped weights are of, for methods that need a pretrained body.
DIGITS_BODY = (
    "model.weights=digits",
    "model.dim=32",
    "model.depth=4",
    "model.heads=4",
    "model.patch_size=2",
)


@pytest.fixture(scope="session")
def tiny_overrides() -> tuple[str, ...]:
    """Return the overrides that make the preset ``digits`` a run of a fraction of a second."""
    return TINY


@pytest.fixture
def tiny_config(tiny_overrides: tuple[str, ...]) -> MakeConfig:
    """Return a function that makes the configuration of a tiny run on digits; its arguments are overrides."""

    def make(*overrides: str) -> Config:
        return load_config("digits", [*tiny_overrides, *overrides])

    return make


# Commands run without the user's data sets, without network and with one thread.
REMOVED_VARIABLES = {"VITFLEET_DATA", "FORCE_COLOR", "COLUMNS"}
SET_VARIABLES = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def executable() -> Path:
    """Return the installed command."""
    return Path(sys.executable).parent / "vitfleet"


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """Return the environment of a command."""
    return {name: value for name, value in os.environ.items() if name not in REMOVED_VARIABLES} | SET_VARIABLES


@pytest.fixture(scope="session")
def vitfleet() -> Command:
    """Return a function that runs the command in a folder, in this process: starting another takes seconds."""

    def run(cwd: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = ["vitfleet", *map(str, arguments)]
        stdout, stderr, code = io.StringIO(), io.StringIO(), 0
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
            patch.chdir(cwd)
            for name in REMOVED_VARIABLES:
                patch.delenv(name, raising=False)
            for name, value in SET_VARIABLES.items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", command)
            patch.setattr(console, "stderr", False)  # --json changes it
            try:
                main()
            except SystemExit as exit:
                code = int(exit.code or 0)
            finally:
                for number, handler in handlers.items():
                    signal.signal(number, handler)
        return subprocess.CompletedProcess(command, code, stdout.getvalue(), stderr.getvalue())

    return run
