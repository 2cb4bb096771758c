"""Every command, option and key that the documentation mentions exists; the cheap commands are executed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
import typer.main

import vitfleet
from conftest import Command
from vitfleet.api.request import combinations, variants
from vitfleet.cli.base import app
from vitfleet.cli.compare import parse_sweep
from vitfleet.config import Config, load_config
from vitfleet.config.keys import every_key
from vitfleet.config.load import parse_overrides
from vitfleet.config.plugins import load_file
from vitfleet.config.registry import ALL, METHODS, PARTITIONS, SERVER_OPTIMIZERS
from vitfleet.errors import UserError

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])

# Commands in code blocks that are only parsed, and why: the others are executed. Every pattern must match something.
NOT_EXECUTED = {
    r"(run|compare|resume) .*(cifar|ucmerced|imagenet)": "needs a data set that is not part of the repository",
    r"data\.path=|--data ": "needs images of the reader's own",
    r"^vitfleet demo ": "serves a page until it is stopped",
    r"^vitfleet predict ": "needs images of the reader's own",
    r"\.toml": "needs a configuration file of the reader's own",
    r"^vitfleet (server|client) ": "waits for other machines",
    r"^vitfleet export .*--to onnx": "needs the extra export, which only the long tests install; they write ONNX files",
    r"^vitfleet export .*runs/fleet": "needs the run of a real fleet, which the server wrote",
    r"^vitfleet compare .*--jobs": "starts one process per run",
    r"^vitfleet cost \S*cifar100$": "takes half a minute: sixteen methods with a ViT-B/16",
    r"--best-of search": "needs the comparison before it, on a data set",
    r"-s .* -s .*--seeds": "trains dozens of runs",
}
# Pages with many training commands, executed by the long tests.
LONG_PAGES = {"researcher", "lecturer", "continual", "costs", "methods", "report", "using-models"}
# Pages whose commands tests/test_documented_environments.py executes.
IN_ENVIRONMENTS = ("README.md", "docs/tutorials/edge-engineer.md")
# What makes a run on digits take about a second.
SMALL = ("data.limit=200", "rounds=1", "train.epochs=1", "model.dim=16", "model.patch_size=4")
SMALL_TASKS = ("data.tasks.rounds_per_task=1", "train.epochs=2", "model.dim=16", "model.patch_size=4")

# Options in the text that are not vitfleet's own.
FOREIGN_OPTIONS = {
    "--enable-supernode-auth": "flower-superlink",
    "--bandwidth": "benchmarks/network.py",
    "--no-compile": "pip",
}
# Attributes in the text that look like keys.
NOT_KEYS = {"data.rng": "of PartitionInput"}
FILE_ENDINGS = (
    ".csv",
    ".json",
    ".jsonl",
    ".md",
    ".onnx",
    ".png",
    ".pt",
    ".pt2",
    ".pte",
    ".py",
    ".safetensors",
    ".toml",
)

CODE_SPAN = re.compile(r"`([^`\n]+)`")
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^(?:\$ )?(?P<launcher>torchrun .*-m )?(?P<command>vitfleet( .*)?)$")


@dataclass(frozen=True)
class DocumentedCommand:
    """A command in a code block."""

    document: Path
    text: str
    arguments: tuple[str, ...]
    launcher: str = ""

    @property
    def reason_not_to_execute(self) -> str | None:
        whole = f"{self.launcher}{self.text}"
        return next((reason for pattern, reason in NOT_EXECUTED.items() if re.search(pattern, whole)), None)


def split_code(document: Path) -> tuple[list[str], list[str]]:
    """Return the lines of a document's code blocks, fenced or indented, and its other lines."""
    code: list[str] = []
    prose: list[str] = []
    fenced = indented = False
    before = ""
    for line in document.read_text(encoding="utf-8").splitlines():
        if line.strip().startswith("```"):
            fenced = not fenced
        elif not fenced and line.strip():
            indented = line.startswith("    ") and (indented or not before.strip())
        (code if fenced or indented else prose).append(line)
        before = line
    return code, prose


def commands_of(document: Path) -> list[DocumentedCommand]:
    found = []
    code, _ = split_code(document)
    for line in re.sub(r"\\\n\s*", " ", "\n".join(code)).splitlines():
        if match := COMMAND.match(line.strip()):
            _, *arguments = shlex.split(match["command"], comments=True)
            text = shlex.join(["vitfleet", *arguments])
            found.append(DocumentedCommand(document, text, tuple(arguments), match["launcher"] or ""))
    return found


def spans_of(document: Path) -> list[str]:
    """Return the code spans of a document, outside of its code blocks."""
    _, prose = split_code(document)
    return CODE_SPAN.findall("\n".join(prose))


COMMANDS = [command for document in DOCUMENTS for command in commands_of(document)]
APPLICATION = typer.main.get_command(app)
assert isinstance(APPLICATION, click.Group)
SUBCOMMANDS = APPLICATION.commands


def identify(value: object) -> str | None:
    if isinstance(value, DocumentedCommand):
        return f"{value.document.stem}: {value.launcher}{value.text}"
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else None


def parse(arguments: tuple[str, ...]) -> list[Config]:
    """Parse a command without executing it; return the configurations that it would run."""
    name, *rest = arguments
    assert name in SUBCOMMANDS, f"vitfleet has no command {name!r}"
    options = SUBCOMMANDS[name].make_context(name, list(rest)).params
    return list(configurations(options))


def configurations(options: dict[str, Any]) -> Iterator[Config]:
    """Yield the configurations of parsed options; the parameters of a plug-in's component cannot be checked."""
    sources = options.get("sources") or [options.get("source")]
    for source in filter(None, sources):
        is_file = "/" in source or source.endswith((".toml", ".json"))
        for _, own in variants(options.get("method") or []):
            for _, swept in combinations(parse_sweep(options.get("sweep") or [])):
                keys = {**parse_overrides(options.get("override", [])), **own, **swept}
                if options.get("plugin") or ".py:" in str(keys.get("method.name")):
                    keys = {key: value for key, value in keys.items() if not key.startswith(("method.", "server."))}
                yield load_config("digits" if is_file else source, keys)


def test_documentation_contains_commands() -> None:
    assert len(COMMANDS) > 30
    assert {"README.md", "first-steps.md", "fleet.md"} <= {command.document.name for command in COMMANDS}


@pytest.mark.parametrize("command", COMMANDS, ids=identify)
def test_documented_command_parses(command: DocumentedCommand) -> None:
    if command.arguments not in {("--help",), ("--version",)}:
        parse(command.arguments)


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(page, marks=pytest.mark.long) if page.stem in LONG_PAGES else page
        for page in DOCUMENTS
        if str(page.relative_to(ROOT)) not in IN_ENVIRONMENTS
    ],
    ids=identify,
)
@pytest.mark.usefixtures("without_figure_files")
def test_documented_commands_execute(document: Path, vitfleet: Command, tmp_path: Path) -> None:
    """Execute the cheap commands of a document one after the other in one folder, as a reader would.

    The repository's examples are in it.
    """
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for command in commands_of(document):
        if command.reason_not_to_execute is None:
            result = vitfleet(tmp_path, *command.arguments, *reduction(command.arguments))
            assert result.returncode == 0, f"{command.text}\n{result.stdout}\n{result.stderr}"


def reduction(arguments: tuple[str, ...]) -> list[str]:
    """Return the overrides that make a training command short."""
    if arguments[0] not in {"run", "compare"}:
        return []
    configs = parse(arguments)
    overrides: tuple[str, ...] = SMALL_TASKS if any(config.data.tasks for config in configs) else SMALL
    if any(config.model.weights for config in configs):  # which fit one model only
        overrides = tuple(override for override in overrides if not override.startswith("model."))
    seeds = ["--seeds", "0"] if "--seeds" in arguments else []  # the last one counts
    return seeds + [part for override in overrides for part in ("-o", override)]


@pytest.mark.usefixtures("without_figure_files")
def test_python_code_of_the_readme_executes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for block in python_blocks(ROOT / "README.md"):
        exec(compile(block, "README.md", "exec"), {})


@pytest.mark.parametrize("page", ["extending", "writing-methods"])
@pytest.mark.usefixtures("without_figure_files")
def test_python_code_of_a_page_for_authors_is_a_plugin(
    page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The methods that it registers are trained, stacked; so is every other component of the page."""
    monkeypatch.chdir(tmp_path)
    before = {registry: set(registry.names()) for registry in ALL}
    (tmp_path / "page.py").write_text("\n".join(python_blocks(ROOT / "docs" / f"{page}.md")), encoding="utf-8")
    load_file(tmp_path / "page.py")
    used = [
        {f"{registry.key}": name}
        for registry in (METHODS, PARTITIONS, SERVER_OPTIMIZERS)
        for name in sorted(set(registry.names()) - before[registry])
    ]
    assert used
    for number, keys in enumerate(used):
        overrides = {**parse_overrides(SMALL), **keys, "machine.stack_size": 3, "machine.workers": 1, "rounds": 2}
        run = vitfleet.train("digits", overrides=overrides, out=tmp_path / str(number))
        assert run.summary["total"]["failures"] == 0, keys
        assert run.summary["execution"]["largest_stack"] > 1, f"{keys}: clients do not stack"


def python_blocks(document: Path) -> list[str]:
    """Return the code blocks in Python of a document."""
    blocks = re.findall(r"^```python\n(.*?)^```", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert blocks
    return blocks


@pytest.mark.parametrize("pattern", NOT_EXECUTED)
def test_exception_from_execution_is_needed(pattern: str) -> None:
    assert any(re.search(pattern, f"{command.launcher}{command.text}") for command in COMMANDS)


@pytest.mark.parametrize("document", DOCUMENTS, ids=identify)
def test_code_spans_name_existing_commands(document: Path) -> None:
    for span in spans_of(document):
        if match := re.fullmatch(r"(?:time )?vitfleet ([a-z].*)", span):
            arguments = tuple(shlex.split(match[1]))
            if any(argument.isupper() for argument in arguments):  # placeholders such as PRESET
                assert arguments[0] in SUBCOMMANDS, span
                continue
            with suppress(click.MissingParameter):  # where the command is only named
                parse(arguments)


@pytest.mark.parametrize("document", DOCUMENTS, ids=identify)
def test_code_spans_name_existing_keys(document: Path) -> None:
    names = {key.name for key in every_key()}
    known = {".".join(name.split(".")[:depth]) for name in names for depth in range(1, name.count(".") + 2)}
    tables = "|".join(sorted({name.split(".")[0] for name in names if "." in name}))
    for span in spans_of(document):
        for key in re.findall(rf"^(?:-o )?['\"]?((?:{tables})\.[a-z0-9_.]+[a-z0-9])", span):
            if not key.endswith(FILE_ENDINGS) and key not in NOT_KEYS:
                assert key in known, f"{document.name}: `{span}`"


@pytest.mark.parametrize("document", DOCUMENTS, ids=identify)
def test_code_spans_name_existing_options(document: Path) -> None:
    known = {option for command in SUBCOMMANDS.values() for parameter in command.params for option in parameter.opts}
    for span in spans_of(document):
        for option in re.findall(r"^(--?[a-z][a-z0-9-]*)", span):
            assert option in known | {"--help", "--version"} | FOREIGN_OPTIONS.keys(), f"{document.name}: `{span}`"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("train digits", AssertionError),
        ("run digits --rounds 3", click.NoSuchOption),
        ("run digit", UserError),
        ("run digits -o train.rate=1", UserError),
        ("compare digits --method 'fed-lora train.rate=1'", UserError),
        ("compare digits -s method.q=1,2", UserError),
        ("cost digits --method fedsgd", UserError),
    ],
)
def test_parse_rejects_what_does_not_exist(arguments: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        parse(tuple(shlex.split(arguments)))
